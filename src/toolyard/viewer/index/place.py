"""Where an index lies: beside the dump, or in the cache if nothing can be written there; who uses it, who writes it.

    DIR/.toolyard-index/<code>/             an index of the whole folder, in the format with this fingerprint
    DIR/.toolyard-index/<code>-<file>/      of one file in it
        in-use                              locked (shared) by all who have it open, so that nobody removes it
        writing                             locked by the one who brings it up to date

Locks are the kernel's: they end with the process, however it ends.
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
FORMAT = 1
"""Raise it with every change to what an index says of a line; `test_viewer_index_format.py` notices when you forget."""


def fingerprint() -> str:
    """What this code's indexes are called. An index with another name is not used."""
    return hashlib.sha256(f"{__version__} {FORMAT} {unicodedata.unidata_version}".encode()).hexdigest()[:12]


class Place:
    """The folder of one index, in use until `close`."""

    def __init__(self, root: Path, name: str) -> None:
        """
        Raises:
            OSError: it can neither be made nor used, or is a link to somewhere else.
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
        """Whether it was not removed meanwhile; with the dump, perhaps."""
        return _is_at(self._in_use, self.folder / "in-use") and _is_at(self._writing, self.folder / "writing")

    @contextmanager
    def writing(self) -> Generator[bool]:
        """The right to write, if nobody has it: does not wait."""
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
        """Whether nobody else has it open, or can open it until the end."""
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


def find_place(source: Source, index_dir: Path | None) -> Place:
    """
    Raises:
        RecordError: there is none that can be written.
    """
    name = fingerprint()
    if source.is_file:
        name += f"-{zlib.crc32(os.fsencode(source.real.name)):08x}"
    roots = [index_dir.absolute()] if index_dir else [source.root / FOLDER, _cached(source.root)]
    problems: list[str] = []
    for root in roots:
        try:
            if root != source.root / FOLDER:  # that one must not bring a folder back that was deleted
                root.parent.mkdir(parents=True, exist_ok=True)
            return Place(root, name)
        except OSError as error:
            problems.append(f"{root}: {error.strerror or error}")
    raise RecordError(
        f"there is no place for the index of {source.real} ({'; '.join(problems)}); name one that can be written with "
        "TOOLYARD_CACHE_DIR"
    )


def _cached(root: Path) -> Path:
    return settings.cache_dir().absolute() / "viewer" / hashlib.sha256(os.fsencode(root)).hexdigest()[:16]


def _own_folder(path: Path) -> bool:
    """Make it, unless it is there; whether it was made. A link to elsewhere is refused: nothing is written outside."""
    try:
        path.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise OSError(errno.ENOTDIR, "it is no folder, or a link to one") from None
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
    """Indexes of other code that nobody uses."""
    for other in root.iterdir():
        if _NAME.fullmatch(other.name) and other.name[:12] != name[:12]:
            with suppress(OSError):
                fd = os.open(other / "in-use", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other, ignore_errors=True)
                finally:
                    os.close(fd)
