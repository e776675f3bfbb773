"""A sandbox and a limiter together: what tools and rewards run programs with."""
