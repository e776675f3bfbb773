"""Waiting times: exact to a factor of 1.19, and the same whether added in one process or added up over many."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.limits.waits import WaitHistogram

FACTOR = 1.19
waits = st.floats(1e-6, 1e6)


def histogram_of(seconds: list[float], immediate: int = 0) -> WaitHistogram:
    histogram = WaitHistogram()
    histogram.immediate = immediate
    for wait in seconds:
        histogram.add(wait)
    return histogram


def exact(seconds: list[float], share: float) -> float:
    """The shortest wait that `share` of all are not longer than."""
    ordered = sorted(seconds)
    return next(wait for count, wait in enumerate(ordered, 1) if count >= share * len(ordered))


@given(st.lists(waits, min_size=1, max_size=200), st.integers(0, 200))
def test_percentiles_are_never_too_low_and_at_most_a_factor_too_high(seconds: list[float], immediate: int):
    summary = histogram_of(seconds, immediate).summary()
    everything = [0.0] * immediate + seconds
    assert summary.count == len(everything)
    assert summary.max == max(everything)
    for share, told in ((0.5, summary.p50), (0.9, summary.p90), (0.99, summary.p99)):
        true = exact(everything, share)
        assert true * (1 - 1e-9) <= told <= true * FACTOR


@given(st.lists(st.floats(0.0, 1e9), max_size=100), st.integers(0, 100))
def test_percentiles_are_in_order_and_never_above_the_longest(seconds: list[float], immediate: int):
    summary = histogram_of(seconds, immediate).summary()
    assert 0.0 <= summary.p50 <= summary.p90 <= summary.p99 <= summary.max


@given(st.lists(st.tuples(st.lists(st.floats(0.0, 1e6)), st.integers(0, 50)), max_size=6))
def test_merging_what_processes_counted_equals_counting_it_in_one(processes: list[tuple[list[float], int]]):
    merged = WaitHistogram()
    for seconds, immediate in processes:
        part = histogram_of(seconds, immediate)
        # As it travels: keys of a JSON object would be strings.
        counts = json.loads(json.dumps(list(part.counts.items())))
        merged.merge(dict(counts), part.immediate, part.longest)
    together = histogram_of([wait for seconds, _ in processes for wait in seconds], sum(n for _, n in processes))
    assert merged.counts == together.counts
    assert merged.summary() == together.summary()


def test_merging_leaves_the_merged_one_as_it_was():
    part, whole = histogram_of([1.0, 2.0]), histogram_of([1.0])
    before = dict(part.counts)
    whole.merge(part.counts, part.immediate, part.longest)
    whole.add(1.0)
    assert part.counts == before
    assert whole.summary().count == 4


def test_of_nobody_who_waited_everything_is_zero():
    summary = WaitHistogram().summary()
    assert (summary.count, summary.p50, summary.p90, summary.p99, summary.max) == (0, 0.0, 0.0, 0.0, 0.0)


def test_who_started_at_once_counts_as_zero():
    summary = histogram_of([5.0] * 10, immediate=90).summary()
    assert (summary.count, summary.p50, summary.p90, summary.max) == (100, 0.0, 0.0, 5.0)
    assert summary.p99 == 5.0


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1e-6])
def test_waits_too_short_to_tell_apart_are_no_longer_than_a_microsecond(seconds: float):
    assert histogram_of([seconds]).summary().p50 <= 1e-6


def test_a_year_of_every_length_of_wait_fits_into_a_few_hundred_counters():
    histogram = histogram_of([1.001**n * 1e-6 for n in range(31_000)])
    assert histogram.summary().max > 365 * 86400 * 0.8
    assert len(histogram.counts) < 300
