"""Hands a process's permits to its waiters. A local limiter is a desk with a fixed stock; a cluster's borrows its own.

Thread-safe: event loops and plain threads may wait at one desk. What happens is decided under a lock, and whoever is to
be woken is woken outside it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from toolyard.errors import ConfigError, LimiterClosedError

from .background import background
from .fair_queue import FairQueue
from .permit import DONE, HELD, NEW, REVOKED, WAITING, DeskPermit
from .protocol import Holder, TenantStatistics
from .rate import TokenBucket
from .waits import WaitHistogram

_TENANTS = 4096
"""Counters of tenants that are gone are kept up to this many, then added up under `OTHERS`."""
OTHERS = "(others)"

_running_loop: Callable[[], asyncio.AbstractEventLoop | None] = asyncio._get_running_loop  # pyright: ignore  # noqa: SLF001


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
        self.lock = threading.Lock()
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
        """Whether anything but the stock can keep an execution from starting."""
        self._holders: dict[DeskPermit, None] = {}
        self.granted: dict[str, int] = {}
        self._alarm = float("inf")
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def permit(self, tenant: str, weight: float, timeout: float | None, label: str) -> DeskPermit:
        if not 0 < weight < 1e9:
            raise ConfigError(f"limiter {self.name!r}: weight={weight!r} of tenant {tenant!r} is not a positive number")
        return DeskPermit(self, tenant, weight, timeout, label)

    # ------------------------------------------------------------------------------------------- permits in and out
    def take(self, permit: DeskPermit) -> bool:
        """Take one at once, if nobody is before us."""
        if permit.state != NEW:
            raise RuntimeError("a permit is entered once; ask the limiter for another")
        now = time.monotonic()
        with self.lock:
            if self.in_use < self.stock and not self.queue and not self._closed and (not self.gated or self._open(now)):
                self.in_use += 1
                self.waits.immediate += 1
                self._hold(permit, now)
                return True
        return False

    def line_up(self, permit: DeskPermit) -> bool:
        """True if it was granted after all."""
        permit.asked = now = time.monotonic()
        with self.lock:
            if self._closed:
                raise LimiterClosedError(f"limiter {self.name!r} is closed")
            permit.state = WAITING
            self.queue.push(permit, permit.tenant, permit.weight)
            woken = self._grant(now)
            short = permit.state == WAITING
            if short:
                self._on_wait()
        granted = permit.state == HELD
        self._wake([other for other in woken if other is not permit])
        return granted

    def give_back(self, permit: DeskPermit) -> None:
        with self.lock:
            if permit.state == HELD:
                del self._holders[permit]
                self.in_use -= 1
                self._on_return()
            permit.state = DONE
            woken = self._grant(time.monotonic()) if self.queue else None
        if woken:
            self._wake(woken)

    def withdraw(self, permit: DeskPermit) -> None:
        """Its waiter is gone, granted or not."""
        with self.lock:
            if permit.state == WAITING and self.queue.remove(permit, permit.tenant):
                permit.state = DONE
                return
        self.give_back(permit)

    def revoke(self, permit: DeskPermit) -> None:
        with self.lock:
            if permit.state != HELD:
                return
            permit.state = REVOKED
            del self._holders[permit]
            self.in_use -= 1
            self.expired += 1
            self._on_return()
            woken = self._grant(time.monotonic())
        self._wake(woken)

    def refuse(self, retry_after: float | None, *, unavailable: bool) -> None:
        """The service sent an execution away. What follows from it is the limiter's business."""
        with self.lock:
            self.refusals += 1

    def serve(self) -> None:
        """Something changed that may let waiters start: the stock, the clock, a pause."""
        with self.lock:
            woken = self._grant(time.monotonic())
        self._wake(woken)

    def close(self) -> None:
        with self.lock:
            self._closed = True
            left = self.queue.drain()
            for permit in left:
                permit.state = DONE
                permit.error = LimiterClosedError(f"limiter {self.name!r} was closed while the permit was waited for")
        here = _running_loop()
        for permit in left:
            permit.wake(here)

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
        if len(granted) > _TENANTS:
            self._fold_tenants()

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
        """For the moment when time alone opens the gate. A lease is not opened by time, but by its renewal."""
        when = max(self.closed_until, now)
        if self.bucket is not None:
            when = max(when, now + self.bucket.delay(now))
        if self.open_until > when > now and not now < self._alarm <= when:
            self._alarm = when
            background().at(when, self.serve)

    def _on_return(self) -> None:
        """A permit came back to the desk."""

    def _on_wait(self) -> None:
        """Somebody waits."""

    def _fold_tenants(self) -> None:
        busy = {permit.tenant for permit in self._holders} | {tenant for tenant, _, _ in self.queue.waiting()}
        gone = [tenant for tenant in self.granted if tenant not in busy and tenant != OTHERS]
        folded = sum(self.granted.pop(tenant) for tenant in gone)
        self.granted[OTHERS] = self.granted.get(OTHERS, 0) + folded

    # -------------------------------------------------------------------------------------------------------------
    def _wake(self, permits: list[DeskPermit]) -> None:
        here = _running_loop()
        for permit in permits:
            if not permit.wake(here):
                self.give_back(permit)

    def tenants(self) -> dict[str, TenantStatistics]:
        """Under the lock."""
        holding: dict[str, list[Any]] = {tenant: [1.0, 0, 0] for tenant in self.granted}
        for permit in self._holders:
            entry = holding.setdefault(permit.tenant, [1.0, 0, 0])
            entry[0] = permit.weight
            entry[1] += 1
        for tenant, weight, waiting in self.queue.waiting():
            entry = holding.setdefault(tenant, [1.0, 0, 0])
            entry[0], entry[2] = weight, waiting
        return {
            tenant: TenantStatistics(*entry, granted=self.granted.get(tenant, 0)) for tenant, entry in holding.items()
        }

    def holders(self, most: int) -> tuple[Holder, ...]:
        """Under the lock. Held longest first, which is the order they were granted in."""
        now = time.monotonic()
        oldest = [permit for permit, _ in zip(self._holders, range(most), strict=False)]
        return tuple(Holder(permit.tenant, permit.label, now - permit.since, process_name()) for permit in oldest)


def process_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
