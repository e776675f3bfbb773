"""Sandboxes and limits together: what tools and rewards run programs with."""
