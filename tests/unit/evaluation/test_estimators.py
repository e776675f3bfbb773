"""The estimates agree with brute force, and with what is known in closed form."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from toolyard.evaluation.estimators import bootstrap, pass_at_k, resamples_for, sign_flip_p


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_draws_that_contain_a_solution(samples: int) -> None:
    for solved in range(samples + 1):
        outcomes = [True] * solved + [False] * (samples - solved)
        for k in range(1, samples + 1):
            draws = [any(draw) for draw in itertools.combinations(outcomes, k)]
            assert pass_at_k(samples, solved, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_has_no_bias_where_the_plain_estimate_has_one() -> None:
    rate, k, samples, chance = 0.3, 4, 8, random.Random(0)
    counts = [sum(chance.random() < rate for _ in range(samples)) for _ in range(20_000)]
    truth = 1 - (1 - rate) ** k
    found = statistics.fmean(pass_at_k(samples, solved, k) for solved in counts)
    plain = statistics.fmean(1 - (1 - solved / samples) ** k for solved in counts)
    assert found == pytest.approx(truth, abs=0.008)
    assert abs(plain - truth) > 0.03


def test_pass_at_k_stays_exact_with_thousands_of_samples() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("samples", "solved", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (0, 0, 1), (4, -1, 1)])
def test_pass_at_k_of_nonsense_is_an_error(samples: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, solved, k)


def test_the_interval_of_a_mean_is_about_that_of_the_normal_distribution() -> None:
    chance = random.Random(1)
    values = [(chance.gauss(10, 2),) for _ in range(400)]
    [interval] = bootstrap(values, resamples=1000, seed="0")
    assert interval is not None
    center, half = statistics.fmean(v for (v,) in values), 1.96 * statistics.stdev(v for (v,) in values) / 20
    assert interval.low == pytest.approx(center - half, abs=0.03)
    assert interval.high == pytest.approx(center + half, abs=0.03)


def test_intervals_contain_the_truth_about_as_often_as_they_say() -> None:
    chance, hits = random.Random(2), 0
    for attempt in range(200):
        values = [(float(chance.random() < 0.4),) for _ in range(60)]
        [interval] = bootstrap(values, resamples=100, seed=str(attempt))
        assert interval is not None
        hits += interval.low <= 0.4 <= interval.high
    assert 180 <= hits <= 199  # 95 % of 200 is 190


def test_the_same_seed_gives_the_same_interval_and_another_seed_another_one() -> None:
    values = [(float(number % 7),) for number in range(50)]
    assert bootstrap(values, resamples=200, seed="a") == bootstrap(values, resamples=200, seed="a")
    assert bootstrap(values, resamples=200, seed="a") != bootstrap(values, resamples=200, seed="b")


def test_columns_ignore_the_tasks_without_a_value() -> None:
    known = [(1.0, 2.0), (0.0, 4.0), (1.0, 3.0)] * 10
    gaps = [*known, *([(None, 2.0)] * 5)]
    [first, second] = bootstrap(gaps, resamples=500, seed="0")
    assert first is not None
    assert second is not None
    assert 0 <= first.low <= 2 / 3 <= first.high <= 1
    assert 2.0 <= second.low <= second.high <= 4.0


@pytest.mark.parametrize("tasks", [[], [(1.0,)], [(1.0,), (None,)], [(None,), (None,)]])
def test_one_task_has_no_interval(tasks: list[tuple[float | None, ...]]) -> None:
    assert [found for found in bootstrap(tasks, resamples=100, seed="0") if found is not None] == []


def test_many_tasks_get_fewer_resamples() -> None:
    assert resamples_for(0) == resamples_for(60) == 2000
    assert resamples_for(100_000) == 1000


def test_p_of_a_few_tasks_is_exact() -> None:
    # All eight signs of (1, 2, 3): a sum of at least 6 in size happens twice.
    assert sign_flip_p([1.0, 2.0, 3.0], seed="0") == pytest.approx(2 / 8)
    assert sign_flip_p([1.0, -2.0, 3.0], seed="0") == pytest.approx(6 / 8)
    assert sign_flip_p([0.0, 0.0], seed="0") == 1.0
    assert sign_flip_p([], seed="0") is None


def test_tasks_without_a_difference_do_not_change_p() -> None:
    assert sign_flip_p([1.0, 2.0, 3.0, *[0.0] * 1000], seed="0") == sign_flip_p([1.0, 2.0, 3.0], seed="0")


def test_p_of_many_tasks_is_about_that_of_the_sign_test() -> None:
    differences = [1.0] * 60 + [-1.0] * 40
    tail = sum(math.comb(100, heads) for heads in range(60, 101)) / 2**100
    found = sign_flip_p(differences, seed="0")
    assert found == pytest.approx(2 * tail, abs=0.01)


def test_p_is_uniform_if_nothing_differs() -> None:
    chance = random.Random(3)
    found = [sign_flip_p([chance.gauss(0, 1) for _ in range(9)], seed=str(one)) for one in range(200)]
    below = sum(p is not None and p <= 0.2 for p in found)
    assert 20 <= below <= 60  # 20 % of 200 is 40


def test_p_is_never_0() -> None:
    found = sign_flip_p([1.0] * 200, seed="0")
    assert found is not None
    assert 0 < found < 0.001
