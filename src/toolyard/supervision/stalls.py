"""A thread beside the event loop that notices when the loop is blocked, and names the blocking code.

Code in the loop cannot do this: it is blocked as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from toolyard.supervision.calls import call_of
from toolyard.supervision.clock import LoopClock, loop_clock
from toolyard.supervision.places import frames_below, line_of, stack_of

_BEAT_SECONDS = 0.1
STALL_SECONDS = 1.0
"""Longer than a loop that is merely busy."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The event loop has been blocked for `seconds`."""

    seconds: float
    what: str
    """The blocking call, such as `tool 'search': execute of request 5f…`; empty if it is not one of ours."""
    line: str
    """The line being executed."""
    stack: str

    def __str__(self) -> str:
        blocker = self.what or "something"
        return f"{blocker} has blocked the event loop for {self.seconds:.0f} s, at {self.line}"


class LoopWatch:
    """Watches the running loop between `start` and `stop`, and stops the loop's clock while it is blocked.

    `on_stall` is called in the watching thread: after one second, then each time the stall has lasted twice as long.
    """

    def __init__(self, on_stall: Callable[[Stall], None]) -> None:
        self._on_stall = on_stall
        self._last_beat = time.monotonic()
        self._over = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._clock: LoopClock | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = loop_clock()
        self._thread_id = threading.get_ident()
        self._beat()
        threading.Thread(target=self._watch, name="toolyard loop watch", daemon=True).start()

    def stop(self) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._clock is not None:
            self._clock.beat(None)

    @property
    def is_blocked(self) -> bool:
        """Can be read from any thread, or a signal handler."""
        return not self._over.is_set() and time.monotonic() - self._last_beat > STALL_SECONDS

    def _beat(self) -> None:
        assert self._clock is not None
        self._last_beat = time.monotonic()
        self._clock.beat(self._last_beat + _BEAT_SECONDS)
        self._timer = self._loop.call_later(_BEAT_SECONDS, self._beat)

    def _watch(self) -> None:
        next_report = STALL_SECONDS
        while not self._over.wait(_BEAT_SECONDS):
            stalled = time.monotonic() - self._last_beat
            if stalled < STALL_SECONDS:
                next_report = STALL_SECONDS
            elif stalled >= next_report:
                next_report = 2 * stalled
                frame = sys._current_frames().get(self._thread_id)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
                if frame is not None:
                    with contextlib.suppress(Exception):  # an observer's exception must not end the watch
                        self._on_stall(self._describe(stalled, frame))

    def _describe(self, seconds: float, frame: FrameType) -> Stall:
        call, frames = call_of(asyncio.current_task(self._loop)), frames_below(frame)
        return Stall(seconds, "" if call is None else str(call), line_of(frames), stack_of(frames))
