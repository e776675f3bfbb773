"""Tapes: recordings of everything non-deterministic in a run, in order, for replays.

A tape is JSON lines: a header, then one entry for each external call (engine, tool, clock) with its question and
answer. A file whose name ends in .gz is compressed; such a tape is complete only after it is closed.
"""

from __future__ import annotations

import gzip
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any, Self, cast

from toolyard._version import __version__
from toolyard.errors import DivergenceError, RecordError
from toolyard.messages import JSON
from toolyard.records.differences import json_difference, shown
from toolyard.records.jsonl import decode, encode

TAPE_VERSION = 1
ENDED = "ended"
"""The kind of a request's last entry. Their order is the order in which requests ended."""


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One question and its answer."""

    request_id: str
    kind: str
    asked: Any
    got: Any


class TapeWriter:
    """Writes a new tape: `with TapeWriter(path, meta) as tape: tape.record(…)`."""

    def __init__(self, path: str | PathLike[str], meta: Mapping[str, Any] | None = None) -> None:
        """`meta`: what a replay needs before it starts (the configuration, the seed).

        Raises:
            RecordError: the file exists, or cannot be created.
        """
        self.path = Path(path)
        self._lock = threading.Lock()
        self._broken: str | None = None
        try:
            self._file: IO[bytes] | None = cast("IO[bytes]", _create(self.path))
        except FileExistsError:
            raise RecordError(f"the tape {path} already exists; tapes are never overwritten: choose another") from None
        except OSError as error:
            raise RecordError(f"cannot write the tape {path}: {error.strerror}") from None
        try:
            self._write(encode({"tape_version": TAPE_VERSION, "toolyard": __version__, "meta": meta or {}}, nan=True))
        except RecordError:
            self.close()
            raise

    def record(self, request_id: str, kind: str, asked: Any, got: Any) -> None:
        """Append an entry. It is in the file when this returns, unless the tape is compressed. Thread-safe.

        Raises:
            RecordError: it could not be written. The tape ends there: later entries are rejected.
        """
        entry = {"request_id": request_id, "kind": kind, "asked": asked, "got": got}
        self.record_line(encode(entry, nan=True))

    def record_line(self, entry: bytes) -> None:
        """Like `record`, for an entry that is already encoded, without its newline."""
        self._write(entry)

    def close(self) -> None:
        """
        Raises:
            RecordError: buffered data could not be written.
        """
        with self._lock:
            file, self._file = self._file, None
            try:
                if file is not None:
                    file.close()
            except OSError as error:
                raise RecordError(f"cannot write the tape {self.path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        with self._lock:
            if self._broken is not None or self._file is None:
                raise RecordError(self._broken or f"the tape {self.path} is closed")
            try:
                rest = memoryview(line + b"\n")
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                # The file may now end with half a line. It must stay the last, so that readers treat it as torn.
                self._broken = f"cannot write the tape {self.path}: {error.strerror}; it ends there"
                raise RecordError(self._broken) from None


class Tape:
    """A tape read from a file."""

    def __init__(self, meta: JSON, entries: tuple[TapeEntry, ...], notes: tuple[str, ...] = ()) -> None:
        self.meta = meta
        self.notes = notes
        """Problems with the file that could be ignored."""
        self.ended = tuple(entry.request_id for entry in entries if entry.kind == ENDED)
        """Request ids in the order in which they ended."""
        by_request: dict[str, list[TapeEntry]] = {}
        for entry in entries:
            by_request.setdefault(entry.request_id, []).append(entry)
        self._entries = {request_id: tuple(found) for request_id, found in by_request.items()}

    @property
    def request_ids(self) -> tuple[str, ...]:
        """All request ids, in the order of their first entries."""
        return tuple(self._entries)

    def entries(self, request_id: str) -> tuple[TapeEntry, ...]:
        """The entries of one request, in the order of recording; empty if it is not on the tape."""
        return self._entries.get(request_id, ())

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Tape:
        """Read a tape. A torn last line is dropped, with a note.

        Raises:
            RecordError: the tape does not exist, is damaged, or was made by a newer version.
        """
        path, notes = Path(path), list[str]()
        lines = _lines(path, notes)
        meta = _read_header(path, next(lines, None))
        entries = tuple(_read_entry(path, number, line) for number, line in enumerate(lines, 2))
        return cls(meta, entries, tuple(notes))


class Replay:
    """The entries of one request, replayed one by one."""

    def __init__(self, tape: Tape, request_id: str) -> None:
        """
        Raises:
            DivergenceError: the request is not on the tape.
        """
        self.request_id = request_id
        self._entries = tape.entries(request_id)
        self._left = list(range(len(self._entries)))
        if not self._entries:
            known = tape.request_ids
            raise DivergenceError(
                f"the tape has no entries for request {request_id!r}; it has {len(known)} other requests, the first is "
                f"{shown(known[0]) if known else 'none'}"
            )

    def next(self, kind: str, asked: Any, *, any_order: bool = False) -> Any:
        """The tape's answer to the next question.

        `any_order`: for questions asked concurrently. The following entries of the same kind are searched as well for
        an equal question.

        Raises:
            DivergenceError: the tape has another question here, or none. The message shows the first difference.
        """
        if not self._left:
            raise DivergenceError(f"{self._place(len(self._entries), kind)}: the tape has ended; asked: {shown(asked)}")
        now = _canonical(asked)
        for at, index in enumerate(self._left):
            entry = self._entries[index]
            if entry.kind != kind:
                break
            if _canonical(entry.asked) == now:
                del self._left[at]
                return entry.got
            if not any_order:
                break
        raise DivergenceError(self._difference(kind, asked))

    def finish(self) -> None:
        """
        Raises:
            DivergenceError: the tape has more entries.
        """
        if self._left:
            entry = self._entries[self._left[0]]
            raise DivergenceError(
                f"{self._place(self._left[0], entry.kind)}: the replay ended, but the tape has {len(self._left)} more; "
                f"next on the tape: {shown(entry.asked)}"
            )

    def _difference(self, kind: str, asked: Any) -> str:
        index = self._left[0]
        entry = self._entries[index]
        place = self._place(index, kind)
        if entry.kind != kind:
            return f"{place}: the tape has {entry.kind!r} here, asked: {shown(entry.asked)}; now asked: {shown(asked)}"
        found = json_difference(entry.asked, decode(encode(asked, nan=True)))
        if found is None:  # 0.0 and -0.0: equal, but not identical
            return f"{place}: asked: {shown(asked)}"
        path = f"asked{'' if found.path.startswith('[') or not found.path else '.'}{found.path}"
        return f"{place}: {path} is {found.now}; the tape has {found.was}"

    def _place(self, index: int, kind: str) -> str:
        return f"request {self.request_id!r}, entry {index + 1} of {len(self._entries)} ({kind})"


def _canonical(value: Any) -> bytes:
    return encode(value, sort=True, nan=True)


def _create(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.GzipFile(path, "xb", mtime=0)
    return path.open("xb", buffering=0)


def _lines(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Complete lines. A torn end is reported in `notes`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in cast("IO[bytes]", file):
                if not line.endswith(b"\n"):
                    notes.append(f"{path}: dropped the last line, which was torn ({len(line)} bytes)")
                    return
                yield line
    except EOFError:
        notes.append(f"{path}: the tape was not closed and may lack its last entries")
    except gzip.BadGzipFile as error:
        raise RecordError(f"{path}: {error}") from None
    except zlib.error as error:
        raise RecordError(f"{path}: the compressed data is damaged: {error}") from None
    except OSError as error:
        raise RecordError(f"cannot read the tape {path}: {error.strerror}") from None


def _read_header(path: Path, line: bytes | None) -> JSON:
    header = _object(path, 1, line or b"{}")
    version, meta = header.get("tape_version"), header.get("meta", {})
    if not isinstance(version, int) or not isinstance(meta, dict):
        raise RecordError(f"{path} is not a tape: its first line is not a tape header")
    if version > TAPE_VERSION:
        raise RecordError(
            f"{path} is a tape of version {version}, made by toolyard {header.get('toolyard', 'unknown')}; this "
            f"version of toolyard plays version {TAPE_VERSION}"
        )
    return cast("JSON", meta)


def _read_entry(path: Path, number: int, line: bytes) -> TapeEntry:
    entry = _object(path, number, line)
    request_id, kind = entry.get("request_id"), entry.get("kind")
    if not isinstance(request_id, str) or not isinstance(kind, str) or "asked" not in entry or "got" not in entry:
        raise RecordError(f"{path}:{number}: not a tape entry: {shown(entry)}")
    return TapeEntry(request_id, kind, entry["asked"], entry["got"])


def _object(path: Path, number: int, line: bytes) -> JSON:
    try:
        found = decode(line)
    except RecordError as error:
        raise RecordError(f"{path}:{number}: {error}") from None
    if not isinstance(found, dict):
        raise RecordError(f"{path}:{number}: expected an object, not {shown(found)}")
    return cast("JSON", found)
