"""A test suite for engines, and stand-in servers for their clients."""
