"""A test suite for limiters."""
