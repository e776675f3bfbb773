"""How many requests may run, decided from what the engine's servers say about their load.

A request that waits in a server's queue samples nothing, but its cache may be evicted meanwhile, and it cannot go to
another server. So fewer requests are started while servers queue, and more while they have room.

Down. If more than half as many requests wait as run, the limit is cut to what would leave a quarter waiting, at
most by half. Fractions add up over a cluster: if each of its workers cuts by a tenth, all together do. Running requests
are not stopped, so a cut takes effect as they end; until then there is no further one.

Up. If at most an eighth as many wait as run, the limit is used, and caches are not nearly full, it grows: twofold
until the first cut, then by a sixteenth. Between the two it stays. A step up fits into this band, so it does not cause
the next cut. Some requests are left waiting on purpose: they keep the servers busy while others call tools, and where
servers have unequal shares.

Servers that say nothing count as servers with room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from toolyard.engines.protocol import Load

_FIRST = 32
_MOST_WAITING, _LEFT_WAITING, _LEAST_WAITING = 1 / 2, 1 / 4, 1 / 8
"""Waiting requests per running one: cut above the first, cut to the second, grow up to the third."""
_STEP = 1 / 16
_FULL = 0.9
"""Use of the KV cache, from 0 to 1, at which more requests would only evict each other."""


Loads = Callable[[], Awaitable[Sequence[Load]]]
"""Asks the servers; those that say nothing are left out."""


class AdaptiveConcurrency:
    """The current limit. Decides only: the caller asks the servers and enforces it."""

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._grows_fast = True
        self.limit = min(ceiling, _FIRST)
        """At least 1."""

    def decide(self, loads: Sequence[Load], active: int) -> int:
        """`active`: requests that run now."""
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        if waiting > max(1, _MOST_WAITING * running):
            self._grows_fast = False
            if active <= self.limit:
                share = max(0.5, (1 + _LEFT_WAITING) * running / (running + waiting))
                self.limit = max(1, min(int(active * share), self.limit - 1))
        elif waiting <= _LEAST_WAITING * running and active >= self.limit and all(load.usage < _FULL for load in loads):
            step = self.limit if self._grows_fast else max(1, int(_STEP * self.limit))
            self.limit = min(self._ceiling, self.limit + step)
        return self.limit


class Gate:
    """Lets at most `limit` in, which may change. If it is lowered, those inside stay."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._places = asyncio.Semaphore(limit)
        self._debt = 0
        """Places to take away as they become free."""

    async def enter(self) -> None:
        await self._places.acquire()
        while self._debt:
            self._debt -= 1
            await self._places.acquire()

    def leave(self) -> None:
        if self._debt:
            self._debt -= 1
        else:
            self._places.release()

    def resize(self, limit: int) -> None:
        self._debt += max(0, self.limit - limit)
        for _ in range(limit - self.limit):
            self.leave()
        self.limit = limit
