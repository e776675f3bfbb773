"""One request, from PENDING to its trajectory: what decides, what acts, and how it ends."""
