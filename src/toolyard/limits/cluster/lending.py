"""The lender: one limit, lent out in blocks to the processes that use it. Pure: no clock, no sockets, no Ray.

**Safety.** A process owns `granted - returned` permits, both counted since its registration. What the lender has not
yet heard of can only be a return, and what a process has not yet heard of can only be a grant, so the lender never
believes that a process owns less than it does, and it grants only below the limit.

**Death.** Permits of a process come back when it is known to be dead, or when its connection is lost and it has not
been heard of for a *term*. By then it has stopped starting executions: it may do so only until a little less than a
term after it *sent* the last message that was answered. A process that is merely silent, with its connection up, is
stalled: what it runs still runs, so it keeps its permits, and is named in the statistics. (Where `max_hold` is set,
that also bounds a stall.)

**Restart.** A restarted lender does not know what is lent. It grants nothing until every process that may have permits
has registered and said what it has, or is dead; which processes these are, it reads in the `roster` that the lender
before it left. It waits a term at most, and just that if there is no roster: by then the missing have stopped starting
executions. What still turns up with executions running is counted, even past the limit: they run. Nothing is granted
until they are done.

**Fairness.** When more is wanted than there is, `fair_shares` says what each process should have. Shares are fractions,
permits are not: the whole parts are held on to, and the rest goes round in turns of a *quantum*, always to those who
are furthest behind their share.
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
"""Seconds a process keeps a permit that others also have a claim to, or until the execution under it ends."""
DRIFT = 1.02
"""Clocks of two machines run at the same speed to within two percent."""
_MOST_CREDIT = 1.0
_GRAVES = 64
_TENANTS = 1000
"""Named in the statistics; the others are added up."""
_STALLED = 0.75
"""Of a term: silent for so long, though processes report four times a term."""

Message = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Borrower:
    """A process, as the lender sees it."""

    id: str
    process: str
    granted: int
    """Permits ever given to this registration, including what it had when it registered."""
    heard: float
    returned: int = 0
    in_use: int = 0
    waiting: int = 0
    tenants: dict[str, tuple[int, int, float]] = field(default_factory=dict[str, tuple[int, int, float]])
    """In use, waiting and weight, by tenant."""
    seq: int = 0
    connection: int = 0
    """Of its connections, the number of the one it registered by."""
    connected: bool = True
    refusals: int = 0
    report: Message = field(default_factory=dict[str, Any])
    """What it last told about itself for the statistics."""
    share: dict[str, float] = field(default_factory=dict[str, float])
    fair: float = 0.0
    """The sum of `share`: what it should have, as a fraction."""
    credit: float = 0.0
    """Permit-seconds that it is behind its share."""
    target: int = 0
    turn_ends: float = math.inf
    on_turn: bool = False
    told: tuple[Any, ...] = ()
    """What it was last told, so that nothing is said twice."""

    @property
    def held(self) -> int:
        return self.granted - self.returned

    @property
    def demand(self) -> int:
        """What it could use now: one that cannot be reached gets nothing."""
        return self.in_use + self.waiting if self.connected else self.held


def _whole(value: Any) -> int:
    """A count, from outside."""
    if not isinstance(value, int) or not 0 <= value < 1 << 40:
        raise ValueError(f"{value!r} is not a count")
    return value


def _demand(in_use: Any, waiting: Any, weight: Any) -> tuple[int, int, float]:
    if not isinstance(weight, int | float) or not 1e-6 <= weight <= 1e12:
        raise ValueError(f"{weight!r} is not a weight")
    return _whole(in_use), _whole(waiting), float(weight)


class _Counts:
    """Reports of processes, added up."""

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
        """How often the limit was changed. Survivors of a restart bring the newest one with them."""
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
        """Processes that may have permits of the lender before this one and have not registered. None: not known."""
        self._scheduled = now
        self._refusals = 0
        self._graves: dict[str, Message] = {}
        """Last reports of processes that are gone, or thought to be: they may come back, and go on counting."""
        self._past = _Counts()

    # -------------------------------------------------------------------------------------------------------- events
    @property
    def adaptive(self) -> bool:
        return self._adaptive is not None

    def recovering(self, now: float) -> bool:
        return now < self._recovering_until

    def expect(self, now: float, members: Iterable[str]) -> None:
        """Nobody but these can have permits of the lender before this one."""
        self.missing = set(members)
        self.account_for(now, *self.borrowers)

    def account_for(self, now: float, *members: str) -> None:
        """They have registered, or are known to be dead. When nobody is missing any more, granting begins."""
        if self.missing is not None:
            self.missing.difference_update(members)
            if not self.missing:
                self._recovering_until = min(self._recovering_until, now)

    def register(self, now: float, client: str, process: str, message: Message) -> Borrower:
        """A process connects, perhaps again: it says what it has in use and what it has to spare."""
        old = self.borrowers.get(client)
        grave = self._graves.get(client)
        if message["version"] > self.version:
            self._set_limit(_whole(message["limit"]), _whole(message["version"]))
        in_use, spare = _whole(message["in_use"]), _whole(message["spare"])
        if not self.recovering(now):
            # What it had when it was last known here it may be starting now: its lease has not lapsed.
            had = old.held if old is not None else 0
            spare = min(spare, max(had - in_use, self.capacity - (self.outstanding - had) - in_use, 0))
        borrower = Borrower(client, process, in_use + spare, now, in_use=in_use, refusals=_whole(message["refusals"]))
        if old is not None:  # its counts go on where they were
            borrower.report, borrower.refusals = old.report, old.refusals
        elif grave is not None:
            borrower.report = grave
        self._graves.pop(client, None)
        self.borrowers[client] = borrower
        self.account_for(now, client)
        return borrower

    def sync(self, now: float, borrower: Borrower, message: Message) -> None:
        # All of it is read before any of it counts: nonsense from one process must not reach the books of all.
        seq, returned, in_use, waiting, refusals = (
            _whole(message[key]) for key in ("seq", "returned", "in_use", "waiting", "refusals")
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
        # More runs than we lent: started while a late registration was under way. It runs, so it counts.
        borrower.granted += max(0, in_use - borrower.held)
        new = max(0, refusals - borrower.refusals)
        borrower.refusals = refusals
        self._refusals += new
        if self._adaptive is not None:
            elsewhere = sum(other.in_use for other in self.borrowers.values() if other is not borrower)
            for here in message["refused_at"][:new]:
                self._adaptive.refused(
                    now,
                    elsewhere + _whole(here),
                    retry_after=message["retry_after"],
                    unavailable=message["unavailable"],
                )

    def lost(self, borrower: Borrower) -> None:
        """Its connection is gone. If it does not come back, its permits do, after a term."""
        borrower.connected = False

    def dead(self, borrower: Borrower) -> None:
        """Its process is known not to exist any more, or it said goodbye with nothing left in use."""
        if self.borrowers.get(borrower.id) is borrower:
            del self.borrowers[borrower.id]
            self.reclaimed += borrower.in_use
            if borrower.report:
                self._graves[borrower.id] = borrower.report
            while len(self._graves) > _GRAVES:
                self._past.add(self._graves.pop(next(iter(self._graves))))

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
        """Let time pass: bury the dead, work out targets, grant what is free. Returns when to do it again at latest."""
        if self._adaptive is not None:
            self._adaptive.advance(now)
        for borrower in [borrower for borrower in self.borrowers.values() if self._gone(borrower, now)]:
            self.dead(borrower)
        passed, self._scheduled = now - self._scheduled, now
        for borrower in self.borrowers.values():
            behind = borrower.credit + (borrower.fair - borrower.held) * passed
            borrower.credit = max(-_MOST_CREDIT, min(_MOST_CREDIT, behind)) if borrower.demand else 0.0
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
        self.contended = scarce or short or self.outstanding > self.capacity  # the last: the limit was lowered
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
        """To those who have least of what they should have, first. Returns who got any."""
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
        """Some more than asked for, to processes that want more than they did: their next execution asks nobody."""
        free = self.capacity - self.outstanding
        for borrower in grown:
            given = min(borrower.demand, free // (2 * len(grown)))
            borrower.granted += given
            borrower.target += given

    def _begin_turns(self, now: float) -> None:
        """A turn begins when its permit is there, perhaps long after it was due: executions are not interrupted."""
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
        """What each process must hear now: a grant, a recall, a new limit, or that its message arrived."""
        pause = max(0.0, self._adaptive.paused_until - now) if self._adaptive is not None else 0.0
        everything = sum(borrower.fair + 1 for borrower in self.borrowers.values())
        found: list[tuple[Borrower, dict[str, Any]]] = []
        for borrower in self.borrowers.values():
            rate = burst = None
            if self.rate is not None:
                part = (borrower.fair + 1) / everything
                rate, burst = self.rate * part, max(1.0, (self.burst or max(1.0, self.rate)) * part)
            target = borrower.target if self.contended else -1
            told = (borrower.seq, borrower.granted, target, self.version, round(pause, 1), rate)
            if borrower.connected and told != borrower.told:
                borrower.told = told
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
        for report in self._graves.values():
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
