"""Training: trajectories become samples, and trainers of others get our rollouts."""
