"""The cluster's limiter under faults, in virtual time; see `limiter_simulation` for the invariants.

Each run depends only on its seed. To reproduce one: `Chaos(seed).run()`.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from limiter_simulation import Execution, Process, Setup, Simulation, Wire

from toolyard.limits.cluster.borrowing import LINGER_CONTENDED, SAFETY
from toolyard.limits.cluster.client import _PAUSES, _REPORT_GAP_SECONDS
from toolyard.limits.cluster.lending import DRIFT, QUANTUM

SEEDS = 150
QUICK = 50
PART = 10
"""Seeds in one test."""


class Chaos:
    """Processes that come, work, break and go, under a lender that breaks too."""

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(f"chaos {seed}")
        term = draw.choice([0.5, 1.0, 1.0, 4.0])
        storm = draw.random() < 0.5
        """Faults upon faults, and a network so slow that leases end while hellos are under way."""
        self.setup = Setup(
            limit=draw.choice([1, 2, 3, 5, 10, 20, 40]),
            term=term,
            latency=draw.choice([0.005, 0.03] if storm else [0.0005, 0.005, 0.03]),
            spikes=storm or draw.random() < 0.5,
            slow_hello=draw.choice([0.3, 1.0, 1.5] if storm else [0.0, 0.1, 1.0]) * term,
            adaptive=draw.random() < 0.2,
            starts_per_second=draw.choice([50.0, 500.0]) if draw.random() < 0.1 else None,
            max_hold=term * draw.uniform(0.5, 2.0) if draw.random() < 0.2 else None,
            drift=draw.choice([0.0, 0.009]),
            unreliable_store=draw.choice([0.0, 0.3, 0.6]),
            through_json=draw.random() < 0.1,
        )
        self.sim = Simulation(self.setup, seed)
        self.ends = term * draw.uniform(4.0, 8.0)
        self.tenants = {f"tenant {number}": draw.choice([1.0, 1.0, 2.0, 5.0]) for number in range(draw.randint(1, 4))}
        self.left = 40 + 7 * self.setup.limit
        self.pause = (draw.uniform(0.05, 0.3) if storm else draw.uniform(0.1, 2.0)) * term
        """Between two faults, on average."""
        everything = [
            self.cut, self.blip, self.late, self.cut_off, self.kill, self.stall, self.crash, self.lender_stalls,
            self.resize, self.leave, self.join,
        ]  # fmt: skip
        self.faults = everything if storm else draw.sample(everything, draw.randint(1, len(everything)))
        for _ in range(draw.randint(1, 12)):
            self.join()

    def run(self) -> None:
        sim = self.sim
        sim.after(self.random.expovariate(1 / self.pause), self.fault)
        sim.after(self.ends, self.heal)
        sim.run(self.ends)
        self.drain()
        self.nothing_is_leaked()

    # ------------------------------------------------------------------------------------------------------------ work
    def work(self, process: Process) -> None:
        """A batch now, and another one later."""
        sim, draw = self.sim, self.random
        if sim.now >= self.ends or not process.alive:
            return
        for _ in range(min(self.left, draw.choice([1, 1, 3, 10, self.setup.limit, 2 * self.setup.limit]))):
            self.left -= 1
            tenant, weight = draw.choice(list(self.tenants.items()))
            execution = Execution(process, tenant, self.seconds(), weight)
            execution.refused = self.setup.adaptive and draw.random() < 0.1
            process.ask(execution)
            if draw.random() < 0.05:
                process.later(draw.expovariate(2 / self.setup.term), process.give_up_waiting, execution)
        sim.after(draw.expovariate(3 / self.setup.term), self.work, process)

    def seconds(self) -> float:
        draw, term = self.random, self.setup.term
        longest = draw.choices([0.0, 0.01, 0.2, term, 3 * term], [10, 30, 40, 15, 5])[0]
        return min(draw.uniform(0.0, longest), self.setup.max_hold or math.inf)

    # ---------------------------------------------------------------------------------------------------------- faults
    def fault(self) -> None:
        if self.sim.now < self.ends:
            self.random.choice(self.faults)()
            pause = self.pause if self.random.random() < 0.7 else self.setup.term / 50  # they come in company
            self.sim.after(self.random.expovariate(1 / pause), self.fault)

    def anyone(self) -> Process | None:
        alive = self.sim.alive
        return self.random.choice(alive) if alive else None

    def terms(self, most: float) -> float:
        return self.setup.term * self.random.choice([0.0, 0.01, self.random.random(), 1.0]) * most

    def cut(self) -> None:
        """One connection breaks, and each side notices at once or when the kernel has given up."""
        process = self.anyone()
        if process is not None and process.wire is not None:
            process.wire.cut(self.terms(1.5), self.terms(1.5))

    def blip(self) -> None:
        """A switch restarts: all connections break, and all come back."""
        for process in self.sim.alive:
            if process.wire is not None:
                process.wire.cut(self.terms(0.1), self.terms(0.1))
        if self.random.random() < 0.5:
            self.resize()

    def late(self) -> None:
        """One comes back in the last moment of its lease."""
        process = self.anyone()
        if process is not None and process.wire is not None:
            process.wire.cut(0.0, self.setup.term * self.random.uniform(0.6, 0.95))

    def cut_off(self) -> None:
        process = self.anyone()
        if process is not None:
            process.cut_off_until = self.sim.now + self.terms(3.0)
            if process.wire is not None:
                process.wire.cut(self.terms(1.5), self.terms(1.5))

    def kill(self) -> None:
        process = self.anyone()
        if process is not None:
            process.kill(lender_notices=self.terms(1.5))
            self.join()

    def stall(self) -> None:
        process = self.anyone()
        if process is not None:
            process.stall()
            self.sim.after(self.terms(3.0), process.resume)

    def crash(self) -> None:
        host = self.sim.host
        if host.lender is not None:
            host.crash()
            same = self.terms(1.5)
            for process in self.sim.alive:
                if process.wire is not None:
                    process.wire.cut(math.inf, self.random.choice([0.0, same, self.terms(1.5)]))
            self.sim.after(self.terms(2.5) + 0.01, self.restart)

    def restart(self) -> None:
        if self.sim.host.lender is None:
            self.sim.host.start(recovering=True)

    def lender_stalls(self) -> None:
        self.sim.host.stall(self.terms(1.5))

    def resize(self) -> None:
        self.sim.host.resize(self.random.choice([1, 2, 5, 10, 40]))

    def leave(self) -> None:
        process = self.anyone()
        if process is not None and len(self.sim.alive) > 1:
            process.leave()

    def join(self) -> None:
        if len(self.sim.alive) < 12:
            self.work(self.sim.process())

    # --------------------------------------------------------------------------------------------------- and afterwards
    def heal(self) -> None:
        self.restart()
        if self.random.random() < 0.5:
            self.sim.host.resize(20)
        for process in self.sim.alive:
            process.cut_off_until = 0.0
            process.resume()

    def drain(self) -> None:
        """Every waiter is served, and everything ends."""
        sim = self.sim
        busy = sim.alive
        for _ in range(600):
            busy = [process for process in sim.alive if process.waiting or process.running]
            if not busy:
                break
            sim.run(sim.now + self.setup.term / 2)
        sim.check(
            not busy, "still there:", *((process.id, len(process.waiting), len(process.running)) for process in busy)
        )

    def nothing_is_leaked(self) -> None:
        sim = self.sim
        lender = sim.host.lender
        # The last dead processes are given up, and lingering permits come back.
        sim.run(sim.now + 3 * self.setup.term + 3.0)
        if lender.capacity < lender.limit:
            sim.run(sim.now + 10.0)
        sim.check(all(not process.desk.in_use for process in sim.alive), "something is held by nobody")
        stock = sum(process.desk.stock for process in sim.alive)
        sim.check(lender.outstanding == stock == 0, lender.outstanding, "lent, and", stock, "borrowed by nobody's need")
        sim.check(lender.capacity == lender.limit, "nothing was refused for long, and the limit is", lender.capacity)
        for process in self.random.sample(sim.alive, min(2, len(sim.alive))):
            soon = 10.0 if self.setup.starts_per_second else 0.2 + 100 * self.setup.latency
            for _ in range(lender.limit):
                process.ask(Execution(process, "the last", soon))
            sim.run(sim.now + soon)
            sim.check(len(process.running) == lender.limit, len(process.running), "of", lender.limit, "for one alone")
            sim.run(sim.now + soon + 0.1)


@pytest.mark.parametrize(
    "first",
    [first if first < QUICK else pytest.param(first, marks=pytest.mark.slow) for first in range(0, SEEDS, PART)],
)
def test_the_limit_holds_and_nothing_is_lost_whatever_breaks(first: int):
    for seed in range(first, first + PART):
        Chaos(seed).run()


# Without faults: fairness, and how long anybody waits -----------------------------------------------------------------

LATENCY = Setup(1).latency
HAND_OVER = LINGER_CONTENDED + _REPORT_GAP_SECONDS + 5 * LATENCY
"""A permit's way from one process to another: it is asked for, called back, given back and granted."""


def flood(process: Process, tenant: str, seconds: float, *, workers: int = 3, weight: float = 1.0) -> None:
    """`workers` that execute one after another, forever."""

    def again() -> None:
        process.ask(Execution(process, tenant, seconds, weight, then=again))

    for _ in range(workers):
        again()


def trickle(process: Process, tenant: str, seconds: float, pause: float) -> list[Execution]:
    """One at a time, with pauses."""
    asked: list[Execution] = []

    def again() -> None:
        asked.append(Execution(process, tenant, seconds, then=lambda: process.later(pause, again)))
        process.ask(asked[-1])

    again()
    return asked


def starts(sim: Simulation, by: str) -> Counter[str]:
    return Counter(getattr(execution, by) for execution in sim.executions)


class TestFairness:
    def test_equal_processes_get_equal_shares_of_a_limit_smaller_than_their_number(self):
        sim = Simulation(Setup(3), 0)
        processes = [sim.process() for _ in range(8)]
        for process in processes:
            flood(process, "everybody", 0.02, workers=1)
        sim.run(20.0)
        share = 20.0 / 0.02 * 3 / 8
        assert all(0.9 * share < count < 1.1 * share for count in starts(sim, "process").values())
        bound = math.ceil(8 / 3) * (QUANTUM + 0.02) + HAND_OVER
        longest = max(execution.started - execution.asked for execution in sim.executions)
        assert longest < 1.5 * bound, "turns are due in order, but executions are not interrupted"

    def test_no_process_is_without_a_permit_for_longer_than_a_round_however_many_wait_in_each(self):
        sim = Simulation(Setup(3), 1)
        processes = [sim.process() for _ in range(8)]
        for number, process in enumerate(processes):
            flood(process, "everybody", 0.02, workers=1 + 4 * number)
        sim.run(20.0)
        bound = math.ceil(8 / 3) * (QUANTUM + 0.02) + HAND_OVER
        for process in processes:
            begun = [0.0, *(execution.started for execution in sim.executions if execution.process is process)]
            assert max(after - before for before, after in pairwise(begun)) < 1.5 * bound

    def test_the_limit_is_used_though_it_goes_round(self):
        sim = Simulation(Setup(3), 2)
        for _ in range(8):
            flood(sim.process(), "everybody", 0.02)
        sim.run(10.0)
        assert len(sim.executions) > 0.95 * 10.0 / 0.02 * 3

    @pytest.mark.parametrize("limit", [3, 6, 20])
    @pytest.mark.parametrize("weight", [1.0, 3.0])
    def test_a_tenant_gains_nothing_by_being_in_many_processes(self, weight: float, limit: int):
        sim = Simulation(Setup(limit), 3)
        for _ in range(8):
            flood(sim.process(), "in many", 0.02, workers=8)
        flood(sim.process(), "in one", 0.02, workers=40, weight=weight)
        sim.run(5.0)
        count = starts(sim, "tenant")
        assert count["in one"] / count.total() == pytest.approx(weight / (1 + weight), rel=0.1)

    def test_two_tenants_of_one_process_get_their_shares_of_the_whole(self):
        sim = Simulation(Setup(6), 4)
        processes = [sim.process() for _ in range(8)]
        for process in processes:
            flood(process, "in many", 0.02, workers=8)
        flood(processes[0], "in one", 0.02, workers=40)
        sim.run(5.0)
        count = starts(sim, "tenant")
        assert count["in one"] / count.total() == pytest.approx(0.5, rel=0.1)

    def test_so_do_tenants_whose_executions_all_wait_from_the_beginning(self):
        sim = Simulation(Setup(10), 5)
        processes = [sim.process() for _ in range(4)]
        for process in processes:
            for _ in range(1000):
                process.ask(Execution(process, "in many", 0.02))
        for _ in range(3000):
            processes[0].ask(Execution(processes[0], "in one", 0.02))
        sim.run(5.0)
        count = starts(sim, "tenant")
        assert count["in one"] / count.total() == pytest.approx(0.5, rel=0.1)

    @pytest.mark.parametrize("beside", [True, False], ids=["in the same process", "in a process of its own"])
    @pytest.mark.parametrize(("limit", "floods", "seconds"), [(10, 1, 0.1), (10, 4, 0.1), (3, 8, 0.02), (1, 3, 0.02)])
    def test_a_trickle_beside_a_flood_waits_a_round_at_most(
        self, limit: int, floods: int, seconds: float, beside: bool
    ):
        sim = Simulation(Setup(limit), 6)
        flooding = [sim.process() for _ in range(floods)]
        process = flooding[0] if beside else sim.process()
        for other in flooding:
            flood(other, "flood", seconds, workers=4 * limit)
        asked = trickle(process, "trickle", seconds, 0.05)
        sim.run(5.0)
        waits = [execution.started - execution.asked for execution in asked[:-1]]
        assert len(waits) > 10
        assert max(waits) < math.ceil((floods + 1) / limit) * (QUANTUM + seconds) + HAND_OVER


class TestNobodyWaitsForNothing:
    @pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))])
    def test_while_less_is_wanted_than_there_is(self, seed: int):
        """Whoever waits then waits for idle permits of others, and for no longer than they take to come."""
        draw, sim = random.Random(seed), Simulation(Setup(10), seed)
        processes = [sim.process() for _ in range(6)]
        sim.run(0.1)
        busy = 0

        def done() -> None:
            nonlocal busy
            busy -= 1

        def batch() -> None:
            nonlocal busy
            process = draw.choice(processes)
            for _ in range(draw.randint(0, 10 - busy)):
                busy += 1
                seconds = draw.choice([0.001, 0.02, 0.2, 1.0]) * draw.random()
                process.ask(Execution(process, "", seconds, then=done))
            sim.after(draw.expovariate(8), batch)

        batch()
        sim.run(10.0)
        assert len(sim.executions) > 100
        assert max(execution.started - execution.asked for execution in sim.executions) < HAND_OVER

    def test_a_process_with_idle_permits_gives_them_up_when_another_waits(self):
        sim = Simulation(Setup(10), 0)
        idle, waiting = sim.process(), sim.process()
        sim.run(0.1)
        for _ in range(10):
            idle.ask(Execution(idle, "", 0.01))
        sim.run(0.2)
        assert idle.desk.stock == 10
        for _ in range(10):
            waiting.ask(Execution(waiting, "", 1.0))
        sim.run(0.2 + HAND_OVER)
        assert len(waiting.running) == 10

    def test_permits_nobody_uses_come_back_by_themselves(self):
        sim = Simulation(Setup(10), 0)
        process = sim.process()
        process.ask(Execution(process, "", 0.01))
        sim.run(3.0)
        assert sim.host.lender.outstanding == process.desk.stock == 0

    def test_what_a_lost_process_waits_for_is_not_kept_from_the_others(self):
        """It keeps what it has until it is given up. What it waits for, it could not use."""
        sim = Simulation(Setup(4), 0)
        working, lost = sim.process(), sim.process()
        lost.local = False
        sim.run(0.1)
        flood(working, "", 0.3, workers=10)
        sim.run(0.2)
        for _ in range(10):
            lost.ask(Execution(lost, "", 0.1))
        sim.run(0.21)
        lost.kill(lender_notices=0.0)
        sim.run(0.95)
        assert sim.host.lender.borrowers[lost.id].held == 0
        assert len(working.running) == 4


class TestRestart:
    TERM = 4.0
    SOON = 0.25 * TERM + 1.5 * max(_PAUSES)
    """How much sooner the oldest lease ends than a new one, and how long processes take to find the lender."""

    def standstill(self, sim: Simulation, *, down: float, gone: int = 0) -> float:
        """The longest time without a start around a crash of the lender, of which `gone` members die with it."""
        processes = [sim.process() for _ in range(4)]
        for process in processes:
            process.local = False
            flood(process, "", 0.02, workers=8)
        sim.run(1.0)
        for process in processes[:gone]:
            process.kill(lender_notices=math.inf)
        sim.host.crash()
        for process in processes[gone:]:
            process.wire.cut(math.inf, 0.0)
        sim.after(down, lambda: sim.host.start(recovering=True))
        sim.run(1.0 + down + 2 * self.TERM)
        begun = [execution.started for execution in sim.executions]
        assert begun[-1] > sim.now - 0.1
        return max(after - before for before, after in pairwise(begun))

    @pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))])
    def test_shorter_than_a_lease_nobody_stands_still(self, seed: int):
        sim = Simulation(Setup(12, term=self.TERM), seed)
        assert self.standstill(sim, down=0.5 * self.TERM) < 0.1

    @pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))])
    def test_longer_than_a_lease_all_start_again_when_the_last_one_is_back(self, seed: int):
        sim = Simulation(Setup(12, term=self.TERM), seed)
        lapsed = self.TERM * (2.0 - SAFETY)
        assert lapsed < self.standstill(sim, down=2.0 * self.TERM) < lapsed + self.SOON

    @pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))])
    def test_a_member_elsewhere_that_dies_with_the_lender_costs_a_term(self, seed: int):
        sim = Simulation(Setup(12, term=self.TERM), seed)
        lapsed = self.TERM * (2.0 - SAFETY)
        found = self.standstill(sim, down=2.0 * self.TERM, gone=1)
        assert lapsed + self.TERM < found < lapsed + self.TERM * DRIFT + self.SOON


class TestLowering:
    @pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
    def test_once_what_ran_has_ended_the_new_limit_holds_for_bursts_too(self, seed: int):
        draw, sim = random.Random(seed), Simulation(Setup(10), seed)
        processes = [sim.process() for _ in range(draw.randint(1, 4))]
        longest = 0.03
        limits = [(0.0, 10)]

        def burst(process: Process) -> None:
            for _ in range(draw.randint(1, 12)):
                process.ask(Execution(process, "", draw.uniform(0.0, longest)))
            process.later(draw.expovariate(10), burst, process)

        def resize() -> None:
            limits.append((sim.now, draw.randint(1, 10)))
            sim.host.resize(limits[-1][1])
            sim.after(draw.uniform(0.3, 1.5), resize)

        for process in processes:
            burst(process)
        resize()
        sim.run(10.0)
        begun = [execution.started for execution in sim.executions]
        ended = sorted(execution.started + execution.seconds for execution in sim.executions)
        changed = [when for when, _ in limits]
        for number, now in enumerate(begun, 1):
            running = number - bisect.bisect_right(ended, now)
            first = bisect.bisect_right(changed, now - longest - HAND_OVER) - 1
            in_force = [limit for when, limit in limits[max(0, first) :] if when <= now]
            sim.check(running <= max(in_force), running, "run at", now, "under", in_force)


class TestRate:
    @pytest.mark.parametrize("processes", [1, 2, 5, 12])
    def test_starts_stay_below_the_rate_over_any_time_and_use_it_while_many_wait(self, processes: int):
        rate = 20.0
        draw, sim = random.Random(processes), Simulation(Setup(50, starts_per_second=rate), processes)
        members = [sim.process() for _ in range(processes)]

        def batch() -> None:
            process = draw.choice(members)
            for _ in range(draw.choice([1, 5, 60])):
                process.ask(Execution(process, "", draw.choice([0.0, 0.05, 0.5])))
            sim.after(draw.expovariate(rate / 25), batch)

        batch()
        for second in range(1, 31):
            waiting, before = sum(len(process.waiting) for process in members), len(sim.executions)
            sim.run(float(second))
            assert waiting < 50 * processes or len(sim.executions) - before > 0.5 * rate
        ahead, least = 0.0, math.inf
        for number, execution in enumerate(sim.executions):
            least = min(least, number - rate * execution.started)
            ahead = max(ahead, number + 1 - rate * execution.started - least)
        assert ahead <= rate + processes, "a burst is what comes in a second"


class TestQuiet:
    @pytest.mark.parametrize("why", ["a pause", "a rate"])
    def test_little_is_said_while_nobody_may_start(self, why: str, monkeypatch: pytest.MonkeyPatch):
        """Permits that wait for time to pass do not go round and round."""
        sim = Simulation(Setup(4, adaptive=why == "a pause", starts_per_second=1.0 if why == "a rate" else None), 0)
        processes = [sim.process() for _ in range(3)]
        sim.run(0.1)
        for process in processes:
            for _ in range(20):
                process.ask(Execution(process, "", 0.01))
        if why == "a pause":
            processes[0].later(0.001, lambda: processes[0].desk.refuse(5.0, unavailable=False))
        sim.run(1.0)
        said = 0
        send = Wire.send

        def counted(wire: Wire, message: object, *, to_lender: bool) -> None:
            nonlocal said
            said += 1
            send(wire, message, to_lender=to_lender)

        monkeypatch.setattr(Wire, "send", counted)
        sim.run(3.0)
        assert all(process.waiting for process in processes)
        assert said / 2.0 / len(processes) < 50
