"""Limits on what is in flight: permits, held with `async with`, fair between tenants, through any crash."""
