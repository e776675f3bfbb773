"""The `toolyard` command: thin commands over the package. Nothing here is imported by anything else."""

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells count."""
