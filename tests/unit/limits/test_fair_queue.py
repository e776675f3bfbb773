"""The order of waiting: first come, first served within a tenant, weighted fair between tenants, none lost or
forgotten."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expensive import examples
from toolyard.limits.fair_queue import FairQueue

KEPT = 1000
"""Far more lines than are waited in below, and far fewer than tenants come and go."""


def filled(**lines: int | tuple[int, float]) -> FairQueue[str]:
    """`filled(a=2, b=(3, 5.0))`: a1 and a2 of tenant a, then b1 to b3 of tenant b, which has a weight of 5."""
    queue: FairQueue[str] = FairQueue()
    for tenant, line in lines.items():
        count, weight = line if isinstance(line, tuple) else (line, 1.0)
        for n in range(1, count + 1):
            queue.push(f"{tenant}{n}", tenant, weight)
    return queue


def served(queue: FairQueue[str], most: int | None = None) -> list[str]:
    return [queue.pop() for _ in range(len(queue) if most is None else most)]


def overtaking_bound(before: int, weight: float, other: float) -> int:
    """How often a tenant of weight `other` is served before one with `before` waiters ahead in its own line."""
    return math.floor((before + 1) * Fraction(other) / Fraction(weight)) + 1


# Order ----------------------------------------------------------------------------------------------------------------


def test_one_tenant_is_served_in_the_order_of_coming():
    assert served(filled(a=5)) == ["a1", "a2", "a3", "a4", "a5"]


def test_equal_tenants_take_turns():
    assert served(filled(a=3, b=3)) == ["a1", "b1", "a2", "b2", "a3", "b3"]


def test_a_line_that_ends_leaves_its_turns_to_the_others():
    assert served(filled(a=1, b=3, c=2)) == ["a1", "b1", "c1", "b2", "c2", "b3"]


def test_three_times_the_weight_is_served_three_times_as_often_at_every_moment():
    order = served(filled(light=100, heavy=(300, 3.0)), 200)
    for n in range(1, len(order) + 1):
        light = sum(item.startswith("light") for item in order[:n])
        assert abs(light - n / 4) <= 1


def test_who_comes_to_a_long_line_of_others_is_overtaken_at_most_twice():
    queue = filled(flood=1000)
    served(queue, 500)
    queue.push("small", "small")
    assert "small" in served(queue, 3)


def test_who_comes_back_is_not_paid_for_the_time_away():
    queue = filled(a=100, b=1)
    served(queue, 50)  # b was served once, and then had nothing to wait for
    for n in range(10):
        queue.push(f"b-again{n}", "b")
    order = served(queue, 20)
    assert sum(item.startswith("b") for item in order) == pytest.approx(10, abs=1)


def test_leaving_after_every_execution_and_coming_again_is_no_way_to_the_front():
    queue = filled(patient=100)
    order: list[str] = []
    for n in range(50):
        queue.push(f"hasty{n}", "hasty")
        order.append(queue.pop())
        if order[-1].startswith("hasty"):
            order.append(queue.pop())
    assert sum(item.startswith("hasty") for item in order) <= len(order) / 2 + 1


def test_the_weight_given_last_is_the_tenants():
    queue = filled(a=(1, 1.0), b=200)
    for n in range(2, 100):
        queue.push(f"a{n}", "a", 3.0)
    counted = Counter(item[0] for item in served(queue, 100))
    assert counted["a"] == pytest.approx(75, abs=2)


def test_a_pace_counts_instead_of_the_weight_and_leaves_it_as_it_was():
    queue = filled(a=400, b=400)
    served(queue, 100)
    queue.paces = {"a": 4.0, "never seen": 4.0}
    assert Counter(item[0] for item in served(queue, 100))["a"] == pytest.approx(80, abs=2)
    assert {weight for _, weight, _ in queue.waiting()} == {1.0}


@pytest.mark.parametrize("fresh_at_once", [1, 10])
def test_a_waiter_is_not_overtaken_for_ever_by_tenants_that_are_new(fresh_at_once: int):
    """A tenant may be as short-lived as a trajectory: then there is always one that was never served before."""
    queue = filled(old=2)
    assert queue.pop() == "old1"
    for n in range(fresh_at_once):
        queue.push(f"first{n}", f"first{n}")
    for n in range(1000):
        queue.push(f"fresh{n}", f"fresh{n}")
        if queue.pop() == "old2":
            assert n <= 10 * (fresh_at_once + 2)
            return
    pytest.fail("1000 of other tenants were served, and the one of the old tenant still waits")


# Leaving --------------------------------------------------------------------------------------------------------------


def test_who_left_is_not_served_and_holds_up_nobody():
    queue = filled(a=3, b=2)
    assert queue.remove("a2", "a")
    assert queue.remove("b1", "b")
    assert served(queue) == ["a1", "b2", "a3"]


def test_one_leaves_once_and_only_from_its_own_line():
    queue = filled(a=2, b=1)
    assert not queue.remove("a1", "b")
    assert not queue.remove("a1", "never seen")
    assert queue.remove("a1", "a")
    assert not queue.remove("a1", "a")
    assert queue.pop() in {"a2", "b1"}
    assert len(queue) == 1


def test_one_that_was_served_cannot_leave_any_more():
    queue = filled(a=2)
    assert queue.pop() == "a1"
    assert not queue.remove("a1", "a")


def test_nobody_is_next_when_nobody_waits():
    queue = filled(a=2)
    served(queue)
    with pytest.raises(IndexError):
        queue.pop()
    queue.push("a3", "a")
    assert queue.remove("a3", "a")
    with pytest.raises(IndexError):
        queue.pop()


def test_a_line_that_all_have_left_is_taken_up_again():
    queue = filled(a=1, b=2)
    queue.remove("a1", "a")
    queue.push("a2", "a")
    assert sorted(served(queue)) == ["a2", "b1", "b2"]


def test_draining_hands_out_everybody_in_order_and_leaves_nothing():
    queue = filled(a=3, b=2)
    assert queue.pop() == "a1"
    assert queue.drain() == ["a2", "a3", "b1", "b2"]
    assert (len(queue), list(queue.waiting()), queue.drain()) == (0, [], [])
    queue.push("c1", "c")
    assert served(queue) == ["c1"]


def test_those_waiting_are_counted_by_tenant():
    queue = filled(a=2, b=(3, 5.0), c=1)
    queue.remove("c1", "c")
    queue.pop()
    assert list(queue.waiting()) == [("a", 1.0, 2), ("b", 5.0, 2)]


# Memory and time ------------------------------------------------------------------------------------------------------


def test_tenants_that_are_gone_are_forgotten_while_others_wait_on():
    queue = filled(old=30_000)
    for n in range(10_000):
        queue.push(f"passing{n}", f"passing{n}")
        served(queue, 2)
    assert len(queue._lines) < KEPT


def test_tenants_that_only_ever_come_new_are_forgotten_too():
    queue = filled(old=2)
    queue.pop()
    for n in range(3000):
        queue.push(f"fresh{n}", f"fresh{n}")
        queue.push(f"fresher{n}", f"fresher{n}")
        served(queue, 2)
    assert len(queue._lines) < KEPT


def test_tenants_that_give_up_waiting_are_forgotten_too():
    queue = filled(old=30_000)
    for n in range(10_000):
        queue.push(f"passing{n}", f"passing{n}")
        queue.remove(f"passing{n}", f"passing{n}")
        served(queue, 1)
    assert len(queue._lines) < KEPT
    assert len(queue._heap) < KEPT


def test_serving_takes_no_longer_with_twenty_thousand_tenants_than_with_two():
    def seconds(tenants: int) -> float:
        queue: FairQueue[int] = FairQueue()
        began = time.process_time()
        for n in range(40_000):
            queue.push(n, str(n % tenants))
        while queue:
            queue.pop()
        return time.process_time() - began

    assert seconds(20_000) < 20 * seconds(2) + 1.0


# Any sequence of events -----------------------------------------------------------------------------------------------

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 3.0, "e": 0.5, "f": 10.0}
FRESH = 1.0


@dataclass(eq=False)
class Waiter:
    tenant: str
    before: int
    """How many of its own line were before it when it came."""
    overtaken: Counter[str] = field(default_factory=Counter)


class PermitsAroundAQueue(RuleBasedStateMachine):
    """A limit, kept as a desk does, and a plain model beside it: a list for each tenant."""

    def __init__(self):
        super().__init__()
        self.queue: FairQueue[Waiter] = FairQueue()
        self.lines: dict[str, list[Waiter]] = {}
        self.limit = 1
        self.held: list[Waiter] = []
        self.came = self.left = self.finished = 0

    @initialize(limit=st.integers(1, 4))
    def has_a_limit(self, limit: int) -> None:
        self.limit = limit

    @property
    def waiting(self) -> list[Waiter]:
        return [waiter for line in self.lines.values() for waiter in line]

    def weight(self, tenant: str) -> float:
        return WEIGHTS.get(tenant, FRESH)

    def push(self, tenant: str) -> None:
        line = self.lines.setdefault(tenant, [])
        waiter = Waiter(tenant, len(line))
        line.append(waiter)
        self.came += 1
        self.queue.push(waiter, tenant, self.weight(tenant))

    def grant(self) -> None:
        while self.queue and len(self.held) < self.limit:
            waiter = self.queue.pop()
            assert self.lines[waiter.tenant].pop(0) is waiter, "not the first of its line"
            self.held.append(waiter)
            for other in self.waiting:
                if other.tenant != waiter.tenant:
                    other.overtaken[waiter.tenant] += 1

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)), count=st.integers(1, 5))
    def come(self, tenant: str, count: int) -> None:
        for _ in range(count):
            self.push(tenant)
        self.grant()

    @rule()
    def come_as_a_new_tenant(self) -> None:
        self.push(f"fresh{self.came}")
        self.grant()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.finished += 1
        self.grant()

    @precondition(lambda self: self.held)
    @rule(count=st.integers(2, 12))
    def many_finish(self, count: int) -> None:
        for _ in range(count):
            if self.held:
                self.held.pop(0)
                self.finished += 1
                self.grant()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up_waiting(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(waiter, waiter.tenant)
        assert not self.queue.remove(waiter, waiter.tenant)
        self.lines[waiter.tenant].remove(waiter)
        self.left += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def try_to_leave_though_granted(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.held))
        assert not self.queue.remove(waiter, waiter.tenant)

    @rule(limit=st.integers(1, 6))
    def resize(self, limit: int) -> None:
        self.limit = max(limit, len(self.held))
        self.grant()

    @rule()
    def close(self) -> None:
        drained = self.queue.drain()
        assert len(drained) == len(set(drained))
        assert set(drained) == set(self.waiting)
        self.left += len(drained)
        self.lines.clear()

    @invariant()
    def never_more_than_the_limit_are_held_and_nobody_waits_while_one_is_free(self) -> None:
        assert len(self.held) <= self.limit
        assert len(self.held) == self.limit or not self.queue

    @invariant()
    def nobody_is_lost_and_nobody_is_there_twice(self) -> None:
        assert self.came == self.finished + self.left + len(self.held) + len(self.queue)
        assert len(self.queue) == len(self.waiting)
        assert {tenant: (weight, count) for tenant, weight, count in self.queue.waiting()} == {
            tenant: (self.weight(tenant), len(line)) for tenant, line in self.lines.items() if line
        }

    @invariant()
    def nobody_is_overtaken_more_often_than_is_promised(self) -> None:
        for waiter in self.waiting:
            for tenant, times in waiter.overtaken.items():
                assert times <= overtaking_bound(waiter.before, self.weight(waiter.tenant), self.weight(tenant))

    @invariant()
    def idle_tenants_are_kept_in_bounded_number(self) -> None:
        assert len(self.queue._lines) <= 2 * (len(self.queue) + len(WEIGHTS)) + 200

    def teardown(self) -> None:
        """Whatever happens, every waiter that stays is served in the end."""
        while self.held or self.queue:
            self.held.clear()
            self.grant()
            self.nobody_is_overtaken_more_often_than_is_promised()
        assert not self.waiting


PermitsAroundAQueue.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
TestPermitsAroundAQueue = PermitsAroundAQueue.TestCase


@pytest.mark.parametrize("weight", sorted({*WEIGHTS.values()}))
@pytest.mark.parametrize("other", sorted({*WEIGHTS.values()}))
@pytest.mark.parametrize("before", [0, 1, 7])
def test_the_bound_on_overtaking_is_nearly_reached(weight: float, other: float, before: int):
    queue: FairQueue[str] = FairQueue()
    queue.push("served", "mine", weight)
    for n in range(2000):
        queue.push(f"other{n}", "other", other)
    while queue.pop() != "served":
        pass
    for n in range(before):
        queue.push(f"before{n}", "mine", weight)
    queue.push("waiter", "mine", weight)
    times = 0
    while (item := queue.pop()) != "waiter":
        times += item.startswith("other")
    assert overtaking_bound(before, weight, other) - 2 <= times <= overtaking_bound(before, weight, other)
