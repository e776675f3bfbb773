"""Helpers of the limiter's contract: executions under its permits, counted from outside."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import pytest

from toolyard.errors import LimiterTimeoutError
from toolyard.limits.protocol import Limiter, LimiterStatistics

PATIENCE = 10.0
"""Seconds to wait for something that should happen."""


class Make(Protocol):
    """Makes an open limiter. Two with the same `name` are two handles of one limiter."""

    async def __call__(self, limit: int, *, name: str | None = None, **options: Any) -> Limiter: ...


class Gauge:
    """Counts concurrent executions, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = self.most = self.entered = 0

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.entered += 1
            self.most = max(self.most, self.inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self.inside -= 1


class Crowd:
    """Executions under a limiter. Each runs until `let_go`."""

    def __init__(self, limiter: Limiter, tasks: asyncio.TaskGroup) -> None:
        self.gauge = Gauge()
        self.started: list[str] = []
        """Labels of started executions, in order."""
        self.inside: set[str] = set()
        self._limiter = limiter
        self._tasks = tasks
        self._ends: dict[str, asyncio.Event] = {}

    def add(self, label: str, tenant: str = "", weight: float = 1.0) -> asyncio.Task[None]:
        self._ends[label] = asyncio.Event()
        return self._tasks.create_task(self._run(label, tenant, weight), name=label)

    def add_many(self, count: int, tenant: str, weight: float = 1.0) -> None:
        for n in range(count):
            self.add(f"{tenant} {n}", tenant, weight)

    def let_go(self, *labels: str) -> None:
        for label in labels or self._ends:
            self._ends[label].set()

    async def has_inside(self, count: int) -> bool:
        return await eventually(lambda: self.gauge.inside == count)

    async def has_started(self, count: int) -> bool:
        return await eventually(lambda: len(self.started) == count)

    async def _run(self, label: str, tenant: str, weight: float) -> None:
        async with self._limiter.permit(tenant, weight=weight, label=label):
            self.started.append(label)
            self.inside.add(label)
            try:
                with self.gauge:
                    await self._ends[label].wait()
            finally:
                self.inside.remove(label)


@contextlib.asynccontextmanager
async def crowd_at(limiter: Limiter) -> AsyncGenerator[Crowd]:
    """A crowd whose executions are let go at the end, and must then end."""
    async with asyncio.timeout(3 * PATIENCE), asyncio.TaskGroup() as tasks:
        crowd = Crowd(limiter, tasks)
        yield crowd
        crowd.let_go()


async def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.001)
    return True


async def statistics_once(limiter: Limiter, holds: Callable[[LimiterStatistics], bool]) -> LimiterStatistics:
    """The first statistics for which `holds` is true; if it never is, the last ones seen, for the assertion to show."""
    deadline = time.monotonic() + PATIENCE
    while not holds(found := await limiter.statistics()) and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)
    return found


async def can_be_held(limiter: Limiter) -> int:
    """How many permits can be held at once: exactly the limit, unless permits were lost or invented."""
    async with contextlib.AsyncExitStack() as stack:
        for count in range(limiter.limit + 1):
            timeout = PATIENCE if count < limiter.limit else 0.05
            try:
                await stack.enter_async_context(limiter.permit("counting", timeout=timeout))
            except LimiterTimeoutError:
                return count
    return limiter.limit + 1


async def gives_all_back(limiter: Limiter) -> bool:
    """Whether all permits come back within `PATIENCE`. For tests that must not hold a permit themselves."""
    return (await statistics_once(limiter, lambda found: found.in_flight == 0)).in_flight == 0


async def in_threads(count: int, work: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(count) as threads:
        for done in [loop.run_in_executor(threads, work) for _ in range(count)]:
            await done


class LimiterClaims:
    """The attributes of every part of the contract: see `LimiterContract`."""

    pytestmark = pytest.mark.asyncio

    settle_seconds: float = 0.05
    """After this time a change has reached every handle and taken effect. Raise it for limiters that use messages."""
    extra_starts: int = 0
    """How many more executions may start than `starts_per_second` and `burst` allow. Raise it if processes share a
    rate."""
