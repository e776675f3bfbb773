"""The tables of an index, and the connections to them.

SQLite with a rollback journal, not a write-ahead log: it is as safe after a kill, and works on network file systems,
where dumps often are. Readers and the writer wait for each other, for milliseconds.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from enum import Enum
from typing import NamedTuple

from toolyard.errors import RecordError
from toolyard.viewer.index.files import Signature
from toolyard.viewer.index.place import IndexFolder
from toolyard.viewer.index.rows import COLUMNS, CallEntry
from toolyard.viewer.index.search import TextFile

DATABASE = "index.sqlite"
WAIT_SECONDS = 60.0
"""Timeout for SQLite's locks, which are held for less than a second."""
_WRITER_CACHE_KIB = 64 * 1024
"""A larger transaction would lock out readers before its end."""
_SPARE_CONNECTIONS = 8
_MAX_DEAD = 64 << 20
"""Bytes of text of deleted lines. With more, and more than half of all text, the index is rebuilt when opened."""


class State(NamedTuple):
    generation: int
    """Grows whenever rows are deleted. Starts with the time, so that a rebuilt index has a higher one."""
    changes: int
    """Total number of rows added and deleted."""
    last_number: int
    text_end: int
    """Bytes of text that belong to committed rows."""
    dead_text: int
    """Bytes of these that belong to deleted rows."""


class Located(NamedTuple):
    """Where a row's line and its text are stored."""

    number: int
    file: int
    line: int
    start: int
    size: int
    crc: int
    text_start: int
    text_end: int


class IndexedFile(NamedTuple):
    """A file, and how far it is indexed."""

    id: int
    name: str
    run: str
    place: str
    """Sort key: see `DumpFile.place`."""
    inode: int
    size: int
    ctime_ns: int
    done: int
    """Bytes indexed. -1: it could not be read."""
    lines: int
    ended: int
    """1 if the last line had its newline."""

    @property
    def signature(self) -> Signature:
        return Signature(self.inode, self.size, self.ctime_ns)


_KEY, *_PLACE = (f"{name} INTEGER" for name in Located._fields)
"""Typed: otherwise SQLite does not use an index to join them with typed columns."""
SCHEMA = (
    f"CREATE TABLE state ({', '.join(State._fields)})",
    f"CREATE TABLE files (id INTEGER PRIMARY KEY, {', '.join(f'{name} NOT NULL' for name in IndexedFile._fields[1:])})",
    f"CREATE TABLE rows ({_KEY} PRIMARY KEY, {', '.join((*_PLACE, *COLUMNS))})",
    f"CREATE TABLE calls (number INTEGER, {', '.join(CallEntry._fields)}, PRIMARY KEY (number, at)) WITHOUT ROWID",
    "CREATE TABLE rewards (number INTEGER, name, value, PRIMARY KEY (number, name)) WITHOUT ROWID",
    "CREATE UNIQUE INDEX files_in_order ON files (place)",
    "CREATE INDEX rows_of_file ON rows (file)",
    "CREATE INDEX rows_of_request ON rows (request_id)",
    "CREATE INDEX rows_of_group ON rows (group_id)",
)


class _Condition(Enum):
    GOOD = "good, or does not exist yet"
    WASTEFUL = "mostly text of deleted rows"
    DAMAGED = "damaged, or not an index"


class Store:
    """The database and the text of one index."""

    def __init__(self, place: IndexFolder) -> None:
        """Open or create the index. The caller must hold the write lock.

        Raises:
            RecordError: it cannot be created, or is damaged while another process uses it.
        """
        self._path = place.folder / DATABASE
        self._text_path = place.folder / "text"
        self._journal = place.folder / f"{DATABASE}-journal"
        self._marked = place.folder / "damaged"
        self._lock = threading.Lock()
        self._spare: list[sqlite3.Connection] = []
        self._closed = False
        try:
            condition = self._condition()
            if condition is not _Condition.GOOD:
                with place.alone() as granted:
                    if granted:
                        self._remove()
                    elif condition is _Condition.DAMAGED:
                        raise RecordError(
                            f"the index in {place.folder} is damaged and used by another viewer: close that viewer, or "
                            "delete the folder"
                        )
            with ExitStack() as opened:
                self.writer = opened.enter_context(closing(self._connection(create=True)))
                self.text = opened.enter_context(closing(TextFile(self._text_path)))
                self._make()
                self._inode = os.lstat(self._path).st_ino
                self._opened = opened.pop_all()
        except (sqlite3.Error, OSError) as error:
            raise RecordError(f"cannot create the index in {place.folder}: {error}") from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
        while self._spare:  # connections in use are closed when they are returned
            self._spare.pop().close()
        self._opened.close()

    def is_there(self) -> bool:
        """Whether the database was not deleted or replaced."""
        with suppress(OSError):
            return os.lstat(self._path).st_ino == self._inode
        return False

    @contextmanager
    def reading(self) -> Generator[sqlite3.Connection]:
        """A connection for this thread.

        Raises:
            RecordError: the index is closed or damaged.
        """
        with self._lock:
            if self._closed:
                raise RecordError(f"the index in {self._path.parent} is closed")
            connection = self._spare.pop() if self._spare else None
        try:
            connection = connection or self._connection()
            yield connection
        except sqlite3.Error as error:
            raise self.broken(error) from None
        finally:
            if connection is not None:
                self._give_back(connection)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            keep = not self._closed and len(self._spare) < _SPARE_CONNECTIONS
            if keep:
                self._spare.append(connection)
        if not keep:
            connection.close()

    def state(self) -> State:
        with self.reading() as connection:
            return state_of(connection)

    def broken(self, error: sqlite3.Error) -> RecordError:
        """The error to raise. A damaged index is marked, and rebuilt when it is opened next."""
        code = getattr(error, "sqlite_errorcode", None)
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            with suppress(OSError):
                os.close(os.open(self._marked, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))
            return RecordError(f"the index in {self._path.parent} is damaged ({error}): open the folder again")
        return RecordError(f"the index in {self._path.parent} cannot be used: {error}")

    def _connection(self, *, create: bool = False) -> sqlite3.Connection:
        # Not read-only: after a writer was killed, the next connection rolls its journal back.
        connection = sqlite3.connect(
            f"{self._path.as_uri()}?mode={'rwc' if create else 'rw'}",
            uri=True,
            timeout=WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            if create:
                connection.execute(f"PRAGMA cache_size = -{_WRITER_CACHE_KIB}")
                connection.execute("PRAGMA synchronous = NORMAL")
            else:
                connection.execute("PRAGMA query_only = ON")
                connection.create_function("folded", 1, str.casefold, deterministic=True)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _make(self) -> None:
        self.writer.execute("BEGIN IMMEDIATE")
        if not _schema(self.writer):
            for statement in SCHEMA:
                self.writer.execute(statement)
            self.writer.execute("INSERT INTO state VALUES (?, 0, 0, 0, 0)", (time.time_ns() // 1_000_000,))
        self.writer.execute("COMMIT")

    def _condition(self) -> _Condition:
        try:
            if os.path.lexists(self._marked):
                return _Condition.DAMAGED
            for path in (self._path, self._journal, self._text_path):
                if path.is_symlink() or (path.exists() and not path.is_file()):
                    return _Condition.DAMAGED
            if not self._path.exists():
                return _Condition.DAMAGED if self._text_path.exists() else _Condition.GOOD
            with closing(self._connection()) as connection:
                schema = _schema(connection)
                if not schema:
                    return _Condition.GOOD  # killed before it created the tables
                state = state_of(connection) if schema == list(SCHEMA) else None
            if state is None or state.text_end > self._text_path.stat().st_size:
                return _Condition.DAMAGED
        except (sqlite3.DatabaseError, OSError, TypeError):  # TypeError: the state is missing
            return _Condition.DAMAGED
        return _Condition.WASTEFUL if state.dead_text > max(_MAX_DEAD, state.text_end // 2) else _Condition.GOOD

    def _remove(self) -> None:
        for path in (self._path, self._journal, self._text_path, self._marked):
            path.unlink(missing_ok=True)


def state_of(connection: sqlite3.Connection) -> State:
    return State(*connection.execute("SELECT * FROM state").fetchone())


def _schema(connection: sqlite3.Connection) -> list[str]:
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
    return [sql for (sql,) in found]


def bytes_done(place: IndexFolder) -> int:
    """Bytes of the dump in an index that another process is writing; 0 if unknown."""
    try:
        with closing(sqlite3.connect(f"{(place.folder / DATABASE).as_uri()}?mode=rw", uri=True)) as connection:
            return connection.execute("SELECT sum(max(done, 0)) FROM files").fetchone()[0] or 0
    except sqlite3.Error:
        return 0
