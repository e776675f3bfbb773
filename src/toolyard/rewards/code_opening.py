"""Where answers are run: a sandbox for each event loop that asks for one, one limiter for all, opened when needed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from toolyard.limits.local import LocalLimiter
from toolyard.limits.protocol import Limiter
from toolyard.limits.widest import widest_limiter
from toolyard.sandbox.local import LocalSandbox, SandboxConfig
from toolyard.sandbox.protocol import Execution, Limits, Program, Sandbox
from toolyard.sandbox.remote import RemoteSandbox
from toolyard.sandbox.routing import LIGHT

from .code_protocol import CodeSettings

_log = logging.getLogger(__name__)

LIMITER = "rate-limiter"
"""The code interpreter's: one limit for all executions of a cluster, whoever asks for them."""
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
        in_bunches: bool = False,
    ) -> AsyncGenerator[Execution]: ...


class Workplace:
    """The sandbox of one event loop, the permits to use it, and how many batches of ours do."""

    def __init__(self, sandbox: Sandbox, limiters: Sequence[Limiter]) -> None:
        self.sandbox = sandbox
        self.batches = sandbox if isinstance(sandbox, RunsEach) else None
        self._own, *self._shared = limiters
        self.capacity = min(limiter.limit for limiter in limiters)
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

    @asynccontextmanager
    async def permits(self, tenant: str) -> AsyncGenerator[None]:
        """The right to run one batch."""
        async with self._own.permit(tenant):
            if not self._shared:
                yield
            else:
                async with self._shared[0].permit(tenant, label=tenant):
                    yield


class _Opening:
    """The workplace of one event loop, and who is about to open it."""

    def __init__(self) -> None:
        self.place: Workplace | None = None
        self.lock = asyncio.Lock()


class Workplaces:
    """What is given is used as it is and stays open; what is not given is opened here, and closed by `close()`."""

    def __init__(self, settings: CodeSettings, sandbox: Sandbox | None, limiter: Limiter | None) -> None:
        self._settings = settings
        self._given_sandbox = sandbox
        self._given_limiter = limiter
        self._made_limiter: Limiter | None = None
        self._making = threading.Lock()
        self._workers = LocalLimiter(settings.num_workers)
        self._openings: dict[asyncio.AbstractEventLoop, _Opening] = {}

    async def here(self) -> Workplace:
        """That of this event loop. Whoever comes first opens it, with the limiter; the others wait."""
        loop = asyncio.get_running_loop()
        opening = self._openings.get(loop)
        if opening is None:
            for ended in [other for other in self._openings if other.is_closed()]:
                del self._openings[ended]  # without `close()`: its processes end when they notice
            opening = self._openings[loop] = _Opening()
        if opening.place is None:
            async with opening.lock:
                if opening.place is None:
                    limiters = await self._limiters()
                    sandbox = self._given_sandbox
                    opening.place = Workplace(await self._new_sandbox() if sandbox is None else sandbox, limiters)
        return opening.place

    async def close(self) -> None:
        """Close the sandbox of this event loop, and the limiter with the last of them."""
        opening = self._openings.pop(asyncio.get_running_loop(), None)
        if opening is not None:
            async with opening.lock:
                if opening.place is not None and self._given_sandbox is None:
                    await opening.place.sandbox.__aexit__(None, None, None)
        if self._made_limiter is not None and all(loop.is_closed() for loop in self._openings):
            limiter, self._made_limiter = self._made_limiter, None
            await limiter.close()

    async def _new_sandbox(self) -> Sandbox:
        if self._settings.sandbox_fusion_url:
            return await RemoteSandbox(self._settings.sandbox_fusion_url).__aenter__()
        profiles = {LIGHT: (), **SandboxConfig().profiles}
        profiles = {name: (*modules, *_IMPORTED) for name, modules in profiles.items()}
        return await LocalSandbox(profiles=profiles).__aenter__()

    async def _limiters(self) -> list[Limiter]:
        if self._given_limiter is not None:
            return [self._workers, self._given_limiter]
        if not self._settings.enable_global_rate_limit:
            return [self._workers]
        return [self._workers, self._made_limiter or await asyncio.to_thread(self._make_limiter)]

    def _make_limiter(self) -> Limiter:
        """In a thread, which goes on if whoever waits for it is cancelled: what it makes must not be lost."""
        with self._making:
            if self._made_limiter is None:
                self._made_limiter = widest_limiter(LIMITER, self._settings.rate_limit)
                where = "in this process" if isinstance(self._made_limiter, LocalLimiter) else "in the Ray cluster"
                _log.info("at most %d executions in flight %s", self._settings.rate_limit, where)
            return self._made_limiter
