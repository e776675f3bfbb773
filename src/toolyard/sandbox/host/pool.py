"""Slots and workers: slots are given out first come, first served; workers are kept warm per profile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from toolyard.errors import SandboxBusyError, SandboxClosedError, SandboxError
from toolyard.sandbox.host.routing import LIGHT
from toolyard.sandbox.host.zygote import Worker, Zygote

_log = logging.getLogger(__name__)
_PAUSE = 60
"""Seconds between attempts to start a zygote that no one is waiting for."""


class Slots:
    """At most `count` at once, first come, first served. A freed slot goes straight to the next waiter."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def take(self, within: float | None) -> float:
        """Wait for a slot. Return the seconds waited.

        Raises:
            SandboxBusyError: none became free in time.
        """
        if self._closed:
            raise SandboxClosedError("the sandbox is closed")
        if self.free and not self._waiters:
            self.free -= 1
            return 0.0
        start = time.monotonic()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(within):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                # The slot was handed over just as we gave up: pass it on, or it is lost forever.
                self.give()
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            if isinstance(error, TimeoutError):
                raise SandboxBusyError(
                    f"no sandbox worker became free within {within:g} s ({self.count} workers, {self.waiting} waiting)",
                    retry_after=max(1.0, within or 1.0),
                ) from None
            raise
        return time.monotonic() - start

    def take_idle(self) -> bool:
        """Take a slot if that keeps no one waiting."""
        if self.free <= 0 or self._closed:
            return False
        self.free -= 1
        return True

    def give(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.free += 1

    def close(self) -> None:
        self._closed = True
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(SandboxClosedError("the sandbox was closed while the program waited to start"))


class Pool:
    """Idle workers by profile. Zygotes are started on first use, and restarted if they die."""

    def __init__(self, make_zygote: Callable[[str], Zygote], *, idle: int, max_runs: int) -> None:
        self._make_zygote = make_zygote
        self._idle_limit = idle
        self._max_runs = max_runs
        self._idle: dict[str, deque[Worker]] = {}
        self.zygotes: dict[str, Zygote] = {}
        self._not_before: dict[str, float] = {}
        self._starting: dict[str, asyncio.Task[Zygote]] = {}
        self._closed = False
        self.live: dict[str, int] = {}
        """Live workers by profile, both idle and busy."""

    def ready(self, profile: str) -> bool:
        """Whether the profile's zygote is warm. If not, it is started in the background; others serve meanwhile."""
        zygote = self.zygotes.get(profile)
        if zygote is not None and zygote.alive:
            return True
        due = time.monotonic() > self._not_before.get(profile, 0.0)
        if profile not in self._starting and due and not self._closed:
            self._begin(profile)
        return False

    def _begin(self, profile: str) -> asyncio.Task[Zygote]:
        task = asyncio.get_running_loop().create_task(self._start(profile), name=f"start zygote {profile}")
        self._starting[profile] = task
        task.add_done_callback(lambda done: self._started(profile, done))
        return task

    async def _start(self, profile: str) -> Zygote:
        old = self.zygotes.pop(profile, None)
        if old is not None:
            await old.stop()
        zygote = self._make_zygote(profile)
        await zygote.start()
        self.zygotes[profile] = zygote
        return zygote

    def _started(self, profile: str, task: asyncio.Task[Zygote]) -> None:
        self._starting.pop(profile, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Waiters get the error too. Meanwhile, programs run from another zygote.
            _log.warning("zygote %r did not start, trying again in %d s: %s", profile, _PAUSE, error)
            self._not_before[profile] = time.monotonic() + _PAUSE

    async def zygote(self, profile: str) -> Zygote:
        zygote = self.zygotes.get(profile)
        if zygote is not None and zygote.alive:
            return zygote
        if self._closed:  # or a zygote would be started that nothing stops
            raise SandboxClosedError("the sandbox is closed")
        task = self._starting.get(profile) or self._begin(profile)
        await asyncio.wait([task])  # unlike awaiting the task, only our own caller can cancel this
        if task.cancelled():
            raise SandboxClosedError("the sandbox was closed while a zygote started")
        return task.result()

    @asynccontextmanager
    async def worker(self, profile: str) -> AsyncGenerator[Worker]:
        """A worker for one request. It returns to the pool unless it died, retired, or reached its number of runs."""
        worker = await self._take(profile)
        try:
            yield worker
        finally:
            self._give_back(profile, worker)

    async def _take(self, profile: str) -> Worker:
        idle = self._idle.setdefault(profile, deque())
        while idle:
            # Take the one idle longest: its next child has been forked by now.
            worker = idle.popleft()
            if worker.alive and worker.zygote.alive:
                return worker
            self.discard(profile, worker)
        return await self.spawn(profile)

    async def spawn(self, profile: str) -> Worker:
        for attempt in range(3):
            zygote = await self.zygote(profile)
            try:
                worker = await zygote.spawn()
            except SandboxError:
                if zygote.alive or attempt == 2:
                    raise
                continue  # it died between two requests: start a new one
            self.live[profile] = self.live.get(profile, 0) + 1
            return worker
        raise AssertionError("unreachable")

    def _give_back(self, profile: str, worker: Worker) -> None:
        idle = self._idle.setdefault(profile, deque())
        if worker.alive and worker.runs < self._max_runs and len(idle) < self._idle_limit and not self._closed:
            idle.append(worker)
        else:
            self.discard(profile, worker)

    def discard(self, profile: str, worker: Worker) -> None:
        worker.close()
        self.live[profile] -= 1

    async def warm_up(self, count: int) -> None:
        """Start `count` workers of the light profile."""
        for _ in range(count):
            self._idle.setdefault(LIGHT, deque()).append(await self.spawn(LIGHT))

    async def close(self) -> None:
        self._closed = True
        for task in list(self._starting.values()):
            task.cancel()
            await _quietly(task)
        for idle in self._idle.values():
            for worker in idle:
                worker.close()
            idle.clear()
        for zygote in self.zygotes.values():
            await zygote.stop()
        self.zygotes.clear()


async def _quietly(task: Awaitable[object]) -> None:
    try:
        await task
    except (asyncio.CancelledError, SandboxError):
        return
