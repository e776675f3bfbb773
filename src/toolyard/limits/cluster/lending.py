"""The lender: one limit, lent in blocks to the processes that use it. Pure: no clock, no sockets, no Ray.

**Safety.** A process owns `granted - returned` permits, both counted since its registration. Messages in flight to the
lender can only be returns, and messages in flight to a process can only be grants. So the lender never believes that a
process owns less than it does, and it grants only below the limit.

**Death.** Permits of a process come back when it is known to be dead, or when its connection is lost and it has been
silent for a *term*. By then it has stopped starting executions: it may do so only until a little less than a term after
it *sent* the last message that was answered. A process that is merely silent, with its connection up, is stalled: its
executions still run, so it keeps its permits, and the statistics name it. (If `max_hold` is set, that also bounds a
stall.)

**Restart.** A restarted lender does not know what is lent. It grants nothing until every process that may have permits
has registered and reported what it has, or is dead; it reads which processes these are in the `roster` that the
previous lender left. It waits at most a term, and exactly that if there is no roster: by then the missing processes
have stopped starting executions. A process that turns up later with running executions is counted, even beyond the
limit, and nothing is granted until they are done.

**Fairness.** If demand exceeds the limit, `fair_shares` determines what each process should have. Shares are fractions,
permits are not: processes keep the whole parts, and the rest rotates in turns of a *quantum*, always to those furthest
behind their share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolyard.limits.adaptive import AdaptiveLimit
from toolyard.limits.cluster.shares import Claim, fair_shares
from toolyard.limits.desk import OTHERS
from toolyard.limits.protocol import Holder, Lease, LimiterStatistics, TenantStatistics
from toolyard.limits.waits import WaitHistogram

QUANTUM = 0.05
"""Seconds a process keeps a permit that others also have a claim to; longer if its execution takes longer."""
DRIFT = 1.02
"""Clocks of two machines run at the same speed within two percent."""
_MAX_CREDIT = 1.0
_MAX_DEPARTED = 64
_TENANTS = 1000
"""Named in the statistics; the others are summed up."""
_STALLED = 0.75
"""Fraction of a term: a process silent for this long is stalled, since processes report four times a term."""

Message = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Borrower:
    """A process, as seen by the lender."""

    id: str
    process: str
    granted: int
    """Permits granted to this registration so far, including what it had when it registered."""
    heard: float
    returned: int = 0
    in_use: int = 0
    waiting: int = 0
    tenants: dict[str, tuple[int, int, float]] = field(default_factory=dict[str, tuple[int, int, float]])
    """In use, waiting and weight, by tenant."""
    seq: int = 0
    connection: int = 0
    """The number of the connection it registered on."""
    connected: bool = True
    refusals: int = 0
    report: Message = field(default_factory=dict[str, Any])
    """Its last report for the statistics."""
    share: dict[str, float] = field(default_factory=dict[str, float])
    fair: float = 0.0
    """The sum of `share`: what it should have, as a fraction."""
    credit: float = 0.0
    """Permit-seconds by which it is behind its share."""
    target: int = 0
    turn_ends: float = math.inf
    on_turn: bool = False
    last_sent: tuple[Any, ...] = ()
    """What was last sent to it, so that nothing is sent twice."""

    @property
    def held(self) -> int:
        return self.granted - self.returned

    @property
    def demand(self) -> int:
        """What it could use now. A disconnected process gets nothing new."""
        return self.in_use + self.waiting if self.connected else self.held


def _checked_count(value: Any) -> int:
    """Validate a count received from outside."""
    if not isinstance(value, int) or not 0 <= value < 1 << 40:
        raise ValueError(f"{value!r} is not a count")
    return value


def _demand(in_use: Any, waiting: Any, weight: Any) -> tuple[int, int, float]:
    if not isinstance(weight, int | float) or not 1e-6 <= weight <= 1e12:
        raise ValueError(f"{weight!r} is not a weight")
    return _checked_count(in_use), _checked_count(waiting), float(weight)


class _Counts:
    """Totals over the reports of processes."""

    def __init__(self) -> None:
        self.waits = WaitHistogram()
        self.expired = 0
        self.granted: dict[str, int] = {}

    def add(self, report: Message) -> None:
        if report:
            self.waits.merge(dict(report["waits"]), report["immediate"], report["longest"])
            self.expired += report["expired"]
            self._grant(report["granted"])

    def merge(self, other: _Counts) -> None:
        self.waits.merge(other.waits.counts, other.waits.immediate, other.waits.longest)
        self.expired += other.expired
        self._grant(other.granted)

    def _grant(self, granted: Mapping[str, int]) -> None:
        for tenant, count in granted.items():
            known = tenant in self.granted or len(self.granted) < _TENANTS
            name = tenant if known else OTHERS
            self.granted[name] = self.granted.get(name, 0) + count


class Lender:
    def __init__(
        self,
        name: str,
        limit: int,
        *,
        epoch: str,
        now: float,
        term: float,
        recovering: bool = False,
        adaptive: bool = False,
        starts_per_second: float | None = None,
        burst: float | None = None,
        max_hold: float | None = None,
    ) -> None:
        self.name = name
        self.configured = limit
        self.limit = limit
        self.version = 0
        """How often the limit was changed. After a restart, surviving processes report the newest one."""
        self.epoch = epoch
        self.term = term
        self.max_hold = max_hold
        self.rate = starts_per_second
        self.burst = burst
        self.borrowers: dict[str, Borrower] = {}
        self.reclaimed = 0
        self.contended = False
        self._adaptive = AdaptiveLimit(limit) if adaptive else None
        self._recovering_until = now + term * DRIFT if recovering else -math.inf
        self.missing: set[str] | None = None
        """Processes that may have permits of the previous lender and have not registered. None: unknown."""
        self._scheduled = now
        self._refusals = 0
        self._departed: dict[str, Message] = {}
        """Last reports of processes that are, or seem to be, gone: if they come back, their counts continue."""
        self._past = _Counts()

    # -------------------------------------------------------------------------------------------------------- events
    @property
    def adaptive(self) -> bool:
        return self._adaptive is not None

    def recovering(self, now: float) -> bool:
        return now < self._recovering_until

    def expect(self, now: float, members: Iterable[str]) -> None:
        """Only these processes can have permits of the previous lender."""
        self.missing = set(members)
        self.account_for(now, *self.borrowers)

    def account_for(self, now: float, *members: str) -> None:
        """They have registered, or are known to be dead. When no one is missing anymore, granting begins."""
        if self.missing is not None:
            self.missing.difference_update(members)
            if not self.missing:
                self._recovering_until = min(self._recovering_until, now)

    def register(self, now: float, client: str, process: str, message: Message) -> Borrower:
        """A process connects, perhaps again, and reports how many permits it has in use and to spare."""
        old = self.borrowers.get(client)
        departed = self._departed.get(client)
        if message["version"] > self.version:
            self._set_limit(_checked_count(message["limit"]), _checked_count(message["version"]))
        in_use, spare = _checked_count(message["in_use"]), _checked_count(message["spare"])
        if not self.recovering(now):
            # It may be using the permits it had when last known here: its lease has not lapsed.
            had = old.held if old is not None else 0
            spare = min(spare, max(had - in_use, self.capacity - (self.outstanding - had) - in_use, 0))
        borrower = Borrower(
            client, process, in_use + spare, now, in_use=in_use, refusals=_checked_count(message["refusals"])
        )
        if old is not None:  # its counts continue
            borrower.report, borrower.refusals = old.report, old.refusals
        elif departed is not None:
            borrower.report = departed
        self._departed.pop(client, None)
        self.borrowers[client] = borrower
        self.account_for(now, client)
        return borrower

    def sync(self, now: float, borrower: Borrower, message: Message) -> None:
        # Parse everything before applying anything: invalid data from one process must not corrupt the shared state.
        seq, returned, in_use, waiting, refusals = (
            _checked_count(message[key]) for key in ("seq", "returned", "in_use", "waiting", "refusals")
        )
        tenants = {str(tenant): _demand(*entry) for tenant, entry in dict(message["tenants"]).items()}
        if "report" in message:
            _Counts().add(message["report"])
            borrower.report = message["report"]
        borrower.heard = now
        borrower.seq = seq
        borrower.returned = max(borrower.returned, min(returned, borrower.granted))
        borrower.tenants = tenants
        borrower.in_use, borrower.waiting = in_use, waiting
        # More runs than we lent: started while a late registration was in progress. It runs, so it counts.
        borrower.granted += max(0, in_use - borrower.held)
        new = max(0, refusals - borrower.refusals)
        borrower.refusals = refusals
        self._refusals += new
        if self._adaptive is not None:
            elsewhere = sum(other.in_use for other in self.borrowers.values() if other is not borrower)
            for here in message["refused_at"][:new]:
                self._adaptive.refused(
                    now,
                    elsewhere + _checked_count(here),
                    retry_after=message["retry_after"],
                    unavailable=message["unavailable"],
                )

    def lost(self, borrower: Borrower) -> None:
        """Its connection broke. If it does not reconnect, its permits come back after a term."""
        borrower.connected = False

    def dead(self, borrower: Borrower) -> None:
        """Its process is known to be dead, or it said goodbye with nothing left in use."""
        if self.borrowers.get(borrower.id) is borrower:
            del self.borrowers[borrower.id]
            self.reclaimed += borrower.in_use
            if borrower.report:
                self._departed[borrower.id] = borrower.report
            while len(self._departed) > _MAX_DEPARTED:
                self._past.add(self._departed.pop(next(iter(self._departed))))

    def resize(self, limit: int) -> None:
        self._set_limit(limit, self.version + 1)

    def _set_limit(self, limit: int, version: int) -> None:
        self.limit, self.version = limit, version
        if self._adaptive is not None:
            self._adaptive.resize(limit)

    # --------------------------------------------------------------------------------------------------- allocation
    @property
    def capacity(self) -> int:
        return self.limit if self._adaptive is None else min(self.limit, self._adaptive.limit)

    @property
    def outstanding(self) -> int:
        return sum(borrower.held for borrower in self.borrowers.values())

    def schedule(self, now: float) -> float:
        """Remove the dead, compute targets, grant free permits. Return when to call it again at the latest."""
        if self._adaptive is not None:
            self._adaptive.advance(now)
        for borrower in [borrower for borrower in self.borrowers.values() if self._gone(borrower, now)]:
            self.dead(borrower)
        passed, self._scheduled = now - self._scheduled, now
        for borrower in self.borrowers.values():
            behind = borrower.credit + (borrower.fair - borrower.held) * passed
            borrower.credit = max(-_MAX_CREDIT, min(_MAX_CREDIT, behind)) if borrower.demand else 0.0
        if self.recovering(now):
            for borrower in self.borrowers.values():
                borrower.target = borrower.held
            return self._recovering_until
        scarce = sum(borrower.demand for borrower in self.borrowers.values()) > self.capacity
        if scarce:
            self._ration(now)
        else:
            for borrower in self.borrowers.values():
                borrower.target, borrower.fair = borrower.demand, float(borrower.demand)
                borrower.on_turn, borrower.turn_ends, borrower.share = False, math.inf, {}
        grown = self._grant()
        short = any(borrower.target > borrower.held for borrower in self.borrowers.values())
        self.contended = scarce or short or self.outstanding > self.capacity  # the latter if the limit was lowered
        if not self.contended:
            self._lend_spare(grown)
        self._begin_turns(now)
        return self._next_event(now)

    def _gone(self, borrower: Borrower, now: float) -> bool:
        silent = now - borrower.heard
        if not borrower.connected:
            return silent >= self.term * DRIFT
        return self.max_hold is not None and silent >= self.max_hold + self.term * DRIFT

    def _ration(self, now: float) -> None:
        borrowers = list(self.borrowers.values())
        shares = fair_shares(
            self.capacity,
            [
                Claim(borrower.id, tenant, weight, in_use + (waiting if borrower.connected else 0))
                for borrower in borrowers
                for tenant, (in_use, waiting, weight) in borrower.tenants.items()
            ],
        )
        left = self.capacity
        for borrower in borrowers:
            borrower.share = shares.get(borrower.id, {})
            borrower.fair = sum(borrower.share.values())
            borrower.target = min(borrower.demand, int(borrower.fair + 1e-9))
            left -= borrower.target
            if borrower.turn_ends <= now or borrower.demand <= borrower.target:
                borrower.on_turn, borrower.turn_ends = False, math.inf
        wanting = [borrower for borrower in borrowers if borrower.demand > borrower.target]
        wanting.sort(key=lambda borrower: (not borrower.on_turn, -borrower.credit))
        for borrower in wanting[left:]:
            borrower.on_turn, borrower.turn_ends = False, math.inf
        for borrower in wanting[:left]:
            borrower.on_turn = True
            borrower.target += 1

    def _grant(self) -> list[Borrower]:
        """Grant first to those furthest below their share. Return who got any."""
        free = self.capacity - self.outstanding
        grown: list[Borrower] = []
        wanting = [
            borrower for borrower in self.borrowers.values() if borrower.connected and borrower.target > borrower.held
        ]
        for borrower in sorted(wanting, key=lambda borrower: (borrower.held - borrower.fair, -borrower.credit)):
            given = min(borrower.target - borrower.held, free)
            if given <= 0:
                break
            borrower.granted += given
            free -= given
            grown.append(borrower)
        return grown

    def _lend_spare(self, grown: list[Borrower]) -> None:
        """Lend extra permits to processes whose demand grew, so that their next execution need not ask."""
        free = self.capacity - self.outstanding
        for borrower in grown:
            given = min(borrower.demand, free // (2 * len(grown)))
            borrower.granted += given
            borrower.target += given

    def _begin_turns(self, now: float) -> None:
        """A turn begins when its permit arrives, perhaps long after it was due: executions are not interrupted."""
        for borrower in self.borrowers.values():
            if borrower.on_turn and borrower.turn_ends == math.inf and borrower.held >= borrower.target:
                borrower.turn_ends = now + QUANTUM

    def _next_event(self, now: float) -> float:
        events = [borrower.turn_ends for borrower in self.borrowers.values()]
        events += [borrower.heard + self.term * DRIFT for borrower in self.borrowers.values() if not borrower.connected]
        if self.max_hold is not None:
            events += [borrower.heard + self.max_hold + self.term * DRIFT for borrower in self.borrowers.values()]
        if self._adaptive is not None:
            events.append(self._adaptive.next_change(now))
        return min(events, default=math.inf)

    # ------------------------------------------------------------------------------------------------------ answers
    def answers(self, now: float) -> list[tuple[Borrower, dict[str, Any]]]:
        """The messages due to each process: a grant, a recall, a new limit, or an acknowledgment."""
        pause = max(0.0, self._adaptive.paused_until - now) if self._adaptive is not None else 0.0
        everything = sum(borrower.fair + 1 for borrower in self.borrowers.values())
        found: list[tuple[Borrower, dict[str, Any]]] = []
        for borrower in self.borrowers.values():
            rate = burst = None
            if self.rate is not None:
                part = (borrower.fair + 1) / everything
                rate, burst = self.rate * part, max(1.0, (self.burst or max(1.0, self.rate)) * part)
            target = borrower.target if self.contended else -1
            message = (borrower.seq, borrower.granted, target, self.version, round(pause, 1), rate)
            if borrower.connected and message != borrower.last_sent:
                borrower.last_sent = message
                shares = borrower.share if self.contended and len(borrower.share) > 1 else {}
                found.append((borrower, {
                    "epoch": self.epoch, "ack": borrower.seq, "granted": borrower.granted, "target": target,
                    "limit": self.limit, "version": self.version, "pause": pause, "rate": rate, "burst": burst,
                    "shares": shares,
                }))  # fmt: skip
        return found

    def statistics(self, now: float) -> LimiterStatistics:
        counts = _Counts()
        counts.merge(self._past)
        for report in self._departed.values():
            counts.add(report)
        tenants: dict[str, list[float]] = {}
        holders: list[Holder] = []
        for borrower in self.borrowers.values():
            counts.add(borrower.report)
            for tenant, (in_use, waiting, weight) in borrower.tenants.items():
                entry = tenants.setdefault(tenant, [weight, 0, 0])
                entry[0] = weight
                entry[1] += in_use
                entry[2] += waiting
            silent = now - borrower.heard
            holders += [
                Holder(tenant, label, seconds + silent, borrower.process)
                for tenant, label, seconds in borrower.report.get("holders", ())
            ]
        holders.sort(key=lambda holder: -holder.seconds)
        return LimiterStatistics(
            name=self.name,
            limit=self.limit,
            effective_limit=self.capacity,
            in_flight=sum(borrower.in_use for borrower in self.borrowers.values()),
            waiting=sum(borrower.waiting for borrower in self.borrowers.values()),
            wait=counts.waits.summary(),
            tenants={
                tenant: TenantStatistics(weight, int(in_use), int(waiting), counts.granted.get(tenant, 0))
                for tenant, (weight, in_use, waiting) in {
                    **dict.fromkeys(counts.granted, (1.0, 0, 0)),
                    **tenants,
                }.items()
            },
            holders=tuple(holders),
            refused=self._refusals,
            paused_seconds=max(0.0, self._adaptive.paused_until - now) if self._adaptive else 0.0,
            expired=counts.expired,
            reclaimed=self.reclaimed,
            epoch=self.epoch,
            leases=tuple(
                Lease(b.process, b.held, b.in_use, b.waiting, now - b.heard, self._state(b, now))
                for b in self.borrowers.values()
            ),
        )

    def _state(self, borrower: Borrower, now: float) -> str:
        if not borrower.connected:
            return "lost"
        return "stalled" if now - borrower.heard > self.term * _STALLED else "connected"
