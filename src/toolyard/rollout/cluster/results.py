"""Finished trajectories on their way from the workers to the dump.

A result is JSON lines: the line of the dump, and if the run is recorded, the request's entries of the tape.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolyard.errors import RecordError
from toolyard.records.writer import LineFile


@dataclass(frozen=True, slots=True)
class Place:
    """Where a result is."""

    shard: str
    """A file in the shared folder; empty if the worker itself has it."""
    offset: int
    size: int
    crc: int


class Results:
    """The results of one worker: in a file of its own in the shared folder, or in memory where there is none."""

    def __init__(self, shard: Path | None) -> None:
        """
        Raises:
            RecordError: the file cannot be created.
        """
        self._name = "" if shard is None else shard.name
        self._file = None if shard is None else LineFile(shard)  # locked: who resumes the run waits until it is closed
        self._end = 0
        self._held: dict[int, bytes] = {}

    def keep(self, index: int, lines: Sequence[bytes]) -> Place:
        """
        Raises:
            RecordError: the disk is full or broken; the file is unchanged.
        """
        data = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in lines)
        place = Place(self._name, self._end, len(data), zlib.crc32(data))
        if self._file is None:
            self._held[index] = data
        else:
            self._file.append(data)
            self._end += len(data)
        return place

    def held(self, index: int) -> bytes | None:
        return self._held.get(index)

    def discard(self, index: int) -> None:
        self._held.pop(index, None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_result(folder: Path, place: Place) -> bytes:
    """Read a result from the shared folder.

    Raises:
        RecordError: it is not there, or damaged.
    """
    path = folder / place.shard
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, place.size, place.offset)
        finally:
            os.close(fd)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    check_result(data, place)
    return data


def check_result(data: bytes, place: Place) -> None:
    """
    Raises:
        RecordError: it is not what was committed.
    """
    if len(data) != place.size or zlib.crc32(data) != place.crc:
        raise RecordError(f"a result of {place.size} bytes in {place.shard or 'a worker'} is damaged")


def results_in(shard: Path) -> Iterator[list[bytes]]:
    """All whole results of a file, each as its lines: those of a run that was killed."""
    lines = list[bytes]()
    with shard.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if lines and not _is_entry(line):
                yield lines
                lines = []
            lines.append(line)
    if lines:
        yield lines


def _is_entry(line: bytes) -> bool:
    """An entry of a tape, not a line of a dump: its encoding begins with these keys."""
    return line.startswith(b'{"request_id":') and b'"kind":' in line[:80]
