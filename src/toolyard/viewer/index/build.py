"""Updating an index: new files, lines added to known files, and files that were replaced.

After each transaction the index is correct for a prefix of the files. If the process is killed, the next one continues
there.
"""

# ruff: noqa: S608 - only constants are put together here; every value is a parameter
from __future__ import annotations

import os
import re
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from toolyard.records.dump import is_torn
from toolyard.viewer.index.files import MAX_LINE, DumpFile, Line, Signature, Source, lines_between
from toolyard.viewer.index.rows import COLUMNS, CallEntry, IndexEntry, damaged, entry_of
from toolyard.viewer.index.search import record
from toolyard.viewer.index.store import IndexedFile, Located, Store, state_of

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""
BATCH_BYTES = 32 << 20
"""Bytes of lines per transaction."""
_REPORT_BYTES = 2 << 20
"""Bytes between two calls of `Progress`."""
_UNFINISHED = Signature(0, -1, 0)
"""Signature of a file that is not completely indexed: it always counts as changed."""
_INSERT_ROW = f"INSERT INTO rows VALUES ({', '.join('?' * (len(Located._fields) + len(COLUMNS)))})"
_INSERT_CALL = f"INSERT INTO calls VALUES (?, {', '.join('?' * len(CallEntry._fields))})"
_INSERT_FILE = f"INSERT OR REPLACE INTO files VALUES ({', '.join('?' * len(IndexedFile._fields))})"


_ENTRY = re.compile(rb'\{"request_id":"[^"]*","kind":"')
"""An entry of a tape: in the results of a cluster's workers, they follow the line of their request."""


class Builder:
    """Updates a store from its source. The caller must hold the write lock."""

    def __init__(self, store: Store, source: Source, progress: Progress | None = None) -> None:
        self._store = store
        self._source = source
        self._db = store.writer
        self._progress = progress or _no_progress
        self._done = self._total = self._told = 0
        self._rows: list[tuple[Any, ...]] = []
        self._calls: list[tuple[Any, ...]] = []
        self._rewards: list[tuple[int, str, float]] = []
        self._texts: list[bytes] = []
        self._batch = 0
        self._last_number = self._text_end = self._written_end = 0

    def run(self) -> None:
        """
        Raises:
            RecordError: the folder cannot be read, or the index cannot be written. What was indexed before stays.
        """
        files = self._source.files()
        names = {file.name for file in files}
        try:
            known = {file.name: file for file in map(IndexedFile._make, self._db.execute("SELECT * FROM files"))}
            changed = [file for file in files if not _is_known(file, known.get(file.name))]
            gone = [file for name, file in known.items() if name not in names]
            self._total = sum(file.signature.size for file in files)
            self._done = self._total - sum(_left(file, known.get(file.name)) for file in changed)
            self._progress(self._done, self._total)
            if changed or gone:
                self._take_in(changed, gone, known)
                self._progress(self._total, self._total)
        except sqlite3.Error as error:
            raise self._store.broken(error) from None

    def _take_in(self, changed: list[DumpFile], gone: list[IndexedFile], known: dict[str, IndexedFile]) -> None:
        self._begin()
        try:
            for file in gone:
                self._forget(file)
                self._db.execute("DELETE FROM files WHERE id = ?", (file.id,))
            for file in changed:
                self._take(file, known.get(file.name))
            self._write()
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.rollback()
            raise

    def _take(self, file: DumpFile, known: IndexedFile | None) -> None:
        at = known or IndexedFile(self._next_file(), file.name, file.run, file.place, *_UNFINISHED, 0, 0, 1)
        try:
            with self._source.opened(file) as fd:
                signature = found = Signature.of(os.fstat(fd))
                if file.is_table:
                    signature = file.signature  # not of its lines
                if file.is_table or not self._continues(fd, at, found):
                    self._forget(at)
                    at = at._replace(done=0, lines=0, ended=1)
                at = self._read(fd, file, at, found.size)
        except FileNotFoundError:
            return  # gone since it was listed: the next run shows whether for good
        except OSError as error:
            self._forget(at)
            at, signature = at._replace(done=-1, lines=0, ended=1), file.signature
            self._add(at.id, 1, Line(0, 0, b"", True), damaged(f"cannot be read: {error.strerror}", b"", file.step))
        self._keep(at, signature)

    def _continues(self, fd: int, at: IndexedFile, found: Signature) -> bool:
        """Whether the indexed lines are still in the file. If it only grew, its first and last line are compared; if it
        was copied over or touched, all of them."""
        if at.done < 0 or found.size < at.done:
            return False
        if not at.ended and found.size > at.done and os.pread(fd, 1, at.done) != b"\n":
            return False
        lines = "SELECT start, size, crc FROM rows WHERE file = ? ORDER BY number"
        if found.inode == at.inode and found.size > at.size:
            lines = f"SELECT * FROM ({lines} LIMIT 1) UNION SELECT * FROM ({lines} DESC LIMIT 1)"
        expected = self._db.execute(lines, (at.id,) * lines.count("?"))
        return all(size > MAX_LINE or zlib.crc32(os.pread(fd, size, start)) == crc for start, size, crc in expected)

    def _read(self, fd: int, file: DumpFile, at: IndexedFile, size: int) -> IndexedFile:
        if not at.ended and size > at.done:
            at = at._replace(done=at.done + 1, ended=1)  # the newline that was missing
        for line in lines_between(fd, at.done, size):
            if not line.ended and (line.text is None or is_torn(line.text)):
                break  # the line is still being written
            at = at._replace(done=line.start + line.size, lines=at.lines + 1, ended=int(line.ended))
            if line.text is None:
                self._add(at.id, at.lines, line, damaged(f"longer than {MAX_LINE >> 20} MiB", b"", file.step))
            elif line.text and not line.text.isspace() and not _ENTRY.match(line.text):
                self._add(at.id, at.lines, line, entry_of(line.text, file.step))
            self._tell(line.size)
            if self._batch >= BATCH_BYTES:
                self._keep(at, _UNFINISHED)
                self._write()
                self._db.execute("COMMIT")
                self._begin()
        return at

    def _add(self, file: int, line_number: int, line: Line, entry: IndexEntry) -> None:
        self._last_number += 1
        text = record(self._last_number, entry.text)
        crc = zlib.crc32(line.text or b"")
        if line.ended:
            crc = zlib.crc32(b"\n", crc)
        begin, self._text_end = self._text_end, self._text_end + len(text)
        place = Located(self._last_number, file, line_number, line.start, line.size, crc, begin, self._text_end)
        self._rows.append((*place, *entry.columns))
        self._calls += [(self._last_number, *call) for call in entry.calls]
        self._rewards += [(self._last_number, name, value) for name, value in entry.rewards.items()]
        self._texts.append(text)
        self._batch += line.size

    def _forget(self, file: IndexedFile) -> None:
        """Delete all rows of a file."""
        self._write()  # some may not have been written yet
        own = "FROM rows WHERE file = ?"
        count, dead = self._db.execute(f"SELECT count(*), sum(text_end - text_start) {own}", (file.id,)).fetchone()
        if count:
            for table in ("calls", "rewards"):
                self._db.execute(f"DELETE FROM {table} WHERE number IN (SELECT number {own})", (file.id,))
            self._db.execute(f"DELETE {own}", (file.id,))
            self._db.execute(
                "UPDATE state SET generation = generation + 1, changes = changes + ?, dead_text = dead_text + ?",
                (count, dead),
            )

    def _keep(self, at: IndexedFile, signature: Signature) -> None:
        """Record how far a file is indexed; takes effect with the next `_write`."""
        self._db.execute(_INSERT_FILE, at._replace(**signature._asdict()))

    def _next_file(self) -> int:
        (last,) = self._db.execute("SELECT max(id) FROM files").fetchone()
        return (last or 0) + 1

    def _begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        state = state_of(self._db)
        self._last_number, self._text_end, self._written_end = state.last_number, state.text_end, state.text_end

    def _write(self) -> None:
        """Write the added rows into the transaction. The text goes first, so that committed rows always have theirs."""
        if self._rows:
            self._store.text.write(self._written_end, b"".join(self._texts))
            self._db.executemany(_INSERT_ROW, self._rows)
            self._db.executemany(_INSERT_CALL, self._calls)
            self._db.executemany("INSERT INTO rewards VALUES (?, ?, ?)", self._rewards)
            self._db.execute(
                "UPDATE state SET changes = changes + ?, last_number = ?, text_end = ?",
                (len(self._rows), self._last_number, self._text_end),
            )
        self._written_end = self._text_end
        self._rows, self._calls, self._rewards, self._texts, self._batch = [], [], [], [], 0

    def _tell(self, size: int) -> None:
        self._done += size
        if self._done - self._told >= _REPORT_BYTES:
            self._told = self._done
            self._progress(min(self._done, self._total), self._total)


def _no_progress(done: int, total: int) -> None:
    """The default `Progress`: does nothing."""


def _is_known(file: DumpFile, known: IndexedFile | None) -> bool:
    return known is not None and known.signature == file.signature


def _left(file: DumpFile, known: IndexedFile | None) -> int:
    return file.signature.size - (max(0, known.done) if known and known.done <= file.signature.size else 0)
