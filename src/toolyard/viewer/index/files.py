"""The files of a library: listed, opened, and split into lines. Nothing outside the folder is ever opened."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolyard.errors import RecordError
from toolyard.records.dump import dump_files
from toolyard.viewer.index.tables import SUFFIX, Tables

_SHARDS = "shards"
"""The folder where the workers of a cluster write their results, before they are in the dump."""
MAX_LINE = 1 << 28
"""Longer lines count as damaged: a file that is not a dump must not fill the memory."""
_BLOCK = 1 << 22
_DIGITS = re.compile(r"(\d+)")


class Signature(NamedTuple):
    """Changes whenever the file does. Without `mtime`, which copying programs set freely."""

    inode: int
    size: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Signature:
        return cls(found.st_ino & ((1 << 63) - 1), found.st_size, found.st_ctime_ns)  # SQLite's integers are signed


@dataclass(frozen=True, slots=True)
class DumpFile:
    name: str
    """Relative to the folder, as valid UTF-8."""
    path: Path
    """Without symbolic links."""
    run: str
    """The subfolder, or "" for files of the folder itself."""
    step: int
    """From its name; 0 if that is not a number."""
    signature: Signature

    @property
    def is_table(self) -> bool:
        """Whether it is parquet; it is then read as the JSON lines of its rows."""
        return self.path.suffix == SUFFIX

    @property
    def place(self) -> str:
        """Unique sort key by run and step: run2 before run10, and files of the folder itself first."""
        own = self.name.removeprefix(f"{self.run}/")
        natural = "/".join(_DIGITS.sub(lambda found: found[0].zfill(20), part) for part in (self.run, own))
        return f"{natural} {self.name}"


class Source:
    """A dump, a folder of dumps, or one file."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            RecordError: it does not exist or cannot be read.
        """
        try:
            self.real = path.resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:  # a symlink loop; a NUL in the name
            raise RecordError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        self.is_file = not self.real.is_dir()
        if self.is_file and not self.real.is_file():
            raise RecordError(f"{path} is neither a folder nor a regular file")
        self.root = self.real.parent if self.is_file else self.real
        self._tables = Tables()

    def files(self) -> list[DumpFile]:
        """The regular files. Links that lead outside the folder, or to a file that is listed itself, are left out.

        Raises:
            RecordError: the folder cannot be read.
        """
        if self.is_file:
            return self._plain([self.real], "", linked=False)
        found = self._plain(_dump_and_completions(self.root), "", linked=False)
        for run, linked in self._runs():
            try:
                found += self._plain(_dump_and_completions(run), run.name, linked=linked)
            except RecordError:
                continue  # not readable, or gone meanwhile
        names = {file.path: file.name for file in found if _name(self.root, file.path) == file.name}
        return [file for file in found if names.get(file.path, file.name) == file.name]

    def _runs(self) -> list[tuple[Path, bool]]:
        """Subfolders, and whether they are links."""
        try:
            with os.scandir(self.root) as entries:
                found = [(Path(entry.path), entry.is_symlink()) for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            raise RecordError(f"cannot read {self.root}: {error.strerror}") from None
        insides = [(path, linked) for path, linked in found if not linked or self._inside(path) is not None]
        return sorted((path, linked) for path, linked in insides if path.suffix != ".jsonl" and path.is_dir())

    def _plain(self, paths: list[Path], run: str, *, linked: bool) -> list[DumpFile]:
        found: list[DumpFile] = []
        for path in paths:
            try:
                real, seen = path, os.lstat(path)
                if linked or stat.S_ISLNK(seen.st_mode):
                    real = self._inside(path)
                    seen = os.lstat(real or path)
            except OSError:
                continue  # gone meanwhile
            if real is not None and stat.S_ISREG(seen.st_mode):
                step = int(path.stem) if re.fullmatch("[0-9]{1,18}", path.stem) else 0
                found.append(DumpFile(_name(self.root, path), real, _text(run), step, Signature.of(seen)))
        return found

    def _inside(self, path: Path) -> Path | None:
        """Its real path; None if it does not exist or is outside the folder."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return None
        return real if real.is_relative_to(self.root) else None

    @contextmanager
    def opened(self, file: DumpFile) -> Generator[int]:
        """A descriptor to read lines from.

        Raises:
            OSError: it cannot be opened, is not a regular file any more, or is a damaged table.
            MissingDependencyError: it is a table, and pyarrow is not installed.
        """
        if file.path.resolve() != file.path:
            raise OSError(0, "it has become a link")
        # Without O_NONBLOCK, opening a named pipe in its place would block forever.
        fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(0, "it is not a regular file")
            if file.is_table:
                fd, table = self._tables.lines_of(fd), fd
                os.close(table)
            yield fd
        finally:
            os.close(fd)


class Line(NamedTuple):
    start: int
    size: int
    """Including its newline."""
    text: bytes | None
    """None: longer than MAX_LINE."""
    ended: bool
    """Whether it has its newline; only the last line may lack it."""


def lines_between(fd: int, start: int, end: int) -> Iterator[Line]:
    """All lines, including empty ones. `start` must be the start of a line; nothing beyond `end` is read.

    Raises:
        OSError: it cannot be read.
    """
    held: list[bytes] = []
    size = 0
    """Size so far of the current line; `held` are its blocks."""
    at = start
    while at < end and (block := os.pread(fd, min(_BLOCK, end - at), at)):
        at += len(block)
        first, *rest = block.split(b"\n")
        size += len(first)
        if size <= MAX_LINE:
            held.append(first)
        else:
            held.clear()
        for following in rest:
            yield Line(start, size + 1, b"".join(held) if size <= MAX_LINE else None, True)
            start += size + 1
            held, size = [following], len(following)
    if size:
        yield Line(start, size, b"".join(held) if size <= MAX_LINE else None, False)


def _dump_and_completions(folder: Path) -> list[Path]:
    """The files of a dump, or the results of a cluster's workers, then those that TRL writes."""
    found = sorted(folder.glob("*.jsonl")) if folder.name == _SHARDS else dump_files(folder)
    return [*found, *sorted(folder.glob(f"completions_*{SUFFIX}"))]


def _name(root: Path, path: Path) -> str:
    return _text(path.relative_to(root).as_posix())


def _text(name: str) -> str:
    """A file name as valid UTF-8: other bytes are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()
