"""One program, many inputs: the worker's side (`cases`), and the process that cases are forked from (`parent`)."""
