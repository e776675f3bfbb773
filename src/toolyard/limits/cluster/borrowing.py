"""The borrower: a desk whose stock is lent by a cluster limiter. It creates and handles messages; `client` sends them.

See `lending` for why this is safe. The rule here: an execution starts only with a permit from the stock and before
`open_until`, which is a little less than a term after the last answered message was *sent*.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

from toolyard.limits.adaptive import pause_seconds
from toolyard.limits.cluster.lending import Message
from toolyard.limits.desk import Desk
from toolyard.limits.rate import TokenBucket

SAFETY = 0.95
"""Fraction of a term after an answered message during which executions may start."""
LINGER = 1.0
"""Seconds to keep unused permits while no one else wants them."""
LINGER_CONTENDED = 0.002
_TENANTS = 64
"""Reported by name; the remaining tenants of a process are reported as one, with their total weight."""
_HOLDERS = 5
_REFUSALS = 256


class BorrowingDesk(Desk):
    def __init__(self, name: str, limit: int, *, max_hold: float | None, poke: Callable[[], None]) -> None:
        super().__init__(name, limit, 0, max_hold=max_hold)
        self.gated = True
        self.open_until = -math.inf
        self.version = 0
        self.epoch = ""
        self.contended = False
        self._poke = poke
        """Asks the client to send a message soon. Cheap, and callable from any thread."""
        self._target = math.inf
        self._seen = 0
        self.returned = 0
        """Permits given back since the last hello."""
        self._claimed = 0
        self._registered = False
        self._seq = 0
        self._sent: dict[int, float] = {}
        self._reported = 0
        self._term = 0.0
        self._adaptive = False
        self._retry_after: float | None = None
        self._unavailable = False
        self._refused_at: list[int] = []
        """How many were in use here at each refusal since the last report."""

    # --------------------------------------------------------------------------------------------------- to the lender
    def hello(self, now: float) -> dict[str, Any]:
        """Start a new registration: everything is counted from here."""
        with self.lock:
            lapsed = now >= self.open_until
            self._registered = False
            self._claimed = self._seen = self.stock = self.in_use if lapsed else max(self.stock, self.in_use)
            self.returned = 0
            self._sent = {0: now}
            self._seq = 0
            self.contended, self._target = False, math.inf
            return {
                "in_use": self.in_use,
                "spare": self.stock - self.in_use,
                "limit": self.limit,
                "version": self.version,
                "refusals": self.refusals,
            }

    def report(self, now: float, *, full: bool) -> dict[str, Any]:
        with self.lock:
            self._seq += 1
            self._sent[self._seq] = now
            self._reported = self.in_use + self.waiting
            message: dict[str, Any] = {
                "seq": self._seq,
                "returned": self.returned,
                "in_use": self.in_use,
                "waiting": self.waiting,
                "tenants": self._demands(),
                "refusals": self.refusals,
                "refused_at": self._refused_at[-_REFUSALS:],
                "retry_after": self._retry_after,
                "unavailable": self._unavailable,
            }
            self._retry_after, self._unavailable, self._refused_at = None, False, []
            if full:
                message["report"] = {
                    "waits": list(self.waits.counts.items()),
                    "immediate": self.waits.immediate,
                    "longest": self.waits.longest,
                    "expired": self.expired,
                    "granted": dict(self.granted),
                    "holders": [(h.tenant, h.label, h.seconds) for h in self.holders(_HOLDERS)],
                }
            return message

    def _demands(self) -> dict[str, tuple[int, int, float]]:
        demands = {tenant: (in_use, waiting, weight) for tenant, (weight, in_use, waiting) in self.demands().items()}
        if len(demands) <= _TENANTS:
            return demands
        ordered = sorted(demands.items(), key=lambda item: item[1][2], reverse=True)
        named = dict(ordered[: _TENANTS - 1])
        rest = [entry for _, entry in ordered[_TENANTS - 1 :]]
        named[f"({len(rest)} tenants of process {os.getpid()})"] = (
            sum(entry[0] for entry in rest),
            sum(entry[1] for entry in rest),
            sum(entry[2] for entry in rest),
        )
        return named

    # ------------------------------------------------------------------------------------------------- from the lender
    def welcomed(self, message: Message) -> None:
        with self.lock:
            # Less than claimed only if we were so late that we had stopped starting: then no spare permit was used.
            self._registered = True
            self.stock -= self._claimed - message["granted"]
            self._seen = message["granted"]
            self.epoch = message["epoch"]
            self._term = message["term"]
            self._adaptive = message["adaptive"]
            self._adopt(message)
            self._renew(0)
        self.serve()

    def answered(self, message: Message) -> None:
        now = time.monotonic()
        with self.lock:
            self._adopt(message)
            self._renew(message["ack"])
            self.stock += message["granted"] - self._seen
            self._seen = message["granted"]
            self.closed_until = max(self.closed_until, now + message["pause"])
            if message["rate"] is not None:
                self._pace(now, message["rate"], message["burst"])
            self.contended = message["target"] >= 0
            self._target = message["target"] if self.contended else math.inf
            self.queue.paces = {tenant: max(share, 1e-3) for tenant, share in message["shares"].items()}
            woken = self._grant(now)
            wanting = self.in_use + self.waiting > max(self._reported, self.stock)
            over = min(self.stock - self._target, self.stock - self.in_use) if self.contended else 0
            if over > 0:
                self._hand_back(int(over))
            idle = self._idle()
        self._wake(woken)
        if wanting or over > 0 or idle:
            self._poke()

    def adopt(self, message: Message) -> None:
        """Adopt a new limit, if its version is newer."""
        with self.lock:
            self._adopt(message)

    def _adopt(self, message: Message) -> None:
        if message["version"] >= self.version:
            self.limit, self.version = message["limit"], message["version"]

    def _renew(self, ack: int) -> None:
        sent = self._sent.get(ack)
        if sent is not None:
            self.open_until = sent + self._term * SAFETY
            self._sent = {seq: when for seq, when in self._sent.items() if seq > ack}

    def _pace(self, now: float, rate: float, burst: float) -> None:
        if self.bucket is None:
            self.bucket = TokenBucket(rate, burst, now)
        else:
            self.bucket.configure(now, rate, burst)

    # --------------------------------------------------------------------------------------------------- giving back
    def _hand_back(self, count: int) -> None:
        """Not while a registration is in progress, which has claimed them."""
        if self._registered:
            self.stock -= count
            self.returned += count

    @property
    def linger(self) -> float:
        """How long permits may stay unused."""
        return LINGER_CONTENDED if self._idle() else LINGER

    def _idle(self) -> bool:
        """Whether others want permits that are unused here. Not if our own waiters only wait for a pause to end."""
        return self.contended and self.stock > self.in_use and not self.queue

    def give_back_idle(self) -> None:
        """Give back permits that were unused ever since the last call."""
        with self.lock:
            self._hand_back(max(0, self.stock - max(self.peak, self.in_use)))
            self.peak = self.in_use

    def give_up(self) -> int:
        """Give back all unused permits. Return how many are in use."""
        with self.lock:
            self._hand_back(max(0, self.stock - self.in_use))
            return self.in_use

    # --------------------------------------------------------------------------------------------------- under the lock
    def _on_return(self) -> None:
        if self.stock > self._target:
            self._hand_back(1)
            self._poke()
        elif self.contended and self.in_use < self.stock and not self.queue:
            self._poke()  # after `linger`, it is given back if still unused

    def _on_wait(self) -> None:
        if self.in_use + self.waiting > self._reported:
            self._poke()

    def refuse(self, retry_after: float | None, *, unavailable: bool) -> None:
        with self.lock:
            self.refusals += 1
            self._refused_at.append(self.in_use)
            if retry_after is not None:
                self._retry_after = max(self._retry_after or 0.0, retry_after)
            if self._adaptive:  # others learn it from the lender; here the pause starts at once
                self.closed_until = max(self.closed_until, time.monotonic() + pause_seconds(retry_after))
            self._unavailable = self._unavailable or unavailable
        self._poke()
