"""A cluster under one limit in virtual time: real lenders and real desks, simulated clocks, wires and executions.

What is simulated behaves as `LenderServer` and `Client` do: wires deliver in order until they break; a broken one loses
what is under way, and each side notices at once or late. Clocks run up to a percent fast or slow. The roster outlives
the lender; reading and writing it fails as often as `Setup` says.

`Audit` knows what really runs. It holds, at every start of an execution and at every move of the lender:

1. Of the permits that the lender has lent, no more are out than `bound`: the limit; after it was lowered, what was out
   until it is drained. So the lender grants only below the limit.
2. What really runs is no more than `bound`.
3. No process has more than the lender believes, nor starts anything while the lender does not know it.

4. A restarted lender that waits no longer for anybody has forgotten nobody who runs anything.

The exception: a process that was given up though it lives (cut off for longer than a term, or across a restart) and has
executions running. They are not counted until it is back, and then `bound` rises by them until they are drained. It
must not have started any since it was given up, which is what the third rule is for.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from toolyard.errors import LimiterClosedError
from toolyard.limits import desk
from toolyard.limits.cluster import borrowing
from toolyard.limits.cluster.borrowing import BorrowingDesk
from toolyard.limits.cluster.client import _CONNECT_SECONDS, _LEAVE_POLL_SECONDS, _PAUSES, _REPORT_GAP_SECONDS
from toolyard.limits.cluster.lending import Borrower, Lender
from toolyard.limits.cluster.server import _CLEAN_UP_SECONDS, _MISSING_SECONDS
from toolyard.limits.desk import DeskPermit


class Clock:
    """What desks take for the module `time`. Set to a process's own time whenever that process does something."""

    def __init__(self) -> None:
        self.local = 0.0

    def monotonic(self) -> float:
        return self.local


@dataclass(frozen=True, slots=True)
class Setup:
    limit: int
    term: float = 1.0
    latency: float = 0.0005
    """At most, each way; one message in two hundred takes twenty times as long where `spikes`."""
    spikes: bool = False
    slow_hello: float = 0.0
    """What a new connection's first message takes longer, at most: packets of a handshake are sent again late."""
    adaptive: bool = False
    starts_per_second: float | None = None
    max_hold: float | None = None
    drift: float = 0.0
    unreliable_store: float = 0.0
    """How often the roster cannot be read or written."""
    through_json: bool = False


@dataclass(slots=True, eq=False)
class Execution:
    process: Process
    tenant: str
    seconds: float
    weight: float = 1.0
    then: Callable[[], None] | None = None
    """Called by its process when it is over."""
    refused: bool = False
    asked: float = 0.0
    started: float = math.inf
    uncounted: bool = False
    """Its process was given up while it ran."""
    permit: DeskPermit | None = None

    def set(self) -> None:
        """The desk takes this for the event that a waiting thread blocks on."""
        if self.permit.error is None:
            self.process.begin(self)


@dataclass(slots=True)
class Simulation:
    setup: Setup
    seed: int
    now: float = 0.0
    random: random.Random = field(init=False)
    clock: Clock = field(default_factory=Clock)
    processes: dict[str, Process] = field(default_factory=dict)
    """All there ever were, by the name the lender knows them by."""
    executions: list[Execution] = field(default_factory=list)
    """All that started."""
    host: LenderHost = field(init=False)
    audit: Audit = field(init=False)
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    _serial: Iterator[int] = field(default_factory=itertools.count)
    wires: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.audit = Audit(self)
        self.host = LenderHost(self)
        self.host.start(recovering=False)

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + max(0.0, delay), call, *args)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (when, next(self._serial), call, args))

    def run(self, until: float) -> None:
        real = desk.time, borrowing.time
        desk.time = borrowing.time = self.clock
        try:
            while self._events and self._events[0][0] <= until:
                self.now, _, call, args = heapq.heappop(self._events)
                call(*args)
            self.now = until
        finally:
            desk.time, borrowing.time = real

    def process(self) -> Process:
        process = Process(self, f"process {len(self.processes)}")
        self.processes[process.id] = process
        return process

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if process.alive]

    def latency(self) -> float:
        latency = self.setup.latency * self.random.uniform(0.2, 1.0)
        return latency * 20 if self.setup.spikes and self.random.random() < 0.005 else latency

    def check(self, holds: bool, *claim: Any) -> None:
        if not holds:
            raise AssertionError(f"seed {self.seed}, at {self.now:.4f} s: {' '.join(str(part) for part in claim)}")


# What carries messages ------------------------------------------------------------------------------------------------


class Wire:
    """A TCP connection. `None` is its end."""

    def __init__(self, sim: Simulation, process: Process) -> None:
        self._sim = sim
        self.process = process
        self.borrower: Borrower | None = None
        self.hung_up = False
        """The lender has heard that it ended."""
        self.number = next(sim.wires)
        self._epoch = sim.host.epoch
        self._last = {True: sim.now + sim.random.random() ** 2 * sim.setup.slow_hello, False: 0.0}
        self._cut = False
        self._ended = {True: False, False: False}

    def send(self, message: Any, *, to_lender: bool) -> None:
        if self._cut:
            return
        if self._sim.setup.through_json:
            message = json.loads(json.dumps(message))
        arrives = max(self._last[to_lender], self._sim.now + self._sim.latency())
        self._last[to_lender] = arrives
        self._sim.at(arrives, self._arrive, message, to_lender)

    def close(self, *, by_lender: bool) -> None:
        """In order: what was sent before arrives before."""
        self._ended[by_lender] = True
        self.send(None, to_lender=not by_lender)

    def cut(self, lender_notices: float, process_notices: float) -> None:
        self._cut = True
        self._sim.after(lender_notices, self._deliver, None, True)
        self._sim.after(process_notices, self._deliver, None, False)

    def _arrive(self, message: Any, to_lender: bool) -> None:
        if not self._cut:
            self._deliver(message, to_lender)

    def _deliver(self, message: Any, to_lender: bool) -> None:
        if self._ended[to_lender]:
            return
        if message is None:
            self._ended[to_lender] = True
        if not to_lender:
            self.process.later(0.0, self.process.heard, self, message)
        elif self._sim.host.epoch == self._epoch:
            self._sim.host.later(0.0, self._sim.host.heard, self, message)


class _Lender(Lender):
    """Tells the audit whom it gives up, and when it waits for nobody any more."""

    audit: Audit

    def account_for(self, now: float, *members: str) -> None:
        recovering = self.recovering(now)
        super().account_for(now, *members)
        if recovering and not self.recovering(now):
            self.audit.everybody_is_back(self)

    def dead(self, borrower: Borrower) -> None:
        known = self.borrowers.get(borrower.id) is borrower
        super().dead(borrower)
        if known:
            self.audit.given_up(borrower.id)


class LenderHost:
    """As `LenderServer` with its `Roster`."""

    def __init__(self, sim: Simulation) -> None:
        self._store: tuple[bool, frozenset[str]] = True, frozenset()
        """What outlives the lender: whether the roster is complete, and who is on it."""
        self._sim = sim
        self.epoch = 0
        self.lender: _Lender | None = None
        self._busy_until = 0.0
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._wires: dict[Borrower, Wire] = {}
        self._ticks = 0
        self._due = False

    def start(self, *, recovering: bool) -> None:
        setup = self._sim.setup
        self.epoch += 1
        self._busy_until = 0.0
        self.lender = _Lender(
            "simulated",
            setup.limit,
            epoch=str(self.epoch),
            now=self._sim.now,
            term=setup.term,
            recovering=recovering,
            adaptive=setup.adaptive,
            starts_per_second=setup.starts_per_second,
            max_hold=setup.max_hold,
        )
        self.lender.audit = self._sim.audit
        self._complete, self._members = not recovering, frozenset[str]()
        if recovering:
            self._sim.at(self.lender._recovering_until, self._sim.audit.term_is_over, self.lender)
            complete, members = self._store
            if complete and self._store_works():
                self._complete, self._members = True, members
                self.lender.expect(self._sim.now, members)
        self._tick(self._ticks)
        self._keep_roster()

    def crash(self) -> None:
        self.lender = None
        self.epoch += 1
        self._ticks += 1
        self._due = False
        self._backlog.clear()
        self._wires.clear()

    def stall(self, seconds: float) -> None:
        self._busy_until = max(self._busy_until, self._sim.now + seconds)
        self._sim.at(self._busy_until, self._catch_up, self.epoch, self._busy_until)

    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self._sim.after(delay, self._when_free, self.epoch, call, args)

    def _when_free(self, epoch: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if epoch == self.epoch and self.lender is not None:
            if self._busy_until:
                self._backlog.append((call, args))
            else:
                call(*args)

    def _catch_up(self, epoch: int, until: float) -> None:
        if epoch == self.epoch and until == self._busy_until:
            self._busy_until = 0.0
            backlog, self._backlog = self._backlog, []
            for call, args in backlog:
                call(*args)

    # ---------------------------------------------------------------------------------------------------------- roster
    def _store_works(self) -> bool:
        return self._sim.random.random() >= self._sim.setup.unreliable_store

    def _keep_roster(self) -> None:
        now, lender = self._sim.now, self.lender
        if lender.recovering(now):
            everybody = self._sim.processes
            dead = [name for name in lender.missing or () if not everybody[name].alive and everybody[name].local]
            if dead:
                lender.account_for(now, *dead)
                self._wake()
        elif self._members - lender.borrowers.keys() or not self._complete:
            self._members, self._complete = self._members & lender.borrowers.keys(), True
            if self._store_works():
                self._store = True, self._members
        self.later(_MISSING_SECONDS if lender.recovering(now) else _CLEAN_UP_SECONDS, self._keep_roster)

    def _write_down(self, wire: Wire, hello: dict[str, Any]) -> None:
        """And register it, unless it cannot be told whether it was written."""
        members = self._members | {wire.process.id}
        works = self._store_works()
        if works or self._sim.random.random() < 0.5:
            self._store = self._complete, members
        if works:
            self._members = members
            self._register(wire, hello)
        else:
            wire.close(by_lender=True)

    def resize(self, limit: int) -> None:
        if self.lender is not None:
            self.lender.resize(limit)
            self._wake()

    def heard(self, wire: Wire, message: Any) -> None:
        lender, now, process = self.lender, self._sim.now, wire.process
        borrower = wire.borrower
        if message is None:
            wire.hung_up = True
            self._lost(wire)
        elif borrower is None:
            if process.id in self._members:
                self._register(wire, message)
            else:
                self.later(self._sim.latency(), self._write_down, wire, message)
        elif lender.borrowers.get(borrower.id) is not borrower:
            wire.close(by_lender=True)
            self._lost(wire)
        elif "bye" in message:
            lender.dead(borrower)
            self._lost(wire)
        else:
            lender.sync(now, borrower, message)
            process.settling = False
            self._wake()
        self._sim.audit.lender_moved()

    def _register(self, wire: Wire, hello: dict[str, Any]) -> None:
        lender, process = self.lender, wire.process
        known = lender.borrowers.get(process.id)
        if known is not None and known.connection > wire.number:
            wire.close(by_lender=True)
            return
        self._sim.audit.registers(process, hello)
        wire.borrower = borrower = lender.register(self._sim.now, process.id, process.id, hello)
        borrower.connection = wire.number
        self._wires[borrower] = wire
        wire.send(
            {
                "granted": borrower.granted, "epoch": lender.epoch, "term": lender.term, "limit": lender.limit,
                "version": lender.version, "max_hold": lender.max_hold, "adaptive": lender.adaptive,
            },
            to_lender=False,
        )  # fmt: skip
        if wire.hung_up:  # while it was being written down
            self._lost(wire)
        self._sim.audit.lender_moved()

    def _lost(self, wire: Wire) -> None:
        if wire.borrower is not None:
            self._wires.pop(wire.borrower, None)
            self.lender.lost(wire.borrower)
            self._wake()
            self._bury(wire.borrower, wire.process)

    def _bury(self, borrower: Borrower, process: Process) -> None:
        if not process.alive and process.local:
            self.lender.dead(borrower)
            self._wake()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self.later(self._sim.random.uniform(0.0, 0.0002), self._tick, self._ticks)

    def _tick(self, number: int) -> None:
        if number != self._ticks:
            return
        self._ticks += 1
        self._due = False
        lender = self.lender
        before = lender.outstanding
        until = lender.schedule(self._sim.now)
        self._sim.check(
            lender.outstanding <= max(before, lender.capacity), "granted up to", lender.outstanding, "from", before
        )
        for borrower in [known for known in self._wires if lender.borrowers.get(known.id) is not known]:
            self._wires.pop(borrower).close(by_lender=True)
        for borrower, answer in lender.answers(self._sim.now):
            if borrower in self._wires:
                self._wires[borrower].send(answer, to_lender=False)
        self._sim.audit.lender_moved()
        self._sim.audit.beliefs()
        if until < math.inf:
            self.later(max(0.001, until - self._sim.now), self._tick, self._ticks)


# Processes ------------------------------------------------------------------------------------------------------------


class _Desk(BorrowingDesk):
    def __init__(self, process: Process, limit: int) -> None:
        super().__init__("simulated", limit, max_hold=None, poke=process.poke)
        self._process = process

    def _set_alarm(self, now: float) -> None:
        when = max(self.closed_until, now, now + self.bucket.delay(now) if self.bucket is not None else now)
        if self.open_until > when > now:
            self._process.later(when - now + 1e-9, self.serve)


class Process:
    """A desk, and what `Client` does for it."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self._sim = sim
        self.id = name
        self.desk = _Desk(self, sim.setup.limit)
        self.alive = True
        self.local = sim.random.random() < 0.5
        """On the lender's machine, where a death is seen at once."""
        self.running: set[Execution] = set()
        self.waiting: set[Execution] = set()
        self.cut_off_until = 0.0
        self.disowned = self.settling = False
        self.welcomed: Borrower | None = None
        self._speed = 1.0 + sim.random.uniform(-sim.setup.drift, sim.setup.drift)
        self._offset = sim.random.uniform(0.0, 1000.0)
        self._stalled = False
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.wire: Wire | None = None
        self._poked = self._idle = self._leaving = False
        self._timer = 0
        self.later(0.0, self._connect)

    # ------------------------------------------------------------------------------------------------------------ time
    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """By this process's clock; not while it is stopped, and never once it is dead."""
        self._sim.after(delay / self._speed, self._unless_stalled, call, args)

    def _unless_stalled(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._stalled:
            self._backlog.append((call, args))
        elif self.alive:
            self._sim.clock.local = self._offset + self._sim.now * self._speed
            call(*args)

    @property
    def _now(self) -> float:
        return self._sim.clock.local

    def stall(self) -> None:
        self._stalled = True

    def resume(self) -> None:
        self._stalled = False
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            self._unless_stalled(call, args)

    def kill(self, *, lender_notices: float) -> None:
        """Its executions die with it."""
        self.alive = False
        self.running.clear()
        self.waiting.clear()
        if self.wire is not None:
            self.wire.cut(lender_notices, math.inf)

    # ------------------------------------------------------------------------------------------------------ executions
    def ask(self, execution: Execution) -> None:
        self.later(0.0, self._ask, execution)

    def _ask(self, execution: Execution) -> None:
        execution.asked = self._sim.now
        execution.permit = permit = self.desk.permit(execution.tenant, execution.weight, None, "")
        permit._event = execution
        self.waiting.add(execution)
        try:
            if self.desk.take(permit) or self.desk.enqueue(permit):
                self.begin(execution)
        except LimiterClosedError:
            self.waiting.discard(execution)

    def give_up_waiting(self, execution: Execution) -> None:
        if execution in self.waiting:
            self.waiting.discard(execution)
            self.desk.give_back(execution.permit)

    def begin(self, execution: Execution) -> None:
        execution.started = self._sim.now
        self.waiting.discard(execution)
        self.running.add(execution)
        self._sim.executions.append(execution)
        self._sim.audit.starts(self)
        self._sim.after(execution.seconds, self._end, execution)

    def _end(self, execution: Execution) -> None:
        if execution in self.running:  # not if they died together
            self.running.discard(execution)
            self.later(0.0, self._give_back, execution)

    def _give_back(self, execution: Execution) -> None:
        if execution.refused:
            execution.permit.refused(0.1)
        self.desk.give_back(execution.permit)
        if execution.then is not None:
            execution.then()

    # -------------------------------------------------------------------------------------------------- its connection
    def _connect(self) -> None:
        if self.wire is not None:
            return
        if self._sim.host.lender is None or self._sim.now < self.cut_off_until:
            self.later(self._sim.random.choice(_PAUSES), self._connect)
            return
        self.wire = wire = Wire(self._sim, self)
        self.welcomed = None
        wire.send(self.desk.hello(self._now), to_lender=True)
        self.later(_CONNECT_SECONDS, self._not_welcome, wire)

    def _not_welcome(self, wire: Wire) -> None:
        if self.wire is wire and self.welcomed is None:
            wire.close(by_lender=False)
            self._broken()

    def _broken(self) -> None:
        self.wire = None
        self._idle = False
        if not self._leaving:
            self.later(self._sim.random.choice(_PAUSES[:3]), self._connect)

    def heard(self, wire: Wire, message: Any) -> None:
        if self.wire is not wire:
            return
        if message is None:
            self._broken()
        elif self.welcomed is None:
            self.welcomed = wire.borrower
            self.desk.welcomed(message)
            self._interval = message["term"] / 4
            self._next_full = -math.inf
            self._next_sweep = self._now + self.desk.linger
            self._report(wire)
        else:
            self.desk.answered(message)

    def _report(self, wire: Wire) -> None:
        self._poked = self._idle = False
        now = self._now
        if now >= self._next_sweep:
            self.desk.give_back_idle()
            self._next_sweep = math.inf
        full = now >= self._next_full
        if full:
            self._next_full = now + self._interval
        wire.send(self.desk.report(now, full=full), to_lender=True)
        self.later(_REPORT_GAP_SECONDS, self._rest, wire)

    def _rest(self, wire: Wire) -> None:
        if self.wire is not wire:
            return
        self._next_sweep = min(self._next_sweep, self._now + self.desk.linger)
        if self._poked:
            self._report(wire)
            return
        self._idle = True
        self._timer += 1
        self.later(min(self._next_full, self._next_sweep) - self._now, self._rested, wire, self._timer)

    def _rested(self, wire: Wire, timer: int) -> None:
        if self.wire is wire and self._idle and timer == self._timer:
            self._report(wire)

    def poke(self) -> None:
        if not self._poked:
            self._poked = True
            self.later(self._sim.random.uniform(0.0, 0.0001), self._news)

    def _news(self) -> None:
        if self.wire is not None and self._idle and self._poked:
            self._report(self.wire)

    # --------------------------------------------------------------------------------------------------------- leaving
    def leave(self) -> None:
        self.later(0.0, self._close)

    def _close(self) -> None:
        self.desk.close()
        self.waiting.clear()
        self._leave()

    def _leave(self) -> None:
        if self.desk.give_up():
            self.poke()
            self.later(_LEAVE_POLL_SECONDS, self._leave)
            return
        self._leaving = True
        wire, self.wire = self.wire, None
        if wire is not None:
            if self.welcomed is not None:
                wire.send(self.desk.report(self._now, full=True), to_lender=True)
                wire.send({"bye": True}, to_lender=True)
            wire.close(by_lender=False)
        self.later(0.0, self._exit)

    def _exit(self) -> None:
        self.alive = False


# What must hold -------------------------------------------------------------------------------------------------------


class Audit:
    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.bound = sim.setup.limit
        self.most = 0

    def starts(self, process: Process) -> None:
        sim, lender = self._sim, self._sim.host.lender
        if lender is not None and sim.now >= lender._recovering_until:
            sim.check(process.id in lender.borrowers, process.id, "starts, and the lender does not know it")
        running = sum(not execution.uncounted for other in sim.alive for execution in other.running)
        self.most = max(self.most, running)
        sim.check(running <= self.bound, running, "run, and", self.bound, "may")
        self.beliefs()

    def registers(self, process: Process, hello: dict[str, Any]) -> None:
        if process.disowned or not process.alive:  # a hello can also outlive who said it
            process.disowned, process.settling = False, True
            self.bound += max(hello["in_use"], process.desk.in_use)
            for execution in process.running:
                execution.uncounted = False

    def given_up(self, name: str) -> None:
        process = self._sim.processes[name]
        process.disowned, process.settling = True, False
        for execution in process.running:
            execution.uncounted = True

    def term_is_over(self, lender: Lender) -> None:
        if self._sim.host.lender is lender and lender._recovering_until == self._sim.now:
            for process in self._sim.alive:
                if process.id not in lender.borrowers:
                    self.given_up(process.id)

    def everybody_is_back(self, lender: Lender) -> None:
        for process in self._sim.alive:
            known = process.id in lender.borrowers or process.disowned
            self._sim.check(known or not process.running, process.id, "runs, and is forgotten")

    def lender_moved(self) -> None:
        lender = self._sim.host.lender
        lent = lender.outstanding
        if self._sim.now >= lender._recovering_until:
            self.bound = max(self.bound, lender.capacity)
            if self.bound > lender.capacity and not any(process.settling for process in self._sim.alive):
                self.bound = max(lender.capacity, min(self.bound, lent))
        self._sim.check(lent <= self.bound, lent, "are lent, and", self.bound, "may be")

    def beliefs(self) -> None:
        lender = self._sim.host.lender
        if lender is None:
            return
        for process in self._sim.alive:
            borrower = lender.borrowers.get(process.id)
            if borrower is not None and not process.settling:
                has = process.desk.in_use
                if borrower is process.welcomed:
                    has = max(has, process.desk.stock)
                self._sim.check(borrower.held >= has, process.id, "has", has, "and the lender believes", borrower.held)


@contextlib.contextmanager
def at_desk(now: float) -> Iterator[Clock]:
    """For tests of a desk alone: its time stands at `now`."""
    clock = Clock()
    clock.local = now
    real = desk.time, borrowing.time
    desk.time = borrowing.time = clock
    try:
        yield clock
    finally:
        desk.time, borrowing.time = real
