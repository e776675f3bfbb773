"""Reading a dump while it grows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from os import PathLike
from pathlib import Path

from toolyard.errors import RecordError
from toolyard.records.dump import DumpLine, OnBadLine, dump_files, read_line, refuse

PAUSE_SECONDS = 0.2
_CHUNK = 1 << 22
"""Bytes read at once, so that a large dump neither fills the memory nor keeps a thread for long."""


async def follow(
    folder: str | PathLike[str], *, pause_seconds: float = PAUSE_SECONDS, on_bad_line: OnBadLine = "raise"
) -> AsyncIterator[DumpLine]:
    """What a folder holds, then what is added, for ever: leave the loop, or cancel it, when you have enough.

    The folder need not exist yet; one file is followed as well. Lines come once, when they are whole, in the order of a
    file; files in the order of their steps. A file that was replaced, or lost lines that had come already, is read from
    its beginning again.

    Raises:
        RecordError: the folder cannot be read, or a line is no trajectory.
    """
    places: dict[Path, _Place] = {}
    while True:
        changed = await asyncio.to_thread(_changed, Path(folder), places)
        for place in changed:
            for found in await asyncio.to_thread(place.read):
                if isinstance(found, RecordError):
                    refuse(found, on_bad_line)
                else:
                    yield found
        if not changed:
            await asyncio.sleep(pause_seconds)


def _changed(folder: Path, places: dict[Path, _Place]) -> list[_Place]:
    """Those that have something to read; new ones are added to `places`."""
    paths = dump_files(folder) if folder.exists() else []
    found = [places.setdefault(path, _Place(path)) for path in paths]
    return [place for place in found if place.has_changed()]


class _Place:
    """How far a file has been read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = self._number = 0
        self._drained: tuple[int, int, int] | None = None
        """The file as it was when there was nothing more to read: half a line must not be read again and again."""

    def has_changed(self) -> bool:
        try:
            return _signature(os.stat(self._path)) != self._drained
        except FileNotFoundError:
            return False  # deleted since it was listed

    def read(self) -> list[DumpLine | RecordError]:
        """Some lines that were not read before, whole ones only; none if there are no more for now."""
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
        """From the offset on, as many whole lines as fit into a chunk; one at least, if there is one."""
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
