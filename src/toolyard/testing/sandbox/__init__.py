"""Test suites for sandboxes."""
