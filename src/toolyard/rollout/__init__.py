"""Rollouts: from a task to a scored, token-exact trajectory."""
