"""Everything that a request does not decide itself: time, engines, tools, simulators, reward functions.

All of it goes through one `Chance` for each request, so a run can be recorded and played again, bit for bit, without
a model and without a sandbox.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter

from toolyard.messages import JSON
from toolyard.records.tape import Replay, Tape, TapeWriter

T = TypeVar("T")


class Chance:
    """Of a live request: asks the world."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def now(self) -> float:
        """Seconds since the request began."""
        return round(time.monotonic() - self._began, 6)

    def got(
        self, kind: str, asked: Callable[[], JSON], made_of: TypeAdapter[T], ask: Callable[[], Awaitable[T]]
    ) -> Awaitable[T]:
        """What `ask` returns. `asked` tells by what it can be recognised when it is asked again."""
        return ask()

    def ended(self) -> None:
        """The request is over."""


class RecordingChance(Chance):
    def __init__(self, tape: TapeWriter, request_id: str) -> None:
        super().__init__()
        self._tape = tape
        self._request_id = request_id
        self._clock: list[float] = []

    def now(self) -> float:
        self._clock.append(super().now())
        return self._clock[-1]

    async def got(
        self, kind: str, asked: Callable[[], JSON], made_of: TypeAdapter[T], ask: Callable[[], Awaitable[T]]
    ) -> T:
        question = asked()  # before: what it is made of may grow meanwhile
        answer = await ask()
        self._record(kind, question, made_of.dump_python(answer, mode="json", fallback=str))
        return answer

    def ended(self) -> None:
        self._record("ended", {}, None)

    def _record(self, kind: str, asked: JSON, answer: Any) -> None:
        self._tape.record(self._request_id, kind, asked, {"answer": answer, "clock": self._clock})
        self._clock = []


class ReplayedChance(Chance):
    def __init__(self, tape: Tape, request_id: str) -> None:
        super().__init__()
        self._replay = Replay(tape, request_id)
        self._clock = deque(reading for entry in tape.entries(request_id) for reading in entry.got["clock"])

    def now(self) -> float:
        # A request that diverged may look at the clock more often than it did on the tape.
        return self._clock.popleft() if self._clock else 0.0

    async def got(
        self, kind: str, asked: Callable[[], JSON], made_of: TypeAdapter[T], ask: Callable[[], Awaitable[T]]
    ) -> T:
        return made_of.validate_python(self._replay.next(kind, asked())["answer"])

    def ended(self) -> None:
        self._replay.next("ended", {})
        self._replay.finish()
