"""Where programs run: a sandbox per event loop, and one limiter for all of them.

A sandbox belongs to the event loop that opened it, but tools and rewards are called from several: a trainer's, a reward
worker's, those of tests. So each loop gets its own on first use, and the code that uses a tool in a loop closes it
there.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from toolyard.errors import ConfigError
from toolyard.limits.local import LocalLimiter
from toolyard.limits.protocol import DEFAULT_NAME, Limiter
from toolyard.sandbox.protocol import Sandbox

_log = logging.getLogger(__name__)

T = TypeVar("T", bound="HasSandbox")


class HasSandbox(Protocol):
    @property
    def sandbox(self) -> Sandbox: ...


def shared_limiter(name: str, limit: int) -> Limiter:
    """The cluster's limiter with this name if Ray is connected, otherwise this process's.

    Blocks while it waits for the cluster: call it in a thread. It does not import Ray: a process that has not imported
    it is not connected.

    Raises:
        LimitConflictError: a limiter with this name has another limit.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return LocalLimiter(limit, name=name)
    from toolyard.limits.cluster.ray import RayLimiter

    return RayLimiter(name, limit)


def check_place(sandbox: str | None, sandbox_fusion_url: object) -> None:
    """Check the settings that say where programs run.

    Raises:
        ConfigError: they contradict each other.
        MissingDependencyError: Ray is not installed.
    """
    if sandbox is not None and sandbox_fusion_url:
        raise ConfigError(f"`sandbox: {sandbox}` and `sandbox_fusion_url` contradict each other: remove one of them")
    if sandbox == "ray":
        new_ray_sandbox()


def new_ray_sandbox() -> Sandbox:
    """The sandbox of the cluster that this process is connected to. Imports Ray, which takes a second.

    Raises:
        MissingDependencyError: Ray is not installed.
    """
    from toolyard.sandbox.cluster.ray import RaySandbox

    return RaySandbox()


@asynccontextmanager
async def permits(own: Limiter, shared: Limiter | None, tenant: str) -> AsyncGenerator[None]:
    """Hold the right to run one program: first this process's permit, then the shared one."""
    async with own.permit(tenant):
        if shared is None:
            yield
        else:
            async with shared.permit(tenant, label=tenant):
                yield


class _Opening(Generic[T]):
    """What one event loop has open or is opening."""

    def __init__(self) -> None:
        self.place: T | None = None
        self.lock = asyncio.Lock()


class Workplaces(Generic[T]):
    """Opens a place in every event loop that asks for one. The limiter is opened before the first."""

    def __init__(
        self,
        open_place: Callable[[Limiter | None], Awaitable[T]],
        close_place: Callable[[T], Awaitable[None]],
        *,
        rate_limit: int | None,
        limiter: Limiter | None = None,
        owner: str,
    ) -> None:
        """
        Args:
            open_place: Called with the limiter, in the loop that the place is for.
            rate_limit: The limit of the limiter to open. None: no limiter.
            limiter: Used instead, and left open.
            owner: For the log.
        """
        self._open = open_place
        self._close = close_place
        self._rate_limit = rate_limit
        self._given = limiter
        self._made: Limiter | None = None
        self._making = threading.Lock()
        self._owner = owner
        self._openings: dict[asyncio.AbstractEventLoop, _Opening[T]] = {}
        with _known_lock:
            _known.add(self)

    @property
    def limiter(self) -> Limiter | None:
        """None: there is none, or nobody has asked for a place yet."""
        return self._given or self._made

    @property
    def sandboxes(self) -> list[Sandbox]:
        """The open ones, of all event loops. Can be read from any thread."""
        return [opening.place.sandbox for opening in list(self._openings.values()) if opening.place is not None]

    async def here(self) -> T:
        """Return this event loop's place. The first caller opens it; others wait.

        Raises:
            LimitConflictError: the limiter exists with another limit.
        """
        loop = asyncio.get_running_loop()
        opening = self._openings.get(loop)
        if opening is None:
            for ended in [other for other in self._openings if other.is_closed()]:
                del self._openings[ended]  # left without `close()`: its processes notice and exit
            opening = self._openings[loop] = _Opening()
        if opening.place is None:
            async with opening.lock:
                if opening.place is None:
                    opening.place = await self._open(await self._limiter())
        return opening.place

    async def close(self) -> None:
        """Close this event loop's place, and with the last one the limiter. A later call opens them again."""
        opening = self._openings.pop(asyncio.get_running_loop(), None)
        if opening is not None:
            async with opening.lock:
                if opening.place is not None:
                    await self._close(opening.place)
        if self._made is not None and all(loop.is_closed() for loop in self._openings):
            limiter, self._made = self._made, None
            await limiter.close()

    async def _limiter(self) -> Limiter | None:
        if self.limiter is not None or self._rate_limit is None:
            return self.limiter
        return await asyncio.to_thread(self._make_limiter, self._rate_limit)

    def _make_limiter(self, rate_limit: int) -> Limiter:
        """Runs in a thread, which continues if its waiter is cancelled: the limiter it creates must not be lost."""
        with self._making:
            if self._made is None:
                self._made = shared_limiter(DEFAULT_NAME, rate_limit)
                local = isinstance(self._made, LocalLimiter)
                where = "in this process; Ray is not connected" if local else "in the Ray cluster"
                _log.info("%s: at most %d executions in flight %s", self._owner, rate_limit, where)
            return self._made


_known: weakref.WeakSet[Workplaces[Any]] = weakref.WeakSet()
_known_lock = threading.Lock()


def open_sandboxes() -> list[Sandbox]:
    """All sandboxes that tools and rewards of this process have open. Can be called from any thread."""
    return list({id(sandbox): sandbox for places in _all_known() for sandbox in places.sandboxes}.values())


def open_limiters() -> list[Limiter]:
    """All limiters that tools and rewards of this process share, one of each name."""
    found = [places.limiter for places in _all_known()]
    return list({getattr(one, "name", ""): one for one in found if one is not None}.values())


def _all_known() -> list[Workplaces[Any]]:
    with _known_lock:
        return list(_known)
