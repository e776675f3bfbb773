"""`LocalLimiter`: a limiter for one process, without dependencies."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref

from toolyard.errors import ConfigError, LimitConflictError
from toolyard.limits.adaptive import AdaptiveLimit
from toolyard.limits.background import background
from toolyard.limits.desk import Desk, DeskPermit
from toolyard.limits.protocol import LimiterStatistics
from toolyard.limits.rate import TokenBucket

HOLDERS = 10
"""How many of the longest-held permits the statistics list."""


class LocalLimiter:
    """At most `limit` in flight in this process, across all its event loops and threads.

    `adaptive`: follow what the service can handle, judging by its refusals (`Permit.refused`), never above `limit`.
    `starts_per_second`: also limit how many start per second, in bursts of at most `burst`.
    `max_hold_seconds`: take back permits held longer than this and cancel their async body; None: never.
    `name`: limiters with the same name share their permits; giving them different limits is an error.
    """

    def __init__(
        self,
        limit: int,
        *,
        name: str | None = None,
        adaptive: bool = False,
        starts_per_second: float | None = None,
        burst: float | None = None,
        max_hold_seconds: float | None = None,
    ) -> None:
        check_limit(limit, name or "local")
        check_hold(max_hold_seconds)
        with _named_lock:
            desk = _named.get(name) if name is not None else None
            if desk is None:
                bucket = None if starts_per_second is None else TokenBucket(starts_per_second, burst, time.monotonic())
                desk = LocalDesk(name or "local", limit, adaptive=adaptive, bucket=bucket, max_hold=max_hold_seconds)
                if name is not None:
                    _named[name] = desk
            elif limit not in (desk.limit, desk.configured):
                raise conflict(desk.name, limit, desk.limit)
            desk.users += 1
        self._desk = desk
        self._open = True

    @property
    def name(self) -> str:
        return self._desk.name

    @property
    def limit(self) -> int:
        return self._desk.limit

    def permit(
        self, tenant: str = "", *, weight: float = 1.0, timeout: float | None = None, label: str = ""
    ) -> DeskPermit:
        return self._desk.permit(tenant, weight, timeout, label)

    async def resize(self, limit: int) -> None:
        check_limit(limit, self.name)
        self._desk.resize(limit)

    async def statistics(self) -> LimiterStatistics:
        return self._desk.statistics()

    def read_statistics(self) -> LimiterStatistics:
        """`statistics()` without an event loop. Blocks briefly for the desk's lock."""
        return self._desk.statistics()

    async def close(self) -> None:
        """Limiters that share a name are closed when the last of them is."""
        with _named_lock:
            self._desk.users -= self._open
            self._open = False
            if self._desk.users:
                return
            if _named.get(self.name) is self._desk:
                del _named[self.name]
        self._desk.close()


class LocalDesk(Desk):
    def __init__(
        self, name: str, limit: int, *, adaptive: bool, bucket: TokenBucket | None, max_hold: float | None
    ) -> None:
        super().__init__(name, limit, limit, max_hold=max_hold, bucket=bucket)
        self._adaptive = AdaptiveLimit(limit) if adaptive else None
        self._following = False
        self.configured = limit
        self.users = 0

    def resize(self, limit: int) -> None:
        with self.lock:
            self.limit = self.stock = limit
            if self._adaptive is not None:
                self._adaptive.resize(limit)
                self.stock = self._adaptive.limit
        self.serve()

    def refuse(self, retry_after: float | None, *, unavailable: bool) -> None:
        super().refuse(retry_after, unavailable=unavailable)
        controller = self._adaptive
        if controller is None:
            return
        with self.lock:
            now = time.monotonic()
            controller.refused(now, self.in_use, retry_after=retry_after, unavailable=unavailable)
            self.stock = controller.limit
            self.closed_until = max(self.closed_until, controller.paused_until)
            self.gated = True
            if not self._following:
                self._following = True
                background().at(controller.next_change(now), self._follow)

    def _follow(self) -> None:
        """Let the limit grow with time until it is back at its ceiling."""
        controller = self._adaptive
        assert controller is not None
        with self.lock:
            now = time.monotonic()
            self.stock = controller.advance(now)
            change = controller.next_change(now)
            self._following = change < math.inf
            if self._following:
                background().at(change, self._follow)
        self.serve()

    def statistics(self) -> LimiterStatistics:
        with self.lock:
            return LimiterStatistics(
                name=self.name,
                limit=self.limit,
                effective_limit=min(self.limit, self.stock),
                in_flight=self.in_use,
                waiting=self.waiting,
                wait=self.waits.summary(),
                tenants=self.tenants(),
                holders=self.holders(HOLDERS),
                refused=self.refusals,
                paused_seconds=max(0.0, self.closed_until - time.monotonic()),
                expired=self.expired,
            )


_named: weakref.WeakValueDictionary[str | None, LocalDesk] = weakref.WeakValueDictionary()
"""Weak: a limiter that nobody closed must not occupy its name for the rest of the process."""
_named_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: held permits are the parent's, and no one here would give them back."""
    global _named_lock
    _named_lock = threading.Lock()
    _named.clear()


os.register_at_fork(after_in_child=_forget)


def check_limit(limit: int, name: str) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"limiter {name!r}: limit={limit!r} is not a positive whole number")


def check_hold(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigError(f"max_hold_seconds={seconds!r} is not a positive number of seconds")


def conflict(name: str, asked: int, current: int) -> LimitConflictError:
    return LimitConflictError(
        f"limiter {name!r} exists with limit {current}, but limit {asked} was requested; use the same limit, or change "
        f"it for everyone with resize({asked})"
    )
