"""Parquet files as JSON lines, so that the index finds their rows as it finds lines: by bytes.

The lines are in unnamed temporary files.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

from toolyard.errors import TaskError
from toolyard.records.jsonl import encode

SUFFIX = ".parquet"
_KEPT = 4
"""Converted files that are kept, since readers often ask for several rows of one."""


class Tables:
    """The files converted last. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._converted: OrderedDict[tuple[int, ...], int] = OrderedDict()
        """Descriptors, by inode, size and time of change."""

    def lines_of(self, fd: int) -> int:
        """A descriptor of the lines of the parquet file `fd`. The caller closes it.

        Raises:
            OSError: it is not parquet, is damaged, or is still being written.
            MissingDependencyError: pyarrow is not installed.
        """
        seen = os.fstat(fd)
        key = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_ctime_ns)
        with self._lock:
            if key not in self._converted:
                self._converted[key] = _converted(fd)
                if len(self._converted) > _KEPT:
                    os.close(self._converted.popitem(last=False)[1])
            self._converted.move_to_end(key)
            return os.dup(self._converted[key])

    def __del__(self) -> None:
        for fd in self._converted.values():
            os.close(fd)


def _converted(fd: int) -> int:
    from toolyard.tasks.parquet_pyarrow import read_parquet

    path = Path(f"/proc/self/fd/{fd}")
    with tempfile.TemporaryFile() as file:
        try:
            for row in read_parquet(path):
                file.write(encode({"damaged": str(row)} if isinstance(row, TaskError) else row) + b"\n")
        except TaskError as error:
            raise OSError(0, str(error).removeprefix(f"{path}: ")) from None
        file.flush()
        return os.dup(file.fileno())
