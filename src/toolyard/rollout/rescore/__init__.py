"""A dump scored again, offline."""
