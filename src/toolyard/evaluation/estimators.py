"""Estimates over tasks: pass@k, bootstrap intervals and a paired test. Plain Python; the same seed, the same numbers.

Tasks are what is drawn at random, not samples: the samples of a task resemble each other, and treating them as
independent would make intervals too narrow.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
_EXACT_UP_TO = 12
"""With fewer tasks that differ, all sign flips are tried: at most 4096."""
_MOST_FLIPS, _FEWEST_FLIPS = 10_000, 1_000
_FLIP_WORK = 20_000_000
_MOST_RESAMPLES, _FEWEST_RESAMPLES = 2_000, 1_000
_RESAMPLE_WORK = 5_000_000
"""Roughly a second. More tasks get fewer resamples, whose noise matters less to their narrower intervals."""


class Interval(NamedTuple):
    low: float
    high: float


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """The probability that at least one of `k` samples solves the task: 1 - C(n - c, k) / C(n, k), without bias, for
    `solved` = c of `samples` = n.

    Raises:
        ValueError: fewer samples than `k`, or more solved than samples.
    """
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {solved} solved: expected 1 <= k <= samples >= solved >= 0")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def resamples_for(tasks: int) -> int:
    """How many resamples are affordable."""
    return max(_FEWEST_RESAMPLES, min(_MOST_RESAMPLES, _RESAMPLE_WORK // max(1, tasks)))


def bootstrap(tasks: Sequence[tuple[float | None, ...]], *, resamples: int, seed: str) -> list[Interval | None]:
    """Percentile intervals of the mean of each column, with tasks resampled.

    Args:
        tasks: A row of numbers per task; None where the task has no value. Columns share their resamples.

    Returns:
        An interval per column; None if fewer than two tasks have a value, since one task says nothing about others.
    """
    if not tasks:
        return []
    # Most tasks have one of a few rows, such as the nine of eight samples that are right or wrong.
    number_of = {row: number for number, row in enumerate(dict.fromkeys(tasks))}
    rows, numbers = list(number_of), [number_of[row] for row in tasks]
    columns = [
        [(index, value) for index, row in enumerate(rows) if (value := row[at]) is not None]
        for at in range(len(rows[0]))
    ]
    chance = random.Random(seed)  # noqa: S311
    means: list[list[float]] = [[] for _ in columns]
    for _ in range(resamples):
        drawn = Counter(chance.choices(numbers, k=len(numbers)))
        for column, found in zip(columns, means, strict=True):
            count = total = 0.0
            for index, value in column:
                times = drawn[index]
                count += times
                total += times * value
            if count:
                found.append(total / count)
    known = [sum(row[at] is not None for row in tasks) for at in range(len(columns))]
    return [_interval(found) if many > 1 and found else None for found, many in zip(means, known, strict=True)]


def _interval(means: list[float]) -> Interval:
    means.sort()
    tail = (1.0 - CONFIDENCE) / 2
    return Interval(_quantile(means, tail), _quantile(means, 1.0 - tail))


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def sign_flip_p(differences: Sequence[float], *, seed: str) -> float | None:
    """The two-sided p-value of a paired permutation test: how often the mean difference would be at least as large if
    the two values of each task were swapped by a coin. Exact for few tasks. None without differences at all.
    """
    if not differences:
        return None
    sizes = Counter(abs(difference) for difference in differences if difference)
    seen = abs(math.fsum(differences))
    # Sums in another order differ in their last bits.
    enough = seen - 1e-9 * max(1.0, math.fsum(size * count for size, count in sizes.items()))
    if sizes.total() <= _EXACT_UP_TO:
        signed = [(size, -size) for size in sizes.elements()]
        sums = [abs(math.fsum(signs)) for signs in itertools.product(*signed)]
        return sum(one >= enough for one in sums) / len(sums)
    chance = random.Random(seed)  # noqa: S311
    flips = max(_FEWEST_FLIPS, min(_MOST_FLIPS, _FLIP_WORK // len(sizes)))
    groups = list(sizes.items())
    extreme = 0
    for _ in range(flips):
        # Tasks with the same difference are flipped together: the ones among `count` random bits are the heads.
        total = sum(size * (2 * chance.getrandbits(count).bit_count() - count) for size, count in groups)
        extreme += abs(total) >= enough
    return (extreme + 1) / (flips + 1)  # the observed assignment is one of them, so p is never 0
