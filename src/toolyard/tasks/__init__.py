"""Tasks: what a rollout begins with, from files of several shapes."""
