"""One program, many inputs: the worker's part (`cases`), and the process that cases are forked from (`parent`)."""
