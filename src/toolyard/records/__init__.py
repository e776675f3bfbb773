"""Records: what is kept of a run. Dumps of trajectories and tapes, as JSON lines."""
