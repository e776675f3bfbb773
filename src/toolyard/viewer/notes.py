"""Saved views and notes, in a file beside the dump that people can read and edit.

    notes = Notes(library.folder)
    notes.save_view("hard ones", "score<0.5 sort:-time")
    notes.write(row, "counts the red ones twice")

A note belongs to a request id and a step, so it survives a new index, and a line that moves in its file. It is kept in
the folder of its run, also if a folder of several runs is open. Every change reads the file again under a lock and
changes one entry, so several people and viewers can write at once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from toolyard.errors import ConfigError, RecordError
from toolyard.messages import JSON
from toolyard.viewer.protocol import Row
from toolyard.viewer.query import parse_query
from toolyard.whole_file import whole_file

FILE = "toolyard-notes.json"
_LOCK = ".toolyard-notes.lock"
MAX_TEXT = 20_000
MAX_NAME = 100
_MAX_BYTES = 64 << 20

_Key = tuple[str, int]
"""Request id and step."""


@dataclass(slots=True)
class _Content:
    """What a file says."""

    views: dict[str, str] = field(default_factory=dict[str, str])
    """Queries by name."""
    notes: dict[_Key, str] = field(default_factory=dict[_Key, str])
    rest: JSON = field(default_factory=dict[str, Any])
    """Other keys: kept as they are."""


class Notes:
    """The notes of one folder and of the runs in it. All methods are thread-safe, and raise RecordError if a file
    cannot be read."""

    def __init__(self, folder: Path, *, read_only: str = "") -> None:
        """`read_only`: why nothing may be written; empty if it may."""
        self.folder = folder
        self._read_only = read_only
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[tuple[int, ...], _Content]] = {}

    @property
    def read_only(self) -> str:
        """Why nothing can be written; empty if it can."""
        if not self._read_only and not os.access(self.folder, os.W_OK | os.X_OK):
            return f"notes are kept in {FILE} beside the dump, and this folder is not writable"
        return self._read_only

    # Views ------------------------------------------------------------------------------------------------------------

    def views(self) -> dict[str, str]:
        """Queries by name, sorted by name."""
        return dict(sorted(self._content(self.folder).views.items()))

    def save_view(self, name: str, query: str) -> None:
        """
        Raises:
            QueryError: the query is not valid.
            ConfigError: the name is empty or too long.
            RecordError: it cannot be written.
        """
        parse_query(query)
        name = " ".join(name.split())
        if not 0 < len(name) <= MAX_NAME:
            raise ConfigError(f"a view needs a name of 1 to {MAX_NAME} characters, not {len(name)}")
        self._change(self.folder, lambda content: content.views.update({name: query}))

    def remove_view(self, name: str) -> None:
        """Remove it, if it exists. Raises as `save_view`."""
        self._change(self.folder, lambda content: content.views.pop(name, None))

    # Notes ------------------------------------------------------------------------------------------------------------

    def of(self, row: Row) -> str:
        """The note on a trajectory; empty if there is none."""
        return self._content(self._folder_of(row)).notes.get(_key(row), "")

    def noted(self, rows: Iterable[Row]) -> set[int]:
        """The numbers of the rows that have a note."""
        known: dict[str, _Content] = {}
        found: set[int] = set()
        for row in rows:
            run = row.file.rpartition("/")[0]
            if run not in known:
                known[run] = self._content(self._folder_of(row))
            if _key(row) in known[run].notes:
                found.add(row.number)
        return found

    def write(self, row: Row, text: str, *, was: str = "") -> str:
        """Write the note on a trajectory; an empty one removes it. Returns the note as it is now.

        `was`: the note that the editor began with. If somebody has changed it meanwhile, both texts are kept.

        Raises:
            ConfigError: the text is too long.
            RecordError: it cannot be written.
        """
        text = text.strip()
        key = _key(row)

        def merge(content: _Content) -> None:
            now = content.notes.get(key, "")
            merged = text if now in ("", was.strip(), text) else "\n\n".join(part for part in (now, text) if part)
            if len(merged) > MAX_TEXT:
                raise ConfigError(f"a note has at most {MAX_TEXT} characters; this one has {len(merged)}")
            if merged:
                content.notes[key] = merged
            else:
                content.notes.pop(key, None)

        return self._change(self._folder_of(row), merge).notes.get(key, "")

    # ------------------------------------------------------------------------------------------------------------------

    def _folder_of(self, row: Row) -> Path:
        return self.folder / row.file.rpartition("/")[0]

    def _content(self, folder: Path) -> _Content:
        """What the folder's file says; read again if it has changed."""
        path = folder / FILE
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return _Content()
        except OSError as error:
            raise RecordError(f"cannot read {path}: {error.strerror}") from None
        seen = found.st_ino, found.st_size, found.st_mtime_ns
        with self._lock:
            if path in self._known and self._known[path][0] == seen:
                return self._known[path][1]
        content = _read(path)
        with self._lock:
            self._known[path] = seen, content
        return content

    def _change(self, folder: Path, change: Callable[[_Content], object]) -> _Content:
        if self.read_only:
            raise RecordError(f"cannot write notes: {self.read_only}")
        path = folder / FILE
        try:
            with _locked(folder):
                content = _read(path)
                change(content)
                with whole_file(path) as file:
                    file.write(_written(content))
                return content
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}") from None


def _key(row: Row) -> _Key:
    """verl's lines have no request id; they are named by their file and line."""
    return row.request_id or f"{row.file.rpartition('/')[2]}:{row.line}", row.step


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Wait for other editors. The lock ends with the process, however it ends."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:  # made by another user: reading is enough to lock it, except over NFS
        fd = os.open(folder / _LOCK, os.O_RDONLY | flags)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _read(path: Path) -> _Content:
    """
    Raises:
        RecordError: it is not a file of notes.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(0, "it is not a regular file")
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return _Content()
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise RecordError(f"cannot read {path}: {why}") from None
    try:
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
        return _parsed(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not a file of notes: {error}; correct it, or move it away") from None


def _parsed(told: Any) -> _Content:
    """
    Raises:
        ValueError: something is missing, or has another type.
    """
    if not isinstance(told, dict):
        raise ValueError("expected an object with views and notes")
    rest = cast("JSON", told)
    views, notes = rest.pop("views", {}), rest.pop("notes", [])
    if not isinstance(views, dict) or not all(isinstance(query, str) for query in cast("JSON", views).values()):
        raise ValueError("expected views as an object of name and query")
    if not isinstance(notes, list):
        raise ValueError("expected notes as a list")
    found: dict[_Key, str] = {}
    for at, note in enumerate(cast("list[Any]", notes)):
        match note:
            case {"request_id": str(request_id), "step": int(step), "text": str(text)}:
                found[request_id, step] = text
            case _:
                raise ValueError(f"notes[{at}]: expected request_id, step and text")
    return _Content(cast("dict[str, str]", views), found, rest)


def _written(content: _Content) -> bytes:
    notes = [
        {"request_id": request_id, "step": step, "text": text}
        for (request_id, step), text in sorted(content.notes.items(), key=lambda note: (note[0][1], note[0][0]))
    ]
    told = {"views": dict(sorted(content.views.items())), "notes": notes, **content.rest}
    text = json.dumps(told, indent=2, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "replace")  # a lone surrogate is not UTF-8
