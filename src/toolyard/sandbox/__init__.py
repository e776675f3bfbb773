"""Runs model-written programs safely and fast. Stands alone: nothing here knows of rollouts, tools or rewards."""
