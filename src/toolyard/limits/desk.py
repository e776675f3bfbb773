"""Gives a process's permits to its waiters. A local limiter is a desk with a fixed stock; a cluster limiter's desk
borrows its stock.

Thread-safe: event loops and plain threads may wait at the same desk. Decisions are made under a lock; waiters are woken
outside it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from toolyard.errors import (
    ConfigError,
    LimiterClosedError,
    LimiterError,
    LimiterTimeoutError,
    PermitExpiredError,
    SandboxBusyError,
)
from toolyard.limits.background import background
from toolyard.limits.fair_queue import FairQueue
from toolyard.limits.protocol import Holder, TenantStatistics
from toolyard.limits.rate import TokenBucket
from toolyard.limits.waits import WaitHistogram

_TENANTS = 4096
"""Keep counters of up to this many tenants that are gone; beyond it they are added up under `OTHERS`."""
OTHERS = "(others)"

_WATCH = 0.01
"""Seconds between a permit's expiry and the check for it."""

_running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop  # pyright: ignore  # noqa: SLF001


class _DeskLock:
    """On release, also takes back permits that could not be given back while it was held."""

    __slots__ = ("_desk", "_lock")

    def __init__(self, desk: Desk, lock: threading.Lock) -> None:
        self._desk = desk
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._desk.settle()


class Desk:
    def __init__(
        self, name: str, limit: int, stock: int, *, max_hold: float | None = None, bucket: TokenBucket | None = None
    ) -> None:
        self.name = name
        self.limit = limit
        self.stock = stock
        """Permits this process may have in use."""
        self.in_use = self.peak = 0
        self.max_hold = max_hold
        self._bare_lock = threading.Lock()
        self._leaving: deque[DeskPermit] = deque()
        """Permits waiting to be taken back."""
        self.queue: FairQueue[DeskPermit] = FairQueue()
        self.waits = WaitHistogram()
        self.expired = 0
        self.refusals: int = 0
        self.open_until = float("inf")
        """No execution starts from then on, unless this moves: the end of a lease."""
        self.closed_until = 0.0
        """No execution starts until then: the service asked for a pause."""
        self.bucket: TokenBucket | None = bucket
        self.gated = bucket is not None
        """Whether anything besides the stock can keep an execution from starting."""
        self._holders: dict[DeskPermit, None] = {}
        self.granted: dict[str, int] = {}
        self._alarm = float("inf")
        self._closed = ""
        self._fold_at = _TENANTS
        self._watching = self._settling = False

    @property
    def lock(self) -> _DeskLock:
        """Made when used: kept, it would be a cycle, and desks that nobody closed would live until a collection."""
        return _DeskLock(self, self._bare_lock)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def permit(self, tenant: str, weight: float, timeout: float | None, label: str) -> DeskPermit:
        if not 1e-6 <= weight <= 1e6:
            raise ConfigError(
                f"limiter {self.name!r}: weight={weight!r} of tenant {tenant!r} is not a number from 1e-6 to 1e6"
            )
        return DeskPermit(self, tenant, weight, timeout, label)

    # ------------------------------------------------------------------------------------------- permits in and out
    def take(self, permit: DeskPermit) -> bool:
        """Take a permit immediately, if no one is waiting."""
        if permit.state != NEW:
            raise RuntimeError("a permit can be entered only once; ask the limiter for another")
        now = time.monotonic()
        taken = False
        with self._bare_lock:
            if self.in_use < self.stock and not self.queue and not self._closed and (not self.gated or self._open(now)):
                self.in_use += 1
                self.waits.immediate += 1
                self._hold(permit, now)
                taken = True
        if self._leaving:
            self.settle()
        return taken

    def enqueue(self, permit: DeskPermit) -> bool:
        """Queue the permit. Return True if it was granted right away."""
        permit.asked = now = time.monotonic()
        woken: list[DeskPermit] = []
        with self.lock:
            if self._closed:
                raise LimiterClosedError(self._closed)
            permit.state = WAITING
            self.queue.push(permit, permit.tenant, permit.weight)
            if self.in_use < self.stock:
                woken = self._grant(now)
            granted = permit.state == HELD
            if not granted:
                self._on_wait()
        self._wake([other for other in woken if other is not permit])
        return granted

    def give_back(self, permit: DeskPermit) -> None:
        """Also for a permit that was never granted because its waiter is gone."""
        woken: list[DeskPermit] | None = None
        lock = self._bare_lock
        if not lock.acquire(False):
            self._leaving.append(permit)
        else:
            try:
                self._return(permit)
                if self.queue:
                    woken = self._grant(time.monotonic())
            finally:
                lock.release()
            if woken:
                self._wake(woken)
        if self._leaving:
            self.settle()

    def settle(self) -> None:
        """Take back leaving permits, unless the lock's holder is about to.

        The holder may be this very thread: garbage collection under the lock can end an abandoned task, whose permit
        then arrives here. So giving back never waits for the lock, and whoever releases it checks once more.
        """
        while self._leaving and self._bare_lock.acquire(blocking=False):
            try:
                woken = self._take_back()
            finally:
                self._bare_lock.release()
            if woken:
                self._wake(woken)

    def _take_back(self) -> list[DeskPermit]:
        while self._leaving:
            self._return(self._leaving.popleft())
        return self._grant(time.monotonic()) if self.queue else []

    def _return(self, permit: DeskPermit) -> None:
        if permit.state == HELD:
            del self._holders[permit]
            self.in_use -= 1
            self._on_return()
        elif permit.state == WAITING:
            self.queue.remove(permit, permit.tenant)
        permit.state = DONE

    def refuse(self, retry_after: float | None, *, unavailable: bool) -> None:
        """The service refused an execution. Subclasses decide what follows."""
        with self.lock:
            self.refusals += 1

    def serve(self) -> None:
        """Call after a change that may let waiters start: the stock, the clock, a pause."""
        with self.lock:
            woken = self._grant(time.monotonic())
        self._wake(woken)

    def close(self, reason: str = "") -> None:
        with self.lock:
            self._closed = reason or f"limiter {self.name!r} was closed"
            left = self.queue.drain()
            for permit in left:
                permit.state = DONE
                permit.error = LimiterClosedError(self._closed)
        here = _running_loop()
        for permit in left:
            permit.wake(here)

    def _revoke_overdue(self) -> None:
        """Permits are ordered by when they were granted, so the oldest come first."""
        assert self.max_hold is not None
        now = time.monotonic()
        with self.lock:
            due = [permit for permit in self._holders if permit.since + self.max_hold + permit.grace <= now]
            for permit in due:
                permit.state = REVOKED
                del self._holders[permit]
                self.in_use -= 1
                self.expired += 1
                self._on_return()
            woken = self._grant(now)
            self._watching = bool(self._holders)
            if self._watching:
                background().at(next(iter(self._holders)).since + self.max_hold + _WATCH, self._revoke_overdue)
        self._wake(woken)

    def count_expired(self) -> None:
        with self.lock:
            self.expired += 1

    # ---------------------------------------------------------------------------------------------- under the lock
    def _open(self, now: float) -> bool:
        return self.closed_until <= now < self.open_until and (self.bucket is None or self.bucket.take(now))

    def _hold(self, permit: DeskPermit, now: float) -> None:
        permit.state = HELD
        permit.since = now
        self._holders[permit] = None
        if self.in_use > self.peak:
            self.peak = self.in_use
        granted = self.granted
        tenant = permit.tenant
        granted[tenant] = granted.get(tenant, 0) + 1
        if len(granted) > self._fold_at:
            self._fold_tenants()
        if self.max_hold is not None and not self._watching:
            self._watching = True
            background().at(now + self.max_hold + _WATCH, self._revoke_overdue)

    def _grant(self, now: float) -> list[DeskPermit]:
        woken: list[DeskPermit] = []
        while self.queue and self.in_use < self.stock:
            if self.gated and not self._open(now):
                self._set_alarm(now)
                break
            permit = self.queue.pop()
            self.in_use += 1
            self.waits.add(now - permit.asked)
            self._hold(permit, now)
            woken.append(permit)
        return woken

    def _set_alarm(self, now: float) -> None:
        """Wake up when time alone opens the gate. A lease is reopened by its renewal, not by time."""
        when = max(self.closed_until, now)
        if self.bucket is not None:
            when = max(when, now + self.bucket.delay(now))
        if self.open_until > when > now and not now < self._alarm <= when:
            self._alarm = when
            background().at(when, self.serve)

    def _on_return(self) -> None:
        """Called when a permit came back to the desk."""

    def _on_wait(self) -> None:
        """Called when a waiter was queued."""

    def _fold_tenants(self) -> None:
        busy = {permit.tenant for permit in self._holders} | {tenant for tenant, _, _ in self.queue.waiting()}
        gone = [tenant for tenant in self.granted if tenant not in busy and tenant != OTHERS]
        folded = sum(self.granted.pop(tenant) for tenant in gone)
        self.granted[OTHERS] = self.granted.get(OTHERS, 0) + folded
        self._fold_at = max(_TENANTS, 2 * len(self.granted))

    # -------------------------------------------------------------------------------------------------------------
    def _wake(self, permits: list[DeskPermit]) -> None:
        here = _running_loop()
        for permit in permits:
            if not permit.wake(here):
                self._leaving.append(permit)
        if self._leaving and not self._settling:
            self._settling = True
            try:
                self.settle()
            finally:
                self._settling = False

    def demands(self) -> dict[str, tuple[float, int, int]]:
        """Weight, in flight and waiting for each active tenant. Call under the lock."""
        found: dict[str, tuple[float, int, int]] = {}
        for permit in self._holders:
            in_flight = found[permit.tenant][1] if permit.tenant in found else 0
            found[permit.tenant] = (permit.weight, in_flight + 1, 0)
        for tenant, weight, waiting in self.queue.waiting():
            in_flight = found[tenant][1] if tenant in found else 0
            found[tenant] = (weight, in_flight, waiting)
        return found

    def tenants(self) -> dict[str, TenantStatistics]:
        """Call under the lock."""
        demands = self.demands()
        return {
            tenant: TenantStatistics(*demands.get(tenant, (1.0, 0, 0)), granted=self.granted.get(tenant, 0))
            for tenant in {**self.granted, **demands}
        }

    def holders(self, most: int) -> tuple[Holder, ...]:
        """Longest held first, which is the order of granting. Call under the lock."""
        now = time.monotonic()
        oldest = [permit for permit, _ in zip(self._holders, range(most), strict=False)]
        return tuple(Holder(permit.tenant, permit.label, now - permit.since, process_name()) for permit in oldest)


def process_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


# A permit of a desk: waits in a loop or a thread, holds, and gives back whatever happens.


NEW, WAITING, HELD, REVOKED, DONE = range(5)
HARD_STOP = 1.0
"""Seconds an execution has to react to its cancellation before its permit is taken back anyway."""


class DeskPermit:
    """See `protocol.Permit`."""

    __slots__ = (
        "_desk", "_event", "_future", "_loop", "_timeout", "asked", "error", "grace", "label", "since", "state",
        "tenant", "timeout", "weight",
    )  # fmt: skip

    def __init__(self, desk: Desk, tenant: str, weight: float, timeout: float | None, label: str) -> None:
        self._desk = desk
        self.tenant = tenant
        self.weight = weight
        self.timeout = timeout
        self.label = label
        self.state = NEW
        self.asked = self.since = 0.0
        self.error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._future: asyncio.Future[None] | None = None
        self._event: threading.Event | None = None
        self._timeout: asyncio.Timeout | None = None
        self.grace = 0.0
        """Seconds beyond `max_hold` until the permit is taken back by force."""

    async def __aenter__(self) -> Self:
        desk = self._desk
        if not desk.take(self):
            await self._wait()
        if desk.max_hold is not None:
            self.grace = HARD_STOP
            self._timeout = asyncio.timeout(desk.max_hold)
            await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._note(error)
        revoked = self.state == REVOKED
        self._desk.give_back(self)
        if self._timeout is None:
            return
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            error = late
        late = self._timeout.expired()
        if late and not revoked:
            self._desk.count_expired()
        if (late or revoked) and (error is None or isinstance(error, TimeoutError)):
            raise _expired(self) from error

    def __enter__(self) -> Self:
        if not self._desk.take(self):
            self._block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._note(error)
        revoked = self.state == REVOKED
        self._desk.give_back(self)
        if revoked and error is None:
            raise _expired(self)

    def refused(self, retry_after: float | None = None, *, unavailable: bool = False) -> None:
        self._desk.refuse(retry_after, unavailable=unavailable)

    def _note(self, error: BaseException) -> None:
        if isinstance(error, SandboxBusyError):
            self._desk.refuse(error.retry_after, unavailable=False)

    async def _wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()
        if self._desk.enqueue(self):
            return
        try:
            if self.timeout is None:
                await self._future
            else:
                async with asyncio.timeout(self.timeout):
                    await self._future
        except BaseException as error:
            # It may have been granted just as we gave up: pass it on, or it is lost forever.
            self._desk.give_back(self)
            if isinstance(error, TimeoutError) and not isinstance(error, LimiterError):
                raise _late(self) from None
            raise

    def _block(self) -> None:
        self._event = threading.Event()
        if self._desk.enqueue(self):
            return
        try:
            in_time = self._event.wait(self.timeout)
        except BaseException:
            self._desk.give_back(self)
            raise
        if not in_time:
            self._desk.give_back(self)
            raise _late(self)
        if self.error is not None:
            raise self.error

    def wake(self, here: asyncio.AbstractEventLoop | None) -> bool:
        """Call outside the lock. Return False if the waiter is gone."""
        if self._event is not None:
            self._event.set()
            return True
        assert self._loop is not None
        if self._loop is here:
            self.resolve()
            return True
        try:
            self._loop.call_soon_threadsafe(self.resolve)
        except RuntimeError:  # the loop was closed while we were waiting
            return False
        return True

    def resolve(self) -> None:
        future = self._future
        if future is not None and not future.done():  # if cancelled, `_wait` gives the permit back
            if self.error is None:
                future.set_result(None)
            else:
                future.set_exception(self.error)


def _late(permit: DeskPermit) -> LimiterTimeoutError:
    desk = permit._desk  # pyright: ignore  # noqa: SLF001
    return LimiterTimeoutError(
        f"limiter {desk.name!r}: no permit for tenant {permit.tenant!r} within {permit.timeout:g} s "
        f"({desk.in_use} of {desk.limit} in flight, {desk.waiting} waiting)"
    )


def _expired(permit: DeskPermit) -> PermitExpiredError:
    desk = permit._desk  # pyright: ignore  # noqa: SLF001
    return PermitExpiredError(
        f"limiter {desk.name!r}: {permit.label or 'an execution'} of tenant {permit.tenant!r} held its permit longer "
        f"than max_hold_seconds={desk.max_hold:g}"
    )
