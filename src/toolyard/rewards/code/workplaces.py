"""The sandbox for answers, with their imports preloaded, and the permits to use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from toolyard.execution.workplaces import Workplaces, new_ray_sandbox, permits
from toolyard.limits.local import LocalLimiter
from toolyard.limits.protocol import Limiter
from toolyard.rewards.code.protocol import CodeSettings
from toolyard.sandbox.host.routing import LIGHT
from toolyard.sandbox.local import LocalSandbox, SandboxConfig
from toolyard.sandbox.protocol import Execution, Limits, Program, Sandbox
from toolyard.sandbox.remote.sandbox import RemoteSandbox

_IMPORTED = (
    *("bisect", "collections", "copy", "functools", "heapq", "itertools", "json", "math", "operator", "re", "string"),
    "typing",
)
"""Preloaded for all answers: their most common imports, and the harness. Each would take longer than running the case.
Others are imported once for all cases of an answer, and do not enlarge those of other answers."""


@runtime_checkable
class RunsEach(Protocol):
    """A sandbox that can run one program on many inputs more cheaply than one by one."""

    def run_each(
        self,
        program: Program,
        stdins: Sequence[str | bytes | None],
        limits: Limits | None = None,
        *,
        batch_results: bool = False,
    ) -> AsyncGenerator[Execution]: ...


class Workplace:
    """The sandbox of one event loop, the permits to use it, and the number of our running batches."""

    def __init__(self, sandbox: Sandbox, workers: Limiter, limiter: Limiter | None) -> None:
        self.sandbox = sandbox
        self.batches = sandbox if isinstance(sandbox, RunsEach) else None
        self._workers, self._limiter = workers, limiter
        self.capacity = workers.limit if limiter is None else min(workers.limit, limiter.limit)
        """Number of batches that can make progress at the same time."""
        if isinstance(sandbox, LocalSandbox):
            self.capacity = min(self.capacity, sandbox.statistics().workers)
        self.busy = 0
        self.at_once = 2 * self.capacity
        """Number of answers worth judging at the same time: while one is finished, the next waits for a permit."""
        self.turns = asyncio.Semaphore(self.at_once)

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.busy)

    def permits(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Hold the right to run one batch."""
        return permits(self._workers, self._limiter, tenant)


def code_workplaces(settings: CodeSettings, sandbox: Sandbox | None, limiter: Limiter | None) -> Workplaces[Workplace]:
    """Arguments passed in are used as they are and stay open; the rest is opened on demand and closed by `close()`."""
    workers = LocalLimiter(settings.num_workers)

    async def open_place(shared: Limiter | None) -> Workplace:
        return Workplace(await _new_sandbox(settings) if sandbox is None else sandbox, workers, shared)

    async def close_place(place: Workplace) -> None:
        if sandbox is None:
            await place.sandbox.__aexit__(None, None, None)

    rate_limit = settings.rate_limit if settings.enable_global_rate_limit else None
    return Workplaces(open_place, close_place, rate_limit=rate_limit, limiter=limiter, owner="code judge")


async def _new_sandbox(settings: CodeSettings) -> Sandbox:
    if settings.sandbox == "ray":
        return await new_ray_sandbox().__aenter__()
    if settings.sandbox_fusion_url:
        return await RemoteSandbox(settings.sandbox_fusion_url).__aenter__()
    profiles = {LIGHT: (), **SandboxConfig().profiles}
    profiles = {name: (*modules, *_IMPORTED) for name, modules in profiles.items()}
    return await LocalSandbox(profiles=profiles).__aenter__()
