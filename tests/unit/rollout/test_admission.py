"""How many requests may run, decided without servers and without a clock."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.engines.protocol import Load
from toolyard.rollout.admission import AdaptiveConcurrency, Gate


class Server:
    """Samples as many requests at once as it has slots; each request has turns with tool calls between them."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._random = random.Random(0)
        self._running: list[int] = []
        """Seconds left."""
        self._waiting = 0
        self._tools = 0

    @property
    def active(self) -> int:
        return len(self._running) + self._waiting + self._tools

    @property
    def load(self) -> Load:
        return Load(len(self._running), self._waiting)

    def second(self, limit: int) -> None:
        self._running = [left - 1 for left in self._running]
        for _ in range(self._running.count(0)):
            self._tools += self._random.random() < 0.8  # else it has ended
        self._running = [left for left in self._running if left]
        back = sum(self._random.random() < 0.5 for _ in range(self._tools))
        self._tools -= back
        self._waiting += back
        self._waiting += max(0, limit - self.active)
        while self._waiting and len(self._running) < self.slots:
            self._waiting -= 1
            self._running.append(self._random.randint(1, 5))


def history(decision: AdaptiveConcurrency, server: Server, seconds: int) -> list[tuple[int, Load]]:
    seen: list[tuple[int, Load]] = []
    for _ in range(seconds):
        server.second(decision.limit)
        seen.append((decision.decide([server.load], server.active), server.load))
    return seen


@pytest.mark.parametrize("slots", [1, 8, 64, 200])
def test_a_full_server_is_kept_busy_and_its_queue_short(slots: int) -> None:
    seen = history(AdaptiveConcurrency(1000), Server(slots), 1000)[700:]
    assert sum(load.running for _, load in seen) / len(seen) > 0.93 * slots
    assert sum(load.waiting for _, load in seen) / len(seen) < 0.5 * slots + 2, "without it, hundreds would wait"


@pytest.mark.parametrize("slots", [8, 64, 200])
def test_the_limit_settles(slots: int) -> None:
    limits = [limit for limit, _ in history(AdaptiveConcurrency(1000), Server(slots), 600)][300:]
    assert max(limits) - min(limits) <= 0.5 * sum(limits) / len(limits) + 2, (min(limits), max(limits))


def test_a_server_with_room_gets_the_ceiling_within_seconds() -> None:
    limits = [limit for limit, _ in history(AdaptiveConcurrency(256), Server(1000), 20)]
    assert limits.index(256) < 8
    assert {*limits[8:]} == {256}


def test_a_server_that_loses_its_slots_and_gets_them_back_is_followed() -> None:
    decision, server = AdaptiveConcurrency(1000), Server(100)
    at_first = history(decision, server, 300)[-1][0]
    server.slots = 10
    lowered = history(decision, server, 300)[-1][0]
    server.slots = 100
    again = history(decision, server, 300)[-1][0]
    assert lowered < 30 < 90 < again
    assert abs(at_first - again) < 0.3 * again


def test_servers_that_say_nothing_limit_nothing() -> None:
    decision = AdaptiveConcurrency(256)
    for _ in range(10):
        decision.decide([], decision.limit)
    assert decision.limit == 256


def test_a_paused_server_is_one_cut_and_not_the_end() -> None:
    decision = AdaptiveConcurrency(64)
    for _ in range(100):
        decision.decide([Load(0, 32)], 32)  # nothing ends while it loads new weights
    assert decision.limit == 16


def test_a_nearly_full_cache_keeps_the_limit() -> None:
    decision = AdaptiveConcurrency(256)
    assert decision.decide([Load(32, 0, 0.95), Load(0, 0)], 32) == 32
    assert decision.decide([Load(32, 0, 0.5), Load(0, 0)], 32) == 64


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    decision = AdaptiveConcurrency(256)
    assert [decision.decide([Load(3, 0)], 3) for _ in range(5)] == [32] * 5


LOADS = st.lists(st.builds(Load, st.integers(0, 500), st.integers(0, 500), st.floats(0, 1)), max_size=4)


@given(st.integers(1, 300), st.lists(st.tuples(LOADS, st.integers(0, 400)), max_size=50))
def test_the_limit_is_never_below_one_or_above_the_ceiling(ceiling: int, seen: list[tuple[list[Load], int]]) -> None:
    decision = AdaptiveConcurrency(ceiling)
    for loads, active in seen:
        assert 1 <= decision.decide(loads, active) <= ceiling


# The gate -------------------------------------------------------------------------------------------------------------


async def test_a_gate_lets_in_what_its_limit_says_whatever_changes() -> None:
    rng, gate, inside, entered = random.Random(0), Gate(4), 0, 0

    async def visitor() -> None:
        nonlocal inside, entered
        await gate.enter()
        inside, entered = inside + 1, entered + 1
        try:
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
        finally:
            inside -= 1
            gate.leave()

    async with asyncio.TaskGroup() as visitors:
        tasks = [visitors.create_task(visitor()) for _ in range(500)]
        while not all(task.done() for task in tasks):
            before, then = inside, entered
            gate.resize(rng.randint(1, 8))
            await asyncio.sleep(0)
            assert inside <= max(before, gate.limit)
            assert then == entered or inside <= gate.limit
            if not rng.randrange(20) and not tasks[-1].done():
                tasks.pop(rng.randrange(len(tasks))).cancel()
    gate.resize(3)
    async with asyncio.timeout(5):
        for _ in range(3):
            await gate.enter()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await gate.enter()
