"""Deadlines that do not count the time in which the event loop stood still.

One blocking call holds up everything in its event loop. Plain timers then fire for all the others at once, although
nobody but the blocker took too long. Deadlines of a `LoopClock` are compared with a clock that stops meanwhile, as far
as a `LoopWatch` notices it. They also cost less than a timer each: one timer serves all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

_SLACK_SECONDS = 0.25
"""A loop that is late by less than this is busy, not blocked."""
_GRAIN_SECONDS = 0.002
"""Deadlines this close together are served by one timer."""


class Deadline:
    """Made by `LoopClock.after`. `cancel` it as soon as it no longer matters."""

    __slots__ = ("_clock", "_expire", "when")

    def __init__(self, clock: LoopClock, when: float, expire: Callable[[], None]) -> None:
        self.when = when
        """On the clock it belongs to."""
        self._clock = clock
        self._expire = expire

    def cancel(self) -> None:
        self._clock.forget(self)

    def expire(self) -> None:
        self.cancel()
        self._expire()


class LoopClock:
    """The time in which an event loop could work, and all deadlines that are measured with it. See `loop_clock`."""

    def __init__(self) -> None:
        self._lost = 0.0
        self._deadlines: set[Deadline] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._beat_due: float | None = None

    def now(self) -> float:
        return time.monotonic() - self._lost

    @property
    def lost(self) -> float:
        """Seconds in which the loop stood still, since it was first watched."""
        return self._lost

    def beat(self, due: float | None) -> None:
        """The loop is alive. `due`: when it will be here again if nothing blocks it; None ends the watch."""
        self._catch_up()
        self._beat_due = due

    def after(self, seconds: float, expire: Callable[[], None]) -> Deadline:
        """Call `expire` in the loop when it could work for `seconds`, unless the deadline is cancelled before."""
        deadline = Deadline(self, self.now() + seconds, expire)
        self._deadlines.add(deadline)
        timer = self._timer
        if timer is None or timer.when() > deadline.when + self._lost:
            self._arm(deadline.when)
        return deadline

    def forget(self, deadline: Deadline) -> None:
        self._deadlines.discard(deadline)
        if not self._deadlines and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when + self._lost, self._serve)

    def _serve(self) -> None:
        self._timer = None
        self._catch_up()
        now = self.now() + _GRAIN_SECONDS
        try:
            for deadline in sorted((one for one in self._deadlines if one.when <= now), key=lambda one: one.when):
                if deadline in self._deadlines:  # an earlier one may have cancelled it
                    deadline.expire()
        finally:
            if self._deadlines and self._timer is None:
                self._arm(min(deadline.when for deadline in self._deadlines))

    def _catch_up(self) -> None:
        """Stop the clock for the time since the loop should have been here."""
        due = self._beat_due
        if due is not None and (late := time.monotonic() - due) > _SLACK_SECONDS:
            self._lost += late
            self._beat_due = due + late


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = WeakKeyDictionary()


def loop_clock() -> LoopClock:
    """The clock of the running loop."""
    loop = asyncio.get_running_loop()
    clock = _clocks.get(loop)
    if clock is None:
        clock = _clocks[loop] = LoopClock()
    return clock


class Scope:
    """`asyncio.timeout`, with a fair clock, and told from outside as well:

        with Scope(task, clock, seconds) as scope:
            await …
        if scope.expired: …

    The block is cancelled when time is up, and left without an exception. Cancellations from anywhere else pass.
    """

    __slots__ = ("_before", "_clock", "_deadline", "_expiring", "_seconds", "_task", "expired")

    def __init__(
        self,
        task: asyncio.Task[object],
        clock: LoopClock,
        seconds: float,
        expiring: Callable[[], None] | None = None,
    ) -> None:
        """`expiring` is called before the block is cancelled."""
        self.expired = False
        self._expiring = expiring
        self._task = task
        self._clock = clock
        self._seconds = seconds
        self._deadline: Deadline | None = None
        self._before = 0

    def expire(self) -> None:
        """End the block now."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self.expired = True
            if self._expiring is not None:
                self._expiring()
            self._task.cancel()

    def __enter__(self) -> Self:
        self._before = self._task.cancelling()
        self._deadline = self._clock.after(self._seconds, self.expire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if not self.expired or self._task.uncancel() > self._before:
            return False
        return kind is None or issubclass(kind, asyncio.CancelledError)
