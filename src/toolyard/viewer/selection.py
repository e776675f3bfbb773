"""Copies the lines that match a query into another file, byte for byte: a smaller dump, or the start of a data set."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import BinaryIO, NamedTuple

from toolyard.errors import ConfigError
from toolyard.viewer.library import Library
from toolyard.viewer.query import Query
from toolyard.whole_file import whole_file

_REPORTED = 500
"""Lines between two calls of `Progress`."""

Progress = Callable[[int, int], None]
"""Called with the lines done and the total lines."""


class Copied(NamedTuple):
    lines: int
    size: int
    """In bytes."""
    damaged: int
    """Lines left out because they are damaged, or were changed after they were indexed."""


def write_selection(
    library: Library,
    path: str | PathLike[str],
    query: Query,
    *,
    limit: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Copied:
    """Write the lines that match `query`, in its order, to the file `path`, which appears when it is complete.

    Raises:
        ConfigError: the file exists, cannot be written, or belongs to the dump itself.
    """
    target = Path(path)
    if library.has_file(target):
        raise ConfigError(f"{target} belongs to the dump; choose another name")
    with whole_file(target, overwrite=overwrite) as file:
        return copy_lines(library, file, query, limit=limit, progress=progress)


def copy_lines(
    library: Library, file: BinaryIO, query: Query, *, limit: int | None = None, progress: Progress | None = None
) -> Copied:
    """Like `write_selection`, to an open file."""
    lines = size = damaged = 0
    total = library.count(query) if limit is None else min(limit, library.count(query))
    for done, line in enumerate(library.lines(query, limit=total), 1):
        if line is None:
            damaged += 1
        else:
            lines += 1
            size += file.write(line)
            if not line.endswith(b"\n"):  # the last line of a file may lack it
                size += file.write(b"\n")
        if progress is not None and (done % _REPORTED == 0 or done == total):
            progress(done, total)
    return Copied(lines, size, damaged)
