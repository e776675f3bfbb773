"""The `toolyard` command: thin commands over the package. Nothing here is imported by anything else."""
