"""Notices that a server has gone silent while requests wait for it, long before their own deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

PING_SECONDS = 2.0
"""Ping a server that is silent for this long, this often, and wait this long for the reply."""
_MISSES = 2
"""Missed pings in a row. One may be lost to a moment of load, on either side."""


class Health:
    """The health of one server. `ping` returns whether it answered within `PING_SECONDS`."""

    def __init__(self, ping: Callable[[], Awaitable[bool]]) -> None:
        self.lost = False
        """It missed its pings and has not answered anything since."""
        self._ping = ping
        self._waiting: dict[asyncio.Timeout, float] = {}
        """Deadlines and when each started to wait; the longest wait comes first."""
        self._heard = 0.0
        self._watcher: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, deadline: asyncio.Timeout) -> Generator[None]:
        """Make `deadline` expire if the server is lost. Leaving without an exception means that it answered."""
        self._waiting[deadline] = _now()
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            del self._waiting[deadline]
        self._answered()

    async def is_back(self) -> bool:
        """Whether a lost server answers again."""
        if await self._ping():
            self._answered()
        return not self.lost

    async def close(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait([watcher])

    def lose(self) -> None:
        """Give up those who wait."""
        self.lost = True
        for deadline in self._waiting:
            if not deadline.expired():
                deadline.reschedule(_now())

    def _answered(self) -> None:
        self._heard, self.lost = _now(), False

    async def _watch(self) -> None:
        missed = 0
        while self._waiting:
            since = max(self._heard, next(iter(self._waiting.values())))
            if (early := since + PING_SECONDS - _now()) > 0:
                missed = 0
                await asyncio.sleep(early)
                continue
            begun = _now()
            if await self._ping():
                self._answered()
            elif self._heard < begun:  # and no other answer arrived meanwhile
                missed += 1
                if missed == _MISSES:
                    self.lose()
                    return
                await asyncio.sleep(begun + PING_SECONDS - _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
