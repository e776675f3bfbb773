"""A process that the tests run on the nodes of a cluster, which uses the limiter heavily."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time

from referee import Running


class Runner:
    """An actor. Every execution it starts under a permit tells the referee. It serves one test after another."""

    async def open(self, referee: str, name: str, limit: int | None, options: dict) -> None:
        from toolyard.limits.cluster.ray import RayLimiter

        self._referee = referee
        self._limiter = RayLimiter(name, limit, **options)
        self._kept: list[asyncio.Task] = []
        self._let_go = asyncio.Event()
        self._enough = asyncio.Event()

    async def close(self) -> None:
        for task in self._kept:
            task.cancel()
        await asyncio.gather(*self._kept, return_exceptions=True)
        await self._limiter.close()

    def jump_clocks(self) -> None:
        """Skews this process's wall clock; the machine's cannot be changed."""
        real = time.time
        time.time = lambda: real() + random.uniform(-1e6, 1e6)

    def pid(self) -> int:
        return os.getpid()

    async def flood(
        self, seconds: float, callers: int = 16, hold: float = 0.02, tenant: str = "", weight: float = 1.0,
        cancel: bool = False, fail: bool = False, times: float = math.inf,
    ) -> dict:  # fmt: skip
        """Ask for permits from `callers` tasks for a time, a number of `times`, or until `enough`.

        `cancel`: at random moments; `fail`: bodies raise.
        """
        until, enough = time.monotonic() + seconds, self._enough
        done = 0
        waits: list[float] = []

        async def one() -> None:
            nonlocal done
            asked = time.monotonic()
            async with self._limiter.permit(tenant, weight=weight):
                waits.append(time.monotonic() - asked)
                with Running(self._referee):
                    await asyncio.sleep(random.uniform(0.5, 1.5) * hold)
                    if fail:
                        raise ValueError("rotten")
            done += not enough.is_set()  # otherwise those still waiting would make the shares equal

        async def caller() -> None:
            while time.monotonic() < until and done < times and not enough.is_set():
                if cancel:
                    task = asyncio.create_task(one())
                    await asyncio.sleep(random.choice((0, 0, random.uniform(0, 3 * hold))))
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                else:
                    with contextlib.suppress(ValueError):
                        await one()

        await asyncio.gather(*(caller() for _ in range(callers)))
        return {"done": done, "started": len(waits), "longest": max(waits, default=0.0)}

    async def enough(self) -> None:
        """Ends the floods started so far."""
        self._enough.set()
        self._enough = asyncio.Event()

    async def wait_all(self, waiters: int, hold: float) -> int:
        """So many at once, each once."""

        async def one() -> None:
            async with self._limiter.permit():
                with Running(self._referee):
                    await asyncio.sleep(hold)

        await asyncio.gather(*(one() for _ in range(waiters)))
        return waiters

    async def keep(self, count: int, label: str = "") -> int:
        """Take `count` permits and hold them until `let_go`."""
        taken: asyncio.Queue[None] = asyncio.Queue()

        async def one() -> None:
            async with self._limiter.permit("keeper", label=label):
                with Running(self._referee):
                    taken.put_nowait(None)
                    await self._let_go.wait()

        self._kept += [asyncio.create_task(one()) for _ in range(count)]
        for _ in range(count):
            await taken.get()
        return count

    async def let_go(self) -> None:
        self._let_go.set()
        await asyncio.gather(*self._kept)

    async def resize(self, limit: int) -> None:
        await self._limiter.resize(limit)

    async def statistics(self) -> dict:
        from dataclasses import asdict

        return asdict(await self._limiter.statistics())
