"""The token bucket: never more starts than allowed, and never a longer wait than announced."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.errors import ConfigError
from toolyard.limits.rate import TokenBucket

TOLERANCE = 1e-6
"""For the sums of the test itself."""

rates = st.floats(0.01, 1e4)
bursts = st.none() | st.just(1.0) | st.floats(1.0, 50.0)
times = st.floats(0.0, 1e5)
steps = st.lists(st.floats(0.0, 3.0) | st.floats(0.999, 1.0), max_size=100)
"""In units of what one token takes: just before it is whole is where it matters."""


def taken(bucket: TokenBucket, now: float, tries: int = 1000) -> int:
    return sum(bucket.take(now) for _ in range(tries))


def test_it_starts_full_and_then_gives_its_rate():
    bucket = TokenBucket(10.0, 5.0)
    assert [taken(bucket, now) for now in (0.0, 0.05, 0.1, 0.5, 100.0)] == [5, 0, 1, 4, 5]


@pytest.mark.parametrize(("rate", "burst"), [(10.0, 10), (0.2, 1)])
def test_without_a_burst_one_second_may_start_at_once_but_at_least_one(rate: float, burst: int):
    assert taken(TokenBucket(rate), 0.0) == burst


def test_a_bucket_made_late_does_not_count_the_time_before():
    bucket = TokenBucket(1.0, 3.0, now=1000.0)
    assert [taken(bucket, 1000.0), taken(bucket, 1001.0)] == [3, 1]


def test_delay_is_zero_while_there_are_tokens_and_costs_none():
    bucket = TokenBucket(1.0, 2.0)
    assert [bucket.delay(0.0) for _ in range(5)] == [0.0] * 5
    assert taken(bucket, 0.0) == 2
    assert bucket.delay(0.25) == pytest.approx(0.75)


def test_a_punctual_caller_is_not_sent_away_by_rounding():
    bucket, now = TokenBucket(3.0, 1.0), 0.0
    for _ in range(10_000):
        assert bucket.take(now)
        now += bucket.delay(now)
    assert now == pytest.approx(10_000 / 3)


def test_a_caller_that_is_always_a_trifle_early_gains_nothing():
    bucket, period = TokenBucket(1.0, 1.0), 1 - 5e-10
    starts = [number * period for number in range(10_000) if bucket.take(number * period)]
    assert len(starts) <= 1 + starts[-1] + 1e-8


class TestClock:
    def test_a_clock_that_goes_back_and_forth_mints_nothing(self):
        bucket = TokenBucket(1.0, 5.0, now=10.0)
        assert taken(bucket, 10.0) == 5
        assert [taken(bucket, now) for now in (5.0, 10.0, 0.0, 10.0, 11.0)] == [0, 0, 0, 0, 1]

    def test_a_clock_that_went_back_takes_away_nothing(self):
        assert taken(TokenBucket(1.0, 5.0, now=10.0), 0.0) == 5

    def test_delay_counts_the_way_back_to_where_the_clock_was(self):
        bucket = TokenBucket(1.0, 1.0, now=10.0)
        assert bucket.take(10.0)
        assert bucket.delay(4.0) == pytest.approx(7.0)
        assert not bucket.take(10.9)
        assert bucket.take(11.0)


class TestConfigure:
    def test_the_tokens_that_are_there_stay(self):
        bucket = TokenBucket(10.0, 10.0)
        assert taken(bucket, 0.0, tries=7) == 7
        bucket.configure(0.0, 1.0, 20.0)
        assert [taken(bucket, 0.0), taken(bucket, 2.0)] == [3, 2]

    def test_a_smaller_burst_holds_fewer(self):
        bucket = TokenBucket(10.0, 10.0)
        bucket.configure(0.0, 10.0, 2.0)
        assert taken(bucket, 0.0) == 2

    def test_the_time_before_counts_at_the_old_rate(self):
        bucket = TokenBucket(1.0, 100.0)
        assert taken(bucket, 0.0) == 100
        bucket.configure(5.0, 50.0, 100.0)
        assert [taken(bucket, 5.0), taken(bucket, 6.0)] == [5, 50]

    def test_a_wrong_value_changes_nothing(self):
        bucket = TokenBucket(1.0, 2.0)
        with pytest.raises(ConfigError):
            bucket.configure(0.0, 5.0, 0.5)
        assert (bucket.rate, bucket.burst) == (1.0, 2.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_no_rate_is_named(rate: float):
    with pytest.raises(ConfigError, match=f"rate: {rate} starts per second"):
        TokenBucket(rate)


@pytest.mark.parametrize("burst", [0.0, 0.99, -1.0, math.nan])
def test_a_burst_that_lets_nobody_start_is_named(burst: float):
    with pytest.raises(ConfigError, match=f"burst: {burst} starts at once"):
        TokenBucket(1.0, burst)


@given(rates, bursts, times, steps, st.integers(1, 5))
def test_no_window_has_more_starts_than_burst_and_rate_allow(
    rate: float, burst: float | None, begin: float, passing: list[float], tries: int
):
    bucket, now = TokenBucket(rate, burst, begin), begin
    starts: list[float] = []
    for passed in passing:
        now += passed / rate
        starts += [now] * taken(bucket, now, tries)
    # The window that ends here and is fullest began where the starts were furthest behind the rate.
    lowest = math.inf
    for number, start in enumerate(starts):
        surplus = number - rate * (start - begin)
        lowest = min(lowest, surplus)
        assert surplus - lowest + 1 <= bucket.burst + TOLERANCE


@given(rates, bursts, st.lists(st.floats(0.0, 100.0), min_size=1, max_size=100))
def test_no_order_of_times_yields_more_than_the_latest_one_allows(
    rate: float, burst: float | None, moments: list[float]
):
    bucket = TokenBucket(rate, burst)
    starts = sum(bucket.take(now) for now in moments)
    assert starts <= bucket.burst + rate * max(moments) + TOLERANCE


@given(rates, bursts, times, steps)
def test_whoever_waits_as_long_as_told_may_start(rate: float, burst: float | None, begin: float, passing: list[float]):
    bucket, now = TokenBucket(rate, burst, begin), begin
    for passed in passing:
        now += passed / rate
        told = bucket.delay(now)
        assert 0.0 <= told <= 1 / rate + TOLERANCE
        assert bucket.take(now) == (told == 0.0)
        if told > 0.0:
            now += told + 1e-9
            assert bucket.take(now)


@given(rates, st.lists(st.floats(0.0, 10.0), min_size=2, max_size=50))
def test_waiting_brings_the_start_closer(rate: float, passing: list[float]):
    bucket, now = TokenBucket(rate, 1.0), 0.0
    assert bucket.take(now)
    told = [bucket.delay(now := now + passed) for passed in passing]
    assert all(later <= earlier for earlier, later in pairwise(told))
