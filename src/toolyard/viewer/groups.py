"""Groups of samples: which tasks are all 0, all 1 or mixed, and which were solved or broken between two selections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from toolyard.viewer.protocol import Group, GroupKind, TaskChange

SOLVED = 0.999
"""A score from which a task counts as solved, as both viewers color it."""


class Sample(NamedTuple):
    """A row of the index that is not damaged, as far as groups are concerned."""

    step: int
    run: str
    group_id: int
    task: str
    number: int
    score: float | None
    failed: bool


def groups_of(samples: Iterable[Sample]) -> Iterator[Group]:
    """`samples`: those of one group must follow each other."""
    for (step, run, group_id, task), found in groupby(samples, lambda one: one[:4]):
        members = list(found)
        scores = tuple(one.score for one in members)
        known = [score for score in scores if score is not None]
        mean, std = _mean(known), _std(known)
        yield Group(
            step,
            run,
            group_id,
            task,
            _kind(known),
            tuple(one.number for one in members),
            scores,
            mean,
            std,
            tuple(_advantage(score, mean, std) for score in scores),
            sum(one.failed for one in members),
        )


def changes_between(before: Iterable[Sample], after: Iterable[Sample]) -> list[TaskChange]:
    """By task, the largest loss first; tasks without two means come last."""
    tasks: dict[tuple[int, str], tuple[list[Sample], list[Sample]]] = {}
    for side, samples in enumerate((before, after)):
        for one in samples:
            tasks.setdefault((one.group_id, one.task), ([], []))[side].append(one)
    found = [_change(group_id, task, *sides) for (group_id, task), sides in tasks.items()]
    return sorted(found, key=lambda one: (one.change is None, one.change or 0.0))


def _change(group_id: int, task: str, before: list[Sample], after: list[Sample]) -> TaskChange:
    known = [[one.score for one in side if one.score is not None] for side in (before, after)]
    means = _mean(known[0]), _mean(known[1])
    number = (after or before)[0].number
    return TaskChange(group_id, task, _what_changed(*known), *means, len(before), len(after), number)


def _what_changed(before: Sequence[float], after: Sequence[float]) -> str:
    if not before or not after:
        return "new" if after else "gone"
    was, is_now = max(before) >= SOLVED, max(after) >= SOLVED
    if was != is_now:
        return "solved" if is_now else "broken"
    change = sum(after) / len(after) - sum(before) / len(before)
    return "same" if abs(change) < 1e-9 else "better" if change > 0 else "worse"


def _kind(scores: Sequence[float]) -> GroupKind:
    different = set(scores)
    if not different:
        return GroupKind.UNSCORED
    if len(different) > 1:
        return GroupKind.MIXED
    return {0.0: GroupKind.ALL_0, 1.0: GroupKind.ALL_1}.get(different.pop(), GroupKind.EQUAL)


def _mean(scores: Sequence[float]) -> float | None:
    return math.fsum(score / len(scores) for score in scores) if scores else None


def _std(scores: Sequence[float]) -> float | None:
    mean = _mean(scores)
    if mean is None or len(scores) < 2:
        return None
    return math.hypot(*(score - mean for score in scores)) / math.sqrt(len(scores) - 1)


def _advantage(score: float | None, mean: float | None, std: float | None) -> float | None:
    if score is None or mean is None or std is None:
        return None
    return (score - mean) / std if std else 0.0
