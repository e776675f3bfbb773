"""Detect servers that have gone silent: they accept requests, but answer none.

A request can take minutes, so silence alone means little. A server that has answered nothing for some seconds gets a
health check. If it fails two in a row, or is silent for long while its peers answer, its requests are moved, and it is
not used until a health check succeeds.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from toolyard.failover import Router

_LOOK_SECONDS = 1.0
_HEALTH_SECONDS = 5.0
"""Silence before a health check; time between two checks; and time limit of a check."""
_HEALTH_FAILURES = 2
_SLOWER = 4.0
"""Silence is suspicious only if it is this many times longer than the slowest recent answer."""
_FORGET = 0.9
"""Factor by which the slowest answer decays with each further one."""


@dataclass(slots=True)
class _Server:
    in_flight: int = 0
    quiet_since: float = 0.0
    """Time of its last answer, or of the first request after an idle period."""
    slowest: float = 0.0
    """Seconds of the slowest recent answer."""
    asked_at: float = 0.0
    failures: int = 0
    """Consecutive failed health checks."""


class Watchdog:
    """Watches several servers. `move` is called with the server that requests must leave, and why."""

    def __init__(
        self,
        router: Router,
        *,
        is_healthy: Callable[[str], Awaitable[bool]],
        move: Callable[[str, str], None],
        silence_seconds: float,
    ) -> None:
        self._servers: defaultdict[str, _Server] = defaultdict(_Server)
        """All that were ever sent a request: what is in flight on a server that was removed is still watched."""
        self._router = router
        self._is_healthy = is_healthy
        self._move = move
        self._silence = silence_seconds

    def sent(self, server: str) -> None:
        found = self._servers[server]
        if not found.in_flight:
            found.quiet_since = time.monotonic()
        found.in_flight += 1

    def ended(self, server: str, *, answered: bool, seconds: float) -> None:
        found = self._servers[server]
        found.in_flight -= 1
        if answered:
            found.quiet_since, found.failures = time.monotonic(), 0
            found.slowest = max(seconds, found.slowest * _FORGET)

    async def watch(self) -> None:
        """Run for as long as the engine is open."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            async with asyncio.TaskGroup() as group:
                for server in self._to_ask(time.monotonic()):
                    group.create_task(self._ask(server))
            for server, why in self._silent(time.monotonic()):
                self._leave(server, why)

    def _to_ask(self, now: float) -> list[str]:
        due: list[str] = []
        for server, found in self._servers.items():
            waiting = self._router.is_held(server, now) or (
                found.in_flight and now - found.quiet_since >= _HEALTH_SECONDS
            )
            if waiting and now - found.asked_at >= _HEALTH_SECONDS:
                found.asked_at = now
                due.append(server)
        return due

    async def _ask(self, server: str) -> None:
        healthy, found = await self._is_healthy(server), self._servers[server]
        found.failures = 0 if healthy else found.failures + 1
        if healthy:
            self._router.release(server, time.monotonic())
        elif found.failures >= _HEALTH_FAILURES and found.in_flight:
            self._leave(server, "it fails its health check")

    def _silent(self, now: float) -> list[tuple[str, str]]:
        """Return servers that are silent while others answer."""
        silent: list[tuple[str, str]] = []
        for server, found in self._servers.items():
            quiet = now - found.quiet_since
            peers = [
                peer for name, peer in self._servers.items() if name != server and peer.quiet_since > found.quiet_since
            ]
            slowest = max((peer.slowest for peer in peers), default=0.0)
            if found.in_flight and slowest and quiet >= max(self._silence, _SLOWER * slowest):
                silent.append((server, f"it has answered nothing for {quiet:.0f} s, while others answer"))
        return silent

    def _leave(self, server: str, why: str) -> None:
        self._router.hold(server, time.monotonic())
        self._move(server, why)
