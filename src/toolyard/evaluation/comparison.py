"""Two runs compared, task by task: the difference, an interval for it, and a test whether it is more than chance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from toolyard.evaluation.estimators import Interval, bootstrap, mean, resamples_for, sign_flip_p
from toolyard.evaluation.results import (
    ALL,
    MEAN,
    Evaluation,
    Rules,
    TaskScores,
    by_task,
    chosen_ks,
    default_tags,
    divided,
    evaluate,
    in_order,
)
from toolyard.evaluation.runs import Run
from toolyard.evaluation.tags import TagsOf
from toolyard.viewer.protocol import Attempt


class Difference(NamedTuple):
    """Over the tasks for which both runs have a value."""

    before: float | None
    after: float | None
    difference: float | None
    """after - before."""
    interval: Interval | None
    """Paired: each task's difference is resampled."""
    p: float | None
    """Of a paired permutation test."""
    tasks: int
    better: int
    """Tasks whose value is higher after."""
    worse: int

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "interval": self.interval and list(self.interval)}


@dataclass(frozen=True, slots=True)
class ComparedSlice:
    value: str
    tasks: int
    """In both runs."""
    differences: Mapping[str, Difference]
    """`mean`, and `pass@k` for each k."""

    def as_json(self) -> dict[str, Any]:
        differences = {name: one.as_json() for name, one in self.differences.items()}
        return {"value": self.value, "tasks": self.tasks, **differences}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`."""

    before: Evaluation
    after: Evaluation
    only_before: int
    """Tasks that only this run has."""
    only_after: int
    whole: ComparedSlice
    by: Mapping[str, Sequence[ComparedSlice]]
    """By the name of the tag, the largest first; what is unknown comes last."""
    ks: tuple[int, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.before.notes, *self.after.notes)))

    def as_json(self) -> dict[str, Any]:
        return {
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "only_before": self.only_before,
            "only_after": self.only_after,
            "k": list(self.ks),
            ALL: self.whole.as_json(),
            "by": {tag: [one.as_json() for one in slices] for tag, slices in self.by.items()},
        }


def compare(
    before: Run, after: Run, rules: Rules | None = None, *, by: Mapping[str, TagsOf] | None = None
) -> Comparison:
    """Compare two runs over the tasks that both have, found by their ids. The arguments are those of `evaluate`.

    With tags, the attempts of both runs that have the same value are compared.

    Raises:
        ConfigError: see `evaluate`.
    """
    rules = rules or Rules()
    tags = default_tags(before, after) if by is None else by
    whole = _pair(before.attempts, after.attempts, rules.threshold)
    ks = _common_ks(whole, rules)
    resamples = rules.resamples or resamples_for(len(whole))

    def compared(value: str, pairs: Sequence[Pair], seed: str) -> ComparedSlice:
        values = [(earlier.values(ks), later.values(ks)) for earlier, later in pairs]
        return ComparedSlice(value, len(pairs), _differences(values, ks, resamples, seed))

    by_tag: dict[str, list[ComparedSlice]] = {}
    for name, found in tags.items():
        sides = divided(before.attempts, found), divided(after.attempts, found)
        slices = [
            compared(value, _pair(part, sides[1][value], rules.threshold), f"{rules.seed}/{name}/{value}")
            for value, part in sides[0].items()
            if value in sides[1]
        ]
        by_tag[name] = in_order([one for one in slices if one.tasks])
    return Comparison(
        evaluate(before, rules, by=tags),
        evaluate(after, rules, by=tags),
        len({attempt.task_key for attempt in before.attempts}) - len(whole),
        len({attempt.task_key for attempt in after.attempts}) - len(whole),
        compared(ALL, whole, f"{rules.seed}"),
        by_tag,
        ks,
    )


Pair = tuple[TaskScores, TaskScores]
"""A task before and after."""


def _pair(before: Iterable[Attempt], after: Iterable[Attempt], threshold: float) -> list[Pair]:
    earlier, later = by_task(before, threshold), by_task(after, threshold)
    return [(scores, later[key]) for key, scores in earlier.items() if key in later]


def _common_ks(pairs: Sequence[Pair], rules: Rules) -> tuple[int, ...]:
    """Those that both runs allow."""
    if not pairs:
        return ()
    ks = [chosen_ks((pair[side] for pair in pairs), rules.ks) for side in (0, 1)]
    return tuple(k for k in ks[0] if k in ks[1])


Values = tuple[float | None, ...]


def _differences(
    tasks: Sequence[tuple[Values, Values]], ks: Sequence[int], resamples: int, seed: str
) -> dict[str, Difference]:
    names = (MEAN, *(f"pass@{k}" for k in ks))
    rows = [tuple(_minus(*pair) for pair in zip(after, before, strict=True)) for before, after in tasks]
    intervals = bootstrap(rows, resamples=resamples, seed=seed) or [None] * len(names)
    found: dict[str, Difference] = {}
    for at, name in enumerate(names):
        pairs = [(x, y) for before, after in tasks if (x := before[at]) is not None and (y := after[at]) is not None]
        changes = [y - x for x, y in pairs]
        found[name] = Difference(
            mean([x for x, _ in pairs]),
            mean([y for _, y in pairs]),
            mean(changes),
            intervals[at],
            sign_flip_p(changes, seed=f"{seed}/{name}"),
            len(pairs),
            sum(change > 0 for change in changes),
            sum(change < 0 for change in changes),
        )
    return found


def _minus(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
