"""The boundary to everything non-deterministic: time, engines, tools, simulators, reward functions.

Each request has one `ExternalCalls` and goes through it for all of these, so a run can be recorded and replayed bit for
bit, without a model and without a sandbox.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from toolyard.errors import DivergenceError
from toolyard.messages import JSON
from toolyard.records.tape import Replay, Tape, TapeWriter

T = TypeVar("T")
Redo = Callable[[T], Awaitable[T]]
"""Given the known result of a call that another machine made: brings this one into the same state. Returns the result
to use."""


class StartOverError(DivergenceError):
    """The journal of a request cannot be continued: it must be played from its beginning."""


@dataclass(frozen=True, slots=True)
class ExternalCall(Generic[T]):
    kind: str
    """What is called."""
    question: Callable[[], JSON]
    """Identifies the call, so that a replay can check it is the same one."""
    adapter: TypeAdapter[T]
    """Converts the result to and from JSON."""
    work: Callable[[], Awaitable[T]]
    """Makes the call."""
    redo: Redo[T] | None = None
    """For a request that is continued from a journal."""
    once: str = ""
    """Why the call must not be repeated if it is unknown whether it was made; empty if it may be."""


class ExternalCalls:
    """A live request: calls are made and not recorded."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.started_at: float | None = round(time.time(), 6)
        """Unix seconds; None if it is played from a tape that does not say."""
        self.faults: list[JSON] = []
        """Faults that were injected into the request: see `toolyard.rollout.faults`."""

    def now(self) -> float:
        """Seconds since the request began."""
        return round(time.monotonic() - self._began, 6)

    def call(self, one: ExternalCall[T]) -> Awaitable[T]:
        """Return what its `work` returns."""
        return one.work()

    def ended(self) -> None:
        """The request is over."""

    def start_over(self) -> None:
        """The request is about to be played from its beginning, with other `ExternalCalls`."""


class LoggedCalls(ExternalCalls, ABC):
    """Makes the calls and records their results, with the readings of the clock."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self._request_id = request_id
        self._clock: list[float] = []
        self._dated = False
        """`started_at` is in an entry."""
        self._faults_recorded = 0

    @abstractmethod
    def record(self, kind: str, asked: Any, got: Any) -> None:
        """Keep an entry of a tape."""

    def now(self) -> float:
        self._clock.append(super().now())
        return self._clock[-1]

    async def call(self, one: ExternalCall[T]) -> T:
        asked = one.question()  # before the call: the lists it reads may grow meanwhile
        answer = await one.work()
        self._record(one.kind, asked, one.adapter.dump_python(answer, mode="json", fallback=str))
        return answer

    def ended(self) -> None:
        self._record("ended", {}, None)

    def _record(self, kind: str, asked: JSON, answer: Any) -> None:
        got = {"answer": answer, "clock": self._clock}
        if not self._dated:
            got["started_at"] = self.started_at
        if new := self.faults[self._faults_recorded :]:
            got["faults"] = new
        self.record(kind, asked, got)
        self._clock, self._dated, self._faults_recorded = [], True, len(self.faults)


class RecordedCalls(LoggedCalls):
    """Writes the results to a tape."""

    def __init__(self, tape: TapeWriter, request_id: str) -> None:
        super().__init__(request_id)
        self._tape = tape

    def record(self, kind: str, asked: Any, got: Any) -> None:
        self._tape.record(self._request_id, kind, asked, got)


class ReplayedCalls(ExternalCalls):
    """Makes no calls: results come from a tape.

    Raises:
        DivergenceError: a call differs from the tape.
    """

    def __init__(self, tape: Tape, request_id: str) -> None:
        super().__init__()
        self._replay = Replay(tape, request_id)
        entries = tape.entries(request_id)
        self._clock = deque(reading for entry in entries for reading in entry.got["clock"])
        self.started_at = entries[0].got.get("started_at")

    def now(self) -> float:
        # A request that diverged may read the clock more often than the tape did.
        return self._clock.popleft() if self._clock else 0.0

    async def call(self, one: ExternalCall[T]) -> T:
        got = self._replay.next(one.kind, one.question())
        self.faults += got.get("faults", ())
        return one.adapter.validate_python(got["answer"])

    def ended(self) -> None:
        self._replay.next("ended", {})
        self._replay.finish()
