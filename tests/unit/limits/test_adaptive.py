"""The adaptive limit: down to what the service carries, back up in seconds, and no collapse in between."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.errors import ConfigError
from toolyard.limits.adaptive import MAX_PAUSE_SECONDS, AdaptiveLimit


def cut_to(limit: int, *, ceiling: int = 128, now: float = 0.0) -> AdaptiveLimit:
    adaptive = AdaptiveLimit(ceiling)
    adaptive.refused(now, limit + 1)
    assert adaptive.limit == limit
    return adaptive


class TestRefusals:
    def test_a_refusal_sets_the_limit_to_one_less_than_was_in_flight(self):
        adaptive = AdaptiveLimit(128)
        adaptive.refused(0.0, 61)
        assert adaptive.limit == 60

    def test_a_refusal_never_raises_the_limit(self):
        adaptive = cut_to(30)
        adaptive.refused(0.1, 100)
        assert adaptive.limit == 30

    @pytest.mark.parametrize("unavailable", [False, True])
    def test_a_service_that_refuses_even_one_is_still_asked(self, unavailable: bool):
        adaptive = AdaptiveLimit(128)
        for now in range(100):
            adaptive.refused(now, 1, unavailable=unavailable)
            assert adaptive.limit == 1

    def test_refusals_at_once_end_at_what_the_service_carries(self):
        adaptive = AdaptiveLimit(100)
        for in_flight in range(100, 60, -1):
            adaptive.refused(0.0, in_flight)
        assert adaptive.limit == 60

    @pytest.mark.parametrize("unavailable", [False, True])
    def test_a_storm_that_refuses_everything_at_once_costs_only_half(self, unavailable: bool):
        adaptive = AdaptiveLimit(100)
        for in_flight in range(100, 0, -1):
            adaptive.refused(0.0, in_flight, unavailable=unavailable)
        assert adaptive.limit == 50
        assert adaptive.advance(4.0) >= 60

    def test_an_unavailable_service_halves_the_limit(self):
        adaptive = AdaptiveLimit(128)
        adaptive.refused(0.0, 100, unavailable=True)
        assert adaptive.limit == 64

    def test_an_unavailable_service_cuts_to_less_than_was_in_flight_if_that_is_lower_than_half(self):
        adaptive = AdaptiveLimit(128)
        adaptive.refused(0.0, 10, unavailable=True)
        assert adaptive.limit == 9

    def test_an_unavailable_service_halves_again_in_the_next_second(self):
        adaptive = AdaptiveLimit(128)
        limits: list[int] = []
        for now in range(8):
            adaptive.refused(now, adaptive.limit, unavailable=True)
            limits.append(adaptive.limit)
        assert limits == [64, 32, 16, 8, 4, 2, 1, 1]

    def test_late_refusals_do_not_cut_a_limit_that_was_not_tried_yet(self):
        adaptive = AdaptiveLimit(128)
        for now, in_flight in enumerate(range(128, 64, -1)):  # one a second: older than any round
            adaptive.refused(now, in_flight, unavailable=True)
            assert adaptive.limit == 64

    def test_unavailable_after_a_refusal_of_the_same_round_takes_half_in_all(self):
        adaptive = AdaptiveLimit(100)
        adaptive.refused(0.0, 100)
        adaptive.refused(0.0, 99, unavailable=True)
        assert adaptive.limit == 50

    @pytest.mark.parametrize("unavailable", [False, True])
    @pytest.mark.parametrize("capacity", [0, 1, 10, 33, 63])
    def test_a_service_that_refuses_at_once_and_for_good_is_not_hammered(self, capacity: int, unavailable: bool):
        """Time stands still. Executions above the capacity are refused, and replaced at once if one may start."""
        adaptive = AdaptiveLimit(128)
        in_flight, refusals = 128, 0
        while in_flight > max(1, capacity):
            adaptive.refused(0.0, in_flight, unavailable=unavailable)
            in_flight = max(in_flight - 1, adaptive.limit)
            refusals += 1
            assert refusals <= 2 * 128
        assert max(1, capacity // 2) <= adaptive.limit <= max(1, capacity)


class TestGrowth:
    def test_it_grows_by_one_then_two_then_four_a_second(self):
        adaptive = cut_to(30)
        assert [adaptive.advance(now) for now in (0.99, 1, 2, 3, 4, 5, 6, 7)] == [30, 31, 33, 37, 45, 61, 93, 128]

    def test_seconds_passed_in_one_go_count_the_same(self):
        assert cut_to(30).advance(5.5) == 61

    def test_a_refusal_starts_the_steps_anew(self):
        adaptive = cut_to(30)
        adaptive.advance(5.0)
        adaptive.refused(5.5, 61)
        assert [adaptive.advance(now) for now in (6.4, 6.5, 7.5)] == [60, 61, 63]

    def test_a_pause_does_not_count_as_success(self):
        adaptive = AdaptiveLimit(128)
        adaptive.refused(0.0, 31, retry_after=10.0)
        assert [adaptive.advance(now) for now in (10.9, 11, 12)] == [30, 31, 33]

    def test_an_hour_of_silence_leads_to_the_ceiling_and_not_above(self):
        assert cut_to(1).advance(3600.0) == 128


class TestPauses:
    def test_retry_after_pauses_and_is_never_shortened(self):
        adaptive = AdaptiveLimit(128)
        assert adaptive.paused_until == 0.0
        adaptive.refused(100.0, 10, retry_after=5.0)
        adaptive.refused(101.0, 10, retry_after=1.0)
        adaptive.refused(102.0, 10)
        assert adaptive.paused_until == 105.0

    @pytest.mark.parametrize("senseless", [math.nan, math.inf, -math.inf, -1.0])
    def test_a_senseless_retry_after_is_a_refusal_without_a_pause(self, senseless: float):
        adaptive = AdaptiveLimit(128)
        adaptive.refused(100.0, 10, retry_after=senseless)
        assert adaptive.limit == 9
        assert adaptive.paused_until <= 100.0

    def test_nobody_is_paused_for_more_than_five_minutes(self):
        adaptive = AdaptiveLimit(128)
        adaptive.refused(100.0, 10, retry_after=86400.0)
        assert adaptive.paused_until == 100.0 + MAX_PAUSE_SECONDS == 400.0


class TestNextChange:
    def test_nothing_changes_by_itself_before_the_first_refusal(self):
        assert AdaptiveLimit(128).next_change(5.0) == math.inf

    def test_the_end_of_a_pause_comes_before_the_next_growth(self):
        adaptive = AdaptiveLimit(128)
        adaptive.refused(0.0, 31, retry_after=10.0)
        assert adaptive.next_change(0.0) == 10.0
        assert adaptive.next_change(10.0) == 11.0

    def test_growth_that_is_due_is_due_now(self):
        assert cut_to(30).next_change(7.0) == 7.0

    def test_a_caller_that_wakes_only_then_misses_no_step(self):
        adaptive, now, limits = cut_to(30), 0.0, [30]
        while (now := adaptive.next_change(now)) < math.inf:
            limits.append(adaptive.advance(now))
        assert limits == [30, 31, 33, 37, 45, 61, 93, 128]


class TestResize:
    def test_a_limit_at_the_ceiling_follows_it_both_ways(self):
        adaptive = AdaptiveLimit(128)
        for ceiling in (64, 256, 1):
            adaptive.resize(ceiling)
            assert (adaptive.limit, adaptive.ceiling) == (ceiling, ceiling)

    def test_a_limit_that_was_cut_stays_where_it_is_and_grows_to_the_new_ceiling(self):
        adaptive = cut_to(30)
        adaptive.resize(256)
        assert adaptive.limit == 30
        assert adaptive.advance(60.0) == 256

    def test_a_limit_that_was_cut_is_clamped_to_a_lower_ceiling(self):
        adaptive = cut_to(30)
        adaptive.resize(20)
        assert adaptive.advance(60.0) == 20

    def test_a_ceiling_below_one_is_refused_and_changes_nothing(self):
        with pytest.raises(ConfigError, match="0 executions"):
            AdaptiveLimit(0)
        adaptive = AdaptiveLimit(8)
        with pytest.raises(ConfigError, match="-3 executions"):
            adaptive.resize(-3)
        assert (adaptive.limit, adaptive.ceiling) == (8, 8)


# Any sequence of events -----------------------------------------------------------------------------------------------

pauses = st.none() | st.floats()
seconds = st.floats(0.0, 20.0)
events = st.one_of(
    st.tuples(st.just("refused"), seconds, st.integers(0, 300), pauses, st.booleans()),
    st.tuples(st.just("advance"), seconds),
    st.tuples(st.just("resize"), seconds, st.integers(1, 300)),
)


@given(st.integers(1, 300), st.lists(events, max_size=60))
def test_the_limit_stays_between_one_and_the_ceiling_and_no_pause_is_shortened(ceiling: int, happening: list[tuple]):
    adaptive, now, paused_until = AdaptiveLimit(ceiling), 0.0, 0.0
    for kind, passed, *details in happening:
        now += passed
        before = adaptive.limit
        due = adaptive.next_change(now)
        if kind == "refused":
            in_flight, retry_after, unavailable = details
            adaptive.refused(now, in_flight, retry_after=retry_after, unavailable=unavailable)
            assert adaptive.limit <= before
        elif kind == "advance":
            assert adaptive.advance(now) == adaptive.limit >= before
            assert adaptive.limit == before or due == now
        else:
            adaptive.resize(*details)
        assert 1 <= adaptive.limit <= adaptive.ceiling
        assert paused_until <= adaptive.paused_until <= now + MAX_PAUSE_SECONDS
        assert adaptive.next_change(now) >= now
        paused_until = adaptive.paused_until


# Against a service, in virtual time -----------------------------------------------------------------------------------

PHASES = ((0.0, 60), (40.0, 30), (80.0, 100))
"""What the service carries, and from when on."""
END = 120.0
CEILING = 128
JOURNEY = 0.01
"""Seconds to the service, and as much back: refusals are old news."""
MEAN_SECONDS = 0.5
SERVICE_TIMES: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda rng: rng.expovariate(1 / MEAN_SECONDS),
    "heavy-tailed": lambda rng: rng.paretovariate(1.5) * MEAN_SECONDS / 3,  # infinite variance
}


def capacity(now: float) -> int:
    return PHASES[bisect_right(PHASES, now, key=lambda phase: phase[0]) - 1][1]


class Simulation:
    """Endless work, one limiter, one service that refuses what it has no room for. A refused job is tried again."""

    def __init__(self, service_time: Callable[[random.Random], float], seed: int):
        self.adaptive = AdaptiveLimit(CEILING)
        self.service_time = service_time
        self.rng = random.Random(seed)
        self.done = self.refused = self.in_flight = self.running = self.highest = 0
        self.recovered = math.inf
        """When, after the last phase began, the service was full first."""
        self.again: deque[float] = deque()
        self.agenda: list[tuple[float, int, Callable[[float, float], None], float]] = []
        self.order = itertools.count()
        self.timer = math.inf

    def run(self) -> Simulation:
        self.pump(0.0)
        while self.agenda[0][0] < END:
            now, _, act, job = heapq.heappop(self.agenda)
            act(now, job)
        return self

    def at(self, when: float, act: Callable[[float, float], None], job: float = 0.0) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), act, job))

    def pump(self, now: float, _: float = 0.0) -> None:
        limit = self.adaptive.advance(now)
        self.highest = max(self.highest, limit)
        while self.in_flight < limit and now >= self.adaptive.paused_until:
            self.in_flight += 1
            job = self.again.popleft() if self.again else self.service_time(self.rng)
            self.at(now + JOURNEY, self.arrive, job)
        timer = self.adaptive.next_change(now)
        if timer != self.timer and timer < math.inf:
            self.timer = timer
            self.at(timer, self.pump)

    def arrive(self, now: float, job: float) -> None:
        if self.running >= capacity(now):
            self.at(now + JOURNEY, self.hear_of_refusal, job)
            return
        self.running += 1
        if now >= PHASES[-1][0] and self.running == capacity(now):
            self.recovered = min(self.recovered, now)
        self.at(now + job, self.finish, job)

    def finish(self, now: float, job: float) -> None:
        self.running -= 1
        self.at(now + JOURNEY, self.hear_of_success, job)

    def hear_of_refusal(self, now: float, job: float) -> None:
        self.refused += 1
        self.adaptive.refused(now, self.in_flight)
        self.in_flight -= 1
        self.again.append(job)
        self.pump(now)

    def hear_of_success(self, now: float, _: float) -> None:
        self.done += 1
        self.in_flight -= 1
        self.pump(now)


def ideal(service_time: Callable[[random.Random], float], seed: int) -> int:
    """The throughput of an oracle that knows the capacity at every moment, without network delay."""
    rng, now, done = random.Random(seed), 0.0, 0
    ends: list[float] = []
    changes = [when for when, _ in PHASES[1:]]
    while now < END:
        while len(ends) < capacity(now):
            heapq.heappush(ends, now + service_time(rng))
        if changes and changes[0] <= ends[0]:
            now = changes.pop(0)
        else:
            now = heapq.heappop(ends)
            done += now < END
    return done


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", SERVICE_TIMES)
def test_a_service_that_changes_is_used_nearly_fully_and_rarely_has_to_refuse(kind: str, seed: int):
    simulation = Simulation(SERVICE_TIMES[kind], seed).run()
    assert simulation.done >= 0.9 * ideal(SERVICE_TIMES[kind], seed)
    assert simulation.refused < 25 * simulation.done / 1000
    assert simulation.recovered - PHASES[-1][0] < 10.0
    assert simulation.highest <= CEILING
