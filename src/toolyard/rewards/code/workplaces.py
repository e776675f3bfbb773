"""Where answers are run: in a sandbox that keeps imported what answers import, under permits, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from toolyard.execution.workplaces import Workplaces, permits
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
"""Kept imported for all answers: what they import most, and the harness. Each would cost more than running the case.
Others are imported once for all cases of an answer, and make those of other answers no larger."""


@runtime_checkable
class RunsEach(Protocol):
    """A sandbox that runs one program on many inputs more cheaply than one by one."""

    def run_each(
        self,
        program: Program,
        stdins: Sequence[str | bytes | None],
        limits: Limits | None = None,
        *,
        batch_results: bool = False,
    ) -> AsyncGenerator[Execution]: ...


class Workplace:
    """The sandbox of one event loop, the permits to use it, and how many batches of ours do."""

    def __init__(self, sandbox: Sandbox, workers: Limiter, limiter: Limiter | None) -> None:
        self.sandbox = sandbox
        self.batches = sandbox if isinstance(sandbox, RunsEach) else None
        self._workers, self._limiter = workers, limiter
        self.capacity = workers.limit if limiter is None else min(workers.limit, limiter.limit)
        """Batches that can make progress at the same time."""
        if isinstance(sandbox, LocalSandbox):
            self.capacity = min(self.capacity, sandbox.statistics().workers)
        self.busy = 0
        self.at_once = 2 * self.capacity
        """Answers that it pays to judge at the same time: while one is settled, the next waits at the door."""
        self.turns = asyncio.Semaphore(self.at_once)

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.busy)

    def permits(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """The right to run one batch."""
        return permits(self._workers, self._limiter, tenant)


def code_workplaces(settings: CodeSettings, sandbox: Sandbox | None, limiter: Limiter | None) -> Workplaces[Workplace]:
    """What you pass is used as it is and stays open; the rest is opened when needed, and closed by `close()`."""
    workers = LocalLimiter(settings.num_workers)

    async def open_place(shared: Limiter | None) -> Workplace:
        return Workplace(await _new_sandbox(settings) if sandbox is None else sandbox, workers, shared)

    async def close_place(place: Workplace) -> None:
        if sandbox is None:
            await place.sandbox.__aexit__(None, None, None)

    rate_limit = settings.rate_limit if settings.enable_global_rate_limit else None
    return Workplaces(open_place, close_place, rate_limit=rate_limit, limiter=limiter, owner="code judge")


async def _new_sandbox(settings: CodeSettings) -> Sandbox:
    if settings.sandbox_fusion_url:
        return await RemoteSandbox(settings.sandbox_fusion_url).__aenter__()
    profiles = {LIGHT: (), **SandboxConfig().profiles}
    profiles = {name: (*modules, *_IMPORTED) for name, modules in profiles.items()}
    return await LocalSandbox(profiles=profiles).__aenter__()
