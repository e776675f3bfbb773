"""Files that only grow by whole lines, the settings beside them, and the lock of their folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolyard.errors import RecordError
from toolyard.records.jsonl import decode

LOCK = ".lock"
_BLOCK = 1 << 16


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write settings that people read. The file is replaced as a whole.

    Raises:
        RecordError: it cannot be written.
    """
    new = file.with_suffix(".new")
    try:
        new.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(file)
    except OSError as error:
        raise RecordError(f"cannot write {file}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Repair:
    """The repair of a last line without a newline, left by a killed process or a full disk."""

    path: Path
    cut_bytes: int
    """Bytes of a torn line that were removed; 0 if the line was complete and only got its newline."""

    def __str__(self) -> str:
        if self.cut_bytes:
            return f"{self.path}: removed the last line, which was torn ({self.cut_bytes} bytes)"
        return f"{self.path}: added the missing newline to the last line"


class LineFile:
    """A file open for appending; the caller holds the folder's lock. Opening it repairs a torn last line."""

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        """
        Raises:
            RecordError: the file cannot be opened.
        """
        self.path = path
        self._fsync = fsync
        self._torn_at: int | None = None
        is_new = not path.exists()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}") from None
        try:
            # The folder's lock is a separate file, which may have been deleted.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RecordError(f"another run is writing to {path}; wait for it, or choose another folder") from None
        _held.add(self)
        self.is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        """False for a pipe, which cannot be read again."""
        try:
            self.repair = self._repair()
            if fsync and is_new:
                _fsync_folder(path.parent)
        except OSError as error:
            self.close()
            raise RecordError(f"cannot repair the last line of {path}: {error.strerror}") from None

    def append(self, line: bytes) -> None:
        """Write `line`, which ends with a newline: all of it, or nothing.

        Raises:
            RecordError: it could not be written; the file is unchanged.
        """
        try:
            self._cut_torn()
            found = os.fstat(self._fd)
        except OSError as error:
            raise RecordError(self._refusal(error, len(line))) from None
        if not found.st_nlink:
            raise RecordError(f"cannot write {self.path}: it was deleted during the run")
        try:
            rest = memoryview(line)
            while rest:  # usually once: the kernel writes less only above 2 GiB or on a full disk
                rest = rest[os.write(self._fd, rest) :]
            if self._fsync:
                os.fsync(self._fd)
        except OSError as error:
            self._torn_at = found.st_size
            with contextlib.suppress(OSError):  # retried before the next line
                self._cut_torn()
            raise RecordError(self._refusal(error, len(line))) from None

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _cut_torn(self) -> None:
        if self._torn_at is not None:
            os.ftruncate(self._fd, self._torn_at)
            self._torn_at = None

    def _refusal(self, error: OSError, size: int) -> str:
        try:
            free = f"{shutil.disk_usage(self.path.parent).free / 1e6:.1f} MB"
        except OSError:
            free = "unknown space"
        return f"cannot write a line of {size} bytes to {self.path}: {error.strerror}; free space: {free}"

    def _repair(self) -> Repair | None:
        size = os.fstat(self._fd).st_size
        end = whole_end(self._fd, size)
        if end == size:
            return None
        tail = os.pread(self._fd, size - end, end)
        if _is_object(tail):  # only the newline is missing
            os.write(self._fd, b"\n")
            return Repair(self.path, 0)
        os.ftruncate(self._fd, end)
        return Repair(self.path, size - end)


def whole_end(fd: int, size: int) -> int:
    """The end of the last complete line in the first `size` bytes."""
    end = size
    while end:
        start = max(0, end - _BLOCK)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _is_object(line: bytes) -> bool:
    """No proper prefix of a JSON object is an object, so a line that parses is complete."""
    try:
        return isinstance(decode(line), dict)
    except RecordError:
        return False


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FolderLock:
    """Held from `__init__` to `close`, or until the process dies in any way."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            RecordError: another process holds it, or it cannot be created.
        """
        path = folder / LOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RecordError(f"cannot write to {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._fd, 200, 0).decode("ascii", "replace").strip()
            self.close()
            raise RecordError(
                f"another run is writing to {folder}: {holder or 'a process'} holds {path}; wait for it, or choose "
                "another folder"
            ) from None
        except OSError as error:
            self.close()
            raise RecordError(f"cannot lock {path}: {error.strerror}") from None
        _held.add(self)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


_held: weakref.WeakSet[FolderLock | LineFile] = weakref.WeakSet()


def _close_inherited() -> None:
    for lock in list(_held):
        lock.close()


# A forked child shares the locks and would still hold them after we are killed. Closing its copies keeps ours locked.
os.register_at_fork(after_in_child=_close_inherited)
