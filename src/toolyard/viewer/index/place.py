"""The folder of an index and its locks. It is next to the dump, or in the cache if the dump is not writable.

    DIR/.toolyard-index/<code>/             the index of the whole folder, in the format with this fingerprint
    DIR/.toolyard-index/<code>-<file>/      the index of one file in it
        in-use                              locked (shared) by every process that has it open, so that none removes it
        writing                             locked by the process that updates it

Locks are kernel locks: they end with the process, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import unicodedata
import zlib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolyard import settings
from toolyard._version import __version__
from toolyard.errors import RecordError
from toolyard.viewer.index.files import Source

FOLDER = ".toolyard-index"
_NAME = re.compile(r"[0-9a-f]{12}(-[0-9a-f]{8})?")
FORMAT = 4
"""Increment it with every change to what an index stores about a line; `test_viewer_index_format.py` checks that."""


def fingerprint() -> str:
    """The name of indexes made by this version of the code. An index with another name is not used."""
    return hashlib.sha256(f"{__version__} {FORMAT} {unicodedata.unidata_version}".encode()).hexdigest()[:12]


class IndexFolder:
    """The folder of one index, in use until `close`."""

    def __init__(self, root: Path, name: str) -> None:
        """
        Raises:
            OSError: it cannot be created or used, or is a symbolic link.
        """
        self.folder = root / name
        if _own_folder(root):
            (root / ".gitignore").write_text("*\n")
        _own_folder(self.folder)
        self._in_use = self._locked_in_use()
        try:
            self._writing = _open(self.folder / "writing")
        except OSError:
            os.close(self._in_use)
            raise
        with suppress(OSError):
            _remove_others(root, name)

    def close(self) -> None:
        if self._in_use >= 0:
            os.close(self._writing)
            os.close(self._in_use)
            self._in_use = -1

    def is_there(self) -> bool:
        """Whether it still exists; it may have been removed, perhaps with the dump."""
        return _is_at(self._in_use, self.folder / "in-use") and _is_at(self._writing, self.folder / "writing")

    @contextmanager
    def writing(self) -> Generator[bool]:
        """Take the write lock if it is free, without waiting. Yields whether it was taken."""
        try:
            fcntl.flock(self._writing, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._writing, fcntl.LOCK_UN)

    @contextmanager
    def alone(self) -> Generator[bool]:
        """Yields whether no other process has it open; if so, none can open it until the end."""
        try:
            fcntl.flock(self._in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            granted = True
        except BlockingIOError:
            granted = False
        try:
            yield granted
        finally:
            fcntl.flock(self._in_use, fcntl.LOCK_SH)

    def _locked_in_use(self) -> int:
        path = self.folder / "in-use"
        while True:
            fd = _open(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
            except OSError:
                os.close(fd)
                raise
            if _is_at(fd, path):
                return fd
            os.close(fd)  # removed while we waited
            _own_folder(self.folder)


def find_index_folder(source: Source, index_dir: Path | None) -> IndexFolder:
    """
    Raises:
        RecordError: no candidate is writable.
    """
    name = fingerprint()
    if source.is_file:
        name += f"-{zlib.crc32(os.fsencode(source.real.name)):08x}"
    roots = [index_dir.absolute()] if index_dir else [source.root / FOLDER, _cached(source.root)]
    problems: list[str] = []
    for root in roots:
        try:
            if root != source.root / FOLDER:  # do not re-create a dump folder that was deleted
                root.parent.mkdir(parents=True, exist_ok=True)
            return IndexFolder(root, name)
        except OSError as error:
            problems.append(f"{root}: {error.strerror or error}")
    raise RecordError(
        f"no writable folder for the index of {source.real} ({'; '.join(problems)}); set TOOLYARD_CACHE_DIR to one"
    )


def _cached(root: Path) -> Path:
    return settings.cache_dir().absolute() / "viewer" / hashlib.sha256(os.fsencode(root)).hexdigest()[:16]


def _own_folder(path: Path) -> bool:
    """Create the folder unless it exists. Returns whether it was created. Refuses symbolic links, so that nothing is
    written elsewhere."""
    try:
        path.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise OSError(errno.ENOTDIR, "not a folder, or a symbolic link") from None
        return False
    return True


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def _remove_others(root: Path, name: str) -> None:
    """Remove unused indexes of other versions of the code."""
    for other in root.iterdir():
        if _NAME.fullmatch(other.name) and other.name[:12] != name[:12]:
            with suppress(OSError):
                fd = os.open(other / "in-use", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other, ignore_errors=True)
                finally:
                    os.close(fd)
