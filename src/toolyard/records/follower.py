"""Reading a dump while it grows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from os import PathLike
from pathlib import Path

from toolyard.errors import RecordError
from toolyard.records.dump import DumpLine, OnBadLine, dump_files, handle_bad_line, read_line

PAUSE_SECONDS = 0.2
_CHUNK = 1 << 22
"""Bytes per read, so that a large dump neither fills the memory nor occupies a thread for long."""


async def follow(
    folder: str | PathLike[str], *, pause_seconds: float = PAUSE_SECONDS, on_bad_line: OnBadLine = "raise"
) -> AsyncIterator[DumpLine]:
    """Yield all lines of a dump, then new ones as they are added, forever: leave the loop or cancel it to stop.

    `folder` may also be a single file, and need not exist yet. Each line is yielded once, when it is complete; lines in
    file order, files in step order. A file that was replaced or has shrunk is read again from the beginning.

    Raises:
        RecordError: the folder cannot be read, or a line is not a trajectory.
    """
    files: dict[Path, _FollowedFile] = {}
    while True:
        changed = await asyncio.to_thread(_changed, Path(folder), files)
        for file in changed:
            for found in await asyncio.to_thread(file.read):
                if isinstance(found, RecordError):
                    handle_bad_line(found, on_bad_line)
                else:
                    yield found
        if not changed:
            await asyncio.sleep(pause_seconds)


def _changed(folder: Path, files: dict[Path, _FollowedFile]) -> list[_FollowedFile]:
    """The files with something new to read; new files are added to `files`."""
    paths = dump_files(folder) if folder.exists() else []
    found = [files.setdefault(path, _FollowedFile(path)) for path in paths]
    return [file for file in found if file.has_changed()]


class _FollowedFile:
    """A file and how far it has been read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = self._number = 0
        self._drained: tuple[int, int, int] | None = None
        """The file's signature when everything was read, so that half a line is not read over and over."""

    def has_changed(self) -> bool:
        try:
            return _signature(os.stat(self._path)) != self._drained
        except FileNotFoundError:
            return False  # deleted since it was listed

    def read(self) -> list[DumpLine | RecordError]:
        """Read some new complete lines; an empty list if there are none for now."""
        try:
            with self._path.open("rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._number = found.st_ino, 0, 0
                chunk = self._whole_lines(file.fileno(), found.st_size)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordError(f"cannot read {self._path}: {error.strerror}") from None
        self._offset += len(chunk)
        if not chunk or self._offset == found.st_size:
            self._drained = _signature(found)
        return [self._line(line) for line in chunk.split(b"\n")[:-1] if self._counts(line)]

    def _counts(self, line: bytes) -> bool:
        self._number += 1
        return bool(line.strip())

    def _line(self, line: bytes) -> DumpLine | RecordError:
        try:
            return read_line(self._path, self._number, line)
        except RecordError as error:
            return error

    def _whole_lines(self, fd: int, size: int) -> bytes:
        """As many complete lines from the offset as fit into a chunk; at least one if there is one."""
        read = bytearray()
        while self._offset + len(read) < size:
            piece = os.pread(fd, _CHUNK, self._offset + len(read))
            if not piece:
                break
            end = piece.rfind(b"\n")
            if end >= 0:
                return bytes(read) + piece[: end + 1]
            read += piece
        return b""


def _signature(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns
