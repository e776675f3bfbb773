"""Watching a run from outside: metrics, logs, and the page that `toolyard top` reads."""
