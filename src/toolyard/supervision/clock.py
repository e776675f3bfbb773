"""Deadlines that do not count time during which the event loop was blocked.

One blocking call delays everything in its event loop. Plain timers then fire for all other tasks at once, although only
the blocker took too long. A `LoopClock` stops meanwhile, as far as a `LoopWatch` notices the block, and its deadlines
with it. They are also cheaper than a timer each: one timer serves them all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakKeyDictionary

_SLACK_SECONDS = 0.25
"""A loop delayed by less than this is busy, not blocked."""
_GRAIN_SECONDS = 0.002
"""Deadlines this close together share one timer."""


class Expiring(Protocol):
    """Something a `LoopClock` can watch."""

    when: float
    """When it expires. Set by the clock."""

    def expire(self) -> None:
        """Called when the time is up. The clock no longer watches it then."""


class LoopClock:
    """The time during which an event loop could work, and all deadlines measured with it. See `loop_clock`."""

    def __init__(self) -> None:
        self._lost = 0.0
        self._watched: set[Expiring] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._beat_due: float | None = None

    def now(self) -> float:
        return time.monotonic() - self._lost

    @property
    def lost(self) -> float:
        """Seconds the loop was blocked since it was first watched."""
        return self._lost

    def beat(self, due: float | None) -> None:
        """The loop is alive. `due`: when it will call again if nothing blocks it; None ends the watch."""
        self._catch_up()
        self._beat_due = due

    def watch(self, one: Expiring, seconds: float) -> None:
        """Expire it when the loop could work for `seconds`, unless it is forgotten first. If it is already watched,
        only the new time counts."""
        one.when = when = self.now() + seconds
        self._watched.add(one)
        timer = self._timer
        if timer is None or timer.when() > when + self._lost:
            self._arm(when)

    def forget(self, one: Expiring) -> None:
        """Stop watching it. Does nothing if it is not watched."""
        self._watched.discard(one)
        if not self._watched and self._timer is not None:
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
            for one in sorted((one for one in self._watched if one.when <= now), key=lambda one: one.when):
                if one in self._watched and one.when <= now:  # an earlier one may have ended it or extended its time
                    self.forget(one)
                    one.expire()
        finally:
            if self._watched and self._timer is None:
                self._arm(min(one.when for one in self._watched))

    def _catch_up(self) -> None:
        """Add the time since the loop's last beat was due to the lost time."""
        due = self._beat_due
        if due is not None and (late := time.monotonic() - due) > _SLACK_SECONDS:
            self._lost += late
            self._beat_due = due + late


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = WeakKeyDictionary()


def loop_clock() -> LoopClock:
    """The running loop's clock."""
    loop = asyncio.get_running_loop()
    clock = _clocks.get(loop)
    if clock is None:
        clock = _clocks[loop] = LoopClock()
    return clock


class Scope:
    """Like `asyncio.timeout`, but with a `LoopClock`, and can be expired from outside:

        with Scope(task, clock, seconds) as scope:
            await …
        if scope.expired: …

    The block is cancelled when time is up, and left without an exception. Other cancellations pass through.
    """

    __slots__ = ("_before", "_clock", "_expiring", "_is_open", "_seconds", "_task", "expired", "when")

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
        self._is_open = False
        self._before = 0
        self.when = 0.0

    def expire(self) -> None:
        """End the block now."""
        if self._is_open:
            self._close()
            self.expired = True
            if self._expiring is not None:
                self._expiring()
            self._task.cancel()

    def __enter__(self) -> Self:
        self._before = self._task.cancelling()
        self._clock.watch(self, self._seconds)
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._close()
        if not self.expired or self._task.uncancel() > self._before:
            return False
        return kind is None or issubclass(kind, asyncio.CancelledError)

    def _close(self) -> None:
        self._is_open = False
        self._clock.forget(self)
