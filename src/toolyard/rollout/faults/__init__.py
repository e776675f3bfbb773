"""Faults on purpose: `profile` says which and how often, `inject` and `proxy` make them, `report` counts them."""
