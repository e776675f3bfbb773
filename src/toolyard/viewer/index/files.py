"""The files that a library reads: listed, opened, and cut into lines. Nothing outside the folder is ever opened."""

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

MAX_LINE = 1 << 28
"""Longer lines are damaged: something that is no dump must not fill the memory."""
_BLOCK = 1 << 22
_DIGITS = re.compile(r"(\d+)")


class Signature(NamedTuple):
    """Changes whenever the file does. Not with `mtime`, which programs that copy files set as they like."""

    inode: int
    size: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Signature:
        return cls(found.st_ino & ((1 << 63) - 1), found.st_size, found.st_ctime_ns)  # SQLite's integers have a sign


@dataclass(frozen=True, slots=True)
class DumpFile:
    name: str
    """Relative to the folder, as text that any program takes."""
    path: Path
    """Without any link in it."""
    run: str
    """The sub-folder, or "" for the folder's own files."""
    step: int
    """By its name; 0 if that is something else."""
    signature: Signature

    @property
    def place(self) -> str:
        """Sorts files by run and step: run2 before run10, and the folder's own first of all. No two are equal."""
        own = self.name.removeprefix(f"{self.run}/")
        natural = "/".join(_DIGITS.sub(lambda found: found[0].zfill(20), part) for part in (self.run, own))
        return f"{natural} {self.name}"


class Source:
    """A folder with a dump, or with sub-folders that are dumps, or one file."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            RecordError: there is nothing, or it cannot be read.
        """
        try:
            self.real = path.resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle; a NUL in the name
            raise RecordError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        self.is_file = not self.real.is_dir()
        if self.is_file and not self.real.is_file():
            raise RecordError(f"{path} is neither a folder nor a plain file")
        self.root = self.real.parent if self.is_file else self.real

    def files(self) -> list[DumpFile]:
        """What is not a plain file is left out, and so are links that lead outside the folder, or to a file that is
        listed by its own name.

        Raises:
            RecordError: the folder cannot be read.
        """
        if self.is_file:
            return self._plain([self.real], "", linked=False)
        found = self._plain(dump_files(self.root), "", linked=False)
        for run, linked in self._runs():
            try:
                found += self._plain(dump_files(run), run.name, linked=linked)
            except RecordError:
                continue  # not ours to read, or gone in the meantime
        names = {file.path: file.name for file in found if _name(self.root, file.path) == file.name}
        return [file for file in found if names.get(file.path, file.name) == file.name]

    def _runs(self) -> list[tuple[Path, bool]]:
        """Sub-folders, and whether they are links."""
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
                continue  # gone in the meantime
            if real is not None and stat.S_ISREG(seen.st_mode):
                step = int(path.stem) if re.fullmatch("[0-9]{1,18}", path.stem) else 0
                found.append(DumpFile(_name(self.root, path), real, _text(run), step, Signature.of(seen)))
        return found

    def _inside(self, path: Path) -> Path | None:
        """Where it really is; None if that is nowhere, or outside the folder."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return None
        return real if real.is_relative_to(self.root) else None

    @contextmanager
    def opened(self, file: DumpFile) -> Generator[int]:
        """A descriptor to read from.

        Raises:
            OSError: it cannot be opened, or is something else by now.
        """
        if file.path.resolve() != file.path:
            raise OSError(0, "it has become a link")
        # Without O_NONBLOCK, a pipe that somebody put there would make us wait for ever.
        fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(0, "it is not a plain file")
            yield fd
        finally:
            os.close(fd)


class Line(NamedTuple):
    start: int
    size: int
    """With its newline."""
    text: bytes | None
    """None: longer than MAX_LINE."""
    ended: bool
    """Has its newline; only the last may not."""


def lines_between(fd: int, start: int, end: int) -> Iterator[Line]:
    """All lines, empty ones too. `start` is where a line begins; what is beyond `end` is not read.

    Raises:
        OSError: it cannot be read.
    """
    held: list[bytes] = []
    size = 0
    """Of the line that has begun, of which `held` are the blocks."""
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


def _name(root: Path, path: Path) -> str:
    return _text(path.relative_to(root).as_posix())


def _text(name: str) -> str:
    """File names are bytes; those that are no text are spelled out."""
    return name.encode("utf-8", "backslashreplace").decode()
