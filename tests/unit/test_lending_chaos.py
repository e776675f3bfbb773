"""The cluster's limiter under faults, in virtual time; see `limiter_simulation` for what is held against it.

Each run is made from its seed alone. To look into one: `Chaos(seed).run()`.
"""

from __future__ import annotations

import math
import random

import pytest
from limiter_simulation import Execution, Process, Setup, Simulation

SEEDS = 150
PART = 10
"""Seeds in one test."""


class Chaos:
    """Processes that come, work, break and go, under a lender that breaks too."""

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(f"chaos {seed}")
        term = draw.choice([0.5, 1.0, 1.0, 4.0])
        self.setup = Setup(
            limit=draw.choice([1, 2, 3, 5, 10, 20, 40]),
            term=term,
            latency=draw.choice([0.0005, 0.005, 0.03]),
            spikes=draw.random() < 0.5,
            slow_hello=draw.choice([0.0, 0.1, 1.0]) * term,
            adaptive=draw.random() < 0.2,
            starts_per_second=draw.choice([50.0, 500.0]) if draw.random() < 0.1 else None,
            max_hold=term * draw.uniform(0.5, 2.0) if draw.random() < 0.2 else None,
            drift=draw.choice([0.0, 0.009]),
            through_json=draw.random() < 0.1,
        )
        self.sim = Simulation(self.setup, seed)
        self.ends = term * draw.uniform(4.0, 8.0)
        self.tenants = {f"tenant {number}": draw.choice([1.0, 1.0, 2.0, 5.0]) for number in range(draw.randint(1, 4))}
        self.left = 60 + 10 * self.setup.limit
        self.pause = draw.uniform(0.1, 2.0) * term
        """Between two faults, on average."""
        everything = [
            self.cut, self.blip, self.cut_off, self.kill, self.stall, self.crash, self.lender_stalls, self.resize,
            self.leave, self.join,
        ]  # fmt: skip
        self.faults = draw.sample(everything, draw.randint(1, len(everything)))
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
        """Everybody who waits is served, and everything ends."""
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
        sim.run(sim.now + 3 * self.setup.term + (10.0 if self.setup.adaptive else 3.0))
        lender = sim.host.lender
        sim.check(all(not process.desk.in_use for process in sim.alive), "something is held by nobody")
        stock = sum(process.desk.stock for process in sim.alive)
        sim.check(lender.outstanding == stock == 0, lender.outstanding, "lent, and", stock, "borrowed by nobody's need")
        sim.check(lender.capacity == lender.limit, "nothing was refused for long, and the limit is", lender.capacity)
        for process in self.random.sample(sim.alive, min(2, len(sim.alive))):
            soon = 10.0 if self.setup.starts_per_second else 3.0
            for _ in range(lender.limit):
                process.ask(Execution(process, "the last", soon))
            sim.run(sim.now + soon)
            sim.check(len(process.running) == lender.limit, len(process.running), "of", lender.limit, "for one alone")
            sim.run(sim.now + soon + 0.1)


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_the_limit_holds_and_nothing_is_lost_whatever_breaks(first: int):
    for seed in range(first, first + PART):
        Chaos(seed).run()
