"""Journals: what a request has heard from engines, tools and simulators, kept where other machines can read it.

If its worker is lost, another one plays the request again from the beginning, with the journal's answers instead of
engines and tools: the same tokens, the same calls. Where the journal ends, it goes on with real ones. The entries are
those of a tape (decision 7), so whatever can be replayed can be continued.

Each worker that plays a request writes a journal of its own, which begins with a copy of its predecessor's: a worker
that was only taken for dead cannot spoil it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from toolyard.errors import RecordError
from toolyard.messages import JSON
from toolyard.records.jsonl import decode, encode
from toolyard.rollout.blame import our_failure
from toolyard.rollout.external import ExternalCall, LoggedCalls, StartOverError
from toolyard.rollout.finish import FinishReason, RolloutState

T = TypeVar("T")
ABOUT_TO_CALL = "about to call"
"""The entry before a call that must not be made twice."""
_CONCLUSION = frozenset({"released", "final", "stuck", "ended"})
"""Never taken from a journal: a new machine has its own tools to release, and rewards can be computed again."""


class Journal(Protocol):
    """The journal of one request, open for appending."""

    @property
    def past(self) -> Sequence[JSON]:
        """The entries of the worker before."""
        ...

    def append(self, entry: bytes) -> None:
        """Add an entry: a line of JSON without its newline."""
        ...

    async def settle(self) -> None:
        """Return when everything appended would survive the loss of this machine."""
        ...

    def start_over(self) -> None:
        """Forget all entries, and close it: the request is played from its beginning."""
        ...

    def close(self, *, keep: bool) -> None:
        """`keep`: the request has not ended, and another worker may continue it."""
        ...


class FolderJournals:
    """Journals in a folder that all machines share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, request_id: str, streamed: Sequence[bytes] = ()) -> FileJournal:
        """`streamed`: the entries of a worker before that does not share the folder.

        Raises:
            RecordError: the folder cannot be written.
        """
        number = 1
        try:
            while True:
                path = self._folder / f"{request_id}.{number}"
                try:
                    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                    break
                except FileExistsError:
                    number += 1
            before = [self._folder / f"{request_id}.{earlier}" for earlier in range(1, number)]
            journal = FileJournal(path, fd, before, streamed)
        except OSError as error:
            raise RecordError(f"cannot write the journal {self._folder}/{request_id}: {error.strerror}") from None
        return journal


class FileJournal:
    """Created by `FolderJournals.open`."""

    def __init__(self, path: Path, fd: int, before: Sequence[Path], streamed: Sequence[bytes]) -> None:
        self._path, self._fd, self._before = path, fd, before
        # The latest of the longest: a worker may have been killed while it copied.
        lines: Sequence[bytes] = max([*map(_whole_lines, reversed(before)), streamed], key=len)
        self.past = [decode(line) for line in lines]
        if lines:
            self._write(b"".join(line + b"\n" for line in lines))

    def append(self, entry: bytes) -> None:
        try:
            self._write(entry + b"\n")
        except OSError as error:
            raise RecordError(f"cannot write the journal {self._path}: {error.strerror}") from None

    async def settle(self) -> None:
        await asyncio.to_thread(os.fsync, self._fd)

    def start_over(self) -> None:
        self.close(keep=False)

    def close(self, *, keep: bool) -> None:
        os.close(self._fd)
        if not keep:
            for path in (self._path, *self._before):
                path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]


class StreamedJournal:
    """A journal that is sent to the ledger with the worker's reports."""

    def __init__(self, streamed: Sequence[bytes], poke: Callable[[], None]) -> None:
        self.past = [decode(line) for line in streamed]
        self._lines = list(streamed)
        self._sent = len(self._lines)
        """Entries that the ledger has."""
        self._poke = poke
        self._settled = asyncio.Event()

    def append(self, entry: bytes) -> None:
        self._lines.append(entry)

    async def settle(self) -> None:
        while self._sent < len(self._lines):
            self._settled.clear()
            self._poke()
            await self._settled.wait()

    def start_over(self) -> None:
        self._lines.clear()
        self._sent = -1

    def close(self, *, keep: bool) -> None:
        pass

    def unsent(self, *, again: bool = False) -> tuple[int, tuple[bytes, ...]] | None:
        """For a report: the number of the first entry that the ledger does not have, and all from there on. `again`:
        the ledger is a new one and has none."""
        start = 0 if again else max(0, self._sent)
        return (start, tuple(self._lines[start:])) if again or self._sent != len(self._lines) else None

    def sent(self, count: int) -> None:
        """The ledger has the first `count` entries."""
        self._sent = min(count, len(self._lines))
        self._settled.set()


def _whole_lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return data[: data.rfind(b"\n") + 1].splitlines()


class JournalledCalls(LoggedCalls):
    """Makes the calls that are not in the request's journal yet, and writes them to it.

    `certain`: waits until this worker is certain that the request is still its own.
    """

    def __init__(
        self,
        journal: Journal,
        request_id: str,
        certain: Callable[[], Awaitable[None]],
        keep: Callable[[bytes], None] | None = None,
    ) -> None:
        """`keep`: also gets every entry, for a tape."""
        super().__init__(request_id)
        self._journal = journal
        self._certain = certain
        self._keep = keep
        past = [entry for entry in journal.past if entry["kind"] != ABOUT_TO_CALL]
        self._past = deque(past)
        last = journal.past[-1] if journal.past else None
        self._in_doubt = last["asked"] if last is not None and last["kind"] == ABOUT_TO_CALL else None
        """The call that was under way when the worker before was lost."""
        self._readings = deque(reading for entry in past for reading in entry["got"]["clock"])
        for entry in past:
            self._kept(encode(entry, nan=True))
        if past:
            self._began = time.monotonic() - max(self._readings, default=0.0)
            self.started_at, self._dated = past[0]["got"].get("started_at"), True

    def now(self) -> float:
        return self._readings.popleft() if self._readings else super().now()

    async def call(self, one: ExternalCall[T]) -> T:
        if one.kind in _CONCLUSION:
            return await super().call(one)
        if self._past:
            return await self._from_past(one)
        if one.once:
            asked = one.question()
            await self._certain()
            if self._in_doubt is not None and one.kind == "tools":
                return self._lost(asked, one)
            self._write({"request_id": self._request_id, "kind": ABOUT_TO_CALL, "asked": asked, "got": None})
            await self._journal.settle()
            await self._certain()
        elif one.kind == "tools":
            await self._certain()
        return await super().call(one)

    def start_over(self) -> None:
        self._journal.start_over()

    async def _from_past(self, one: ExternalCall[T]) -> T:
        entry = self._past.popleft()
        if entry["kind"] != one.kind or encode(entry["asked"], sort=True) != encode(one.question(), sort=True):
            raise StartOverError(f"request {self._request_id}: its journal has another {one.kind}")
        answer = one.adapter.validate_python(entry["got"]["answer"])
        self.faults += entry["got"].get("faults", ())
        self._faults_recorded = len(self.faults)
        if one.redo is None:
            return answer
        again = await one.redo(answer)
        if again != answer and not _is_aborted(one.adapter.dump_python(again, mode="json", fallback=str)):
            raise StartOverError(f"request {self._request_id}: {one.kind} failed when it was repeated")
        return again

    def _lost(self, asked: JSON, one: ExternalCall[T]) -> T:
        told = f"its machine was lost during a call, so nobody knows whether the call was made; {one.once}"
        failure = our_failure(FinishReason.TOOL_FAILURE, RolloutState.TOOL_CALLING, told, cause="machine lost")
        answer = one.adapter.validate_python(failure)
        self._record("tools", asked, one.adapter.dump_python(answer, mode="json"))
        return answer

    def record(self, kind: str, asked: Any, got: Any) -> None:
        if not _is_aborted(got["answer"]):  # that is not what it heard; it may be continued elsewhere
            entry = {"request_id": self._request_id, "kind": kind, "asked": asked, "got": got}
            self._write(entry, journal=kind not in _CONCLUSION)

    def _write(self, entry: JSON, *, journal: bool = True) -> None:
        line = encode(entry, nan=True)
        if journal:
            self._journal.append(line)
        if entry["kind"] != ABOUT_TO_CALL:
            self._kept(line)

    def _kept(self, line: bytes) -> None:
        if self._keep is not None:
            self._keep(line)


def _is_aborted(answer: Any) -> bool:
    return isinstance(answer, dict) and cast("JSON", answer).get("reason") == FinishReason.ABORTED
