"""Pages that are tables: groups, calls, changes between two steps, and the waterfall of a step."""
