"""The evaluation of one run: mean reward and pass@k, overall and by tag.

Every task has the same weight, however many samples it has. The mean is that of the tasks' means, pass@k that of the
tasks' unbiased estimates. Attempts without a reward are counted and left out; they are never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from toolyard.errors import ConfigError
from toolyard.evaluation.estimators import Interval, bootstrap, mean, pass_at_k, resamples_for
from toolyard.evaluation.runs import Run, reasons_without_reward
from toolyard.evaluation.tags import SOURCE, TagsOf, tags_by
from toolyard.viewer.groups import SOLVED
from toolyard.viewer.protocol import Attempt

MEAN = "mean"
ALL = "all"
"""The slice with all attempts."""
UNKNOWN = "–"
"""The slice of attempts whose tag is unknown."""

TaskKey = tuple[str, int, str]
"""`Attempt.task_key`."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How attempts become numbers."""

    threshold: float = SOLVED
    """An attempt with at least this reward has solved its task."""
    ks: tuple[int, ...] | None = None
    """None: 1, 2, 4, 8, …, up to the number of samples that most tasks have."""
    resamples: int | None = None
    """None: 1,000 to 2,000, fewer the more tasks there are."""
    seed: int = 0


class Estimate(NamedTuple):
    value: float | None
    """None: no task has enough attempts with a reward."""
    interval: Interval | None
    """None: fewer than two tasks."""
    tasks: int
    """Tasks that it is the mean of."""

    def as_json(self) -> dict[str, Any]:
        return {"value": self.value, "interval": self.interval and list(self.interval), "tasks": self.tasks}


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The attempts at one task."""

    rewards: tuple[float, ...]
    """The known ones."""
    solved: int
    unknown: int

    def values(self, ks: Sequence[int]) -> tuple[float | None, ...]:
        """The mean reward, then pass@k for each of `ks`; None if there are too few rewards."""
        known = len(self.rewards)
        passed = (pass_at_k(known, self.solved, k) if k <= known else None for k in ks)
        return (mean(self.rewards), *passed)


@dataclass(frozen=True, slots=True)
class Slice:
    """The attempts with one value of a tag, or all of them."""

    value: str
    tasks: int
    attempts: int
    without_reward: Mapping[str, int]
    """Attempts without a reward, by finish reason."""
    samples: Mapping[int, int]
    """Number of tasks by their number of attempts with a reward."""
    estimates: Mapping[str, Estimate]
    """`mean`, and `pass@k` for each k."""

    def as_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "tasks": self.tasks,
            "attempts": self.attempts,
            "without_reward": dict(self.without_reward),
            "samples_per_task": {str(samples): tasks for samples, tasks in sorted(self.samples.items())},
            **{name: estimate.as_json() for name, estimate in self.estimates.items()},
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of `evaluate`."""

    name: str
    whole: Slice
    by: Mapping[str, Sequence[Slice]]
    """Slices by the name of the tag, the largest first; what is unknown comes last."""
    ks: tuple[int, ...]
    rules: Rules
    resamples: int
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "dump": self.name,
            "threshold": self.rules.threshold,
            "seed": self.rules.seed,
            "resamples": self.resamples,
            "k": list(self.ks),
            ALL: self.whole.as_json(),
            "by": {tag: [one.as_json() for one in slices] for tag, slices in self.by.items()},
            "notes": list(self.notes),
        }


def evaluate(run: Run, rules: Rules | None = None, *, by: Mapping[str, TagsOf] | None = None) -> Evaluation:
    """Evaluate a run. `by`: tags to divide it by, such as `{"source": tags_by("source")}`; by default the data source,
    if there are several.

    Raises:
        ConfigError: a k is less than 1, or larger than the number of attempts at any task.
    """
    rules = rules or Rules()
    tags = default_tags(run) if by is None else by
    tasks = by_task(run.attempts, rules.threshold)
    ks = chosen_ks(tasks.values(), rules.ks)
    resamples = rules.resamples or resamples_for(len(tasks))

    def measured(value: str, attempts: Sequence[Attempt], seed: str) -> Slice:
        grouped = by_task(attempts, rules.threshold)
        return Slice(
            value=value,
            tasks=len(grouped),
            attempts=len(attempts),
            without_reward=dict(reasons_without_reward(attempts).most_common()),
            samples=Counter(len(task.rewards) for task in grouped.values()),
            estimates=estimates_of([task.values(ks) for task in grouped.values()], ks, resamples, seed),
        )

    return Evaluation(
        run.name,
        measured(ALL, run.attempts, f"{rules.seed}"),
        {
            name: in_order(
                measured(value, part, f"{rules.seed}/{name}/{value}")
                for value, part in divided(run.attempts, found).items()
            )
            for name, found in tags.items()
        },
        ks,
        rules,
        resamples,
        tuple(run.notes),
    )


def default_tags(*runs: Run) -> dict[str, TagsOf]:
    """The data source, if there are several."""
    sources = {attempt.source for run in runs for attempt in run.attempts}
    return {SOURCE: tags_by(SOURCE)} if len(sources) > 1 else {}


def by_task(attempts: Iterable[Attempt], threshold: float) -> dict[TaskKey, TaskScores]:
    found: dict[TaskKey, list[float | None]] = {}
    for attempt in attempts:
        found.setdefault(attempt.task_key, []).append(attempt.score)
    tasks: dict[TaskKey, TaskScores] = {}
    for key, scores in found.items():
        rewards = tuple(score for score in scores if score is not None)
        tasks[key] = TaskScores(rewards, sum(reward >= threshold for reward in rewards), len(scores) - len(rewards))
    return tasks


def chosen_ks(tasks: Iterable[TaskScores], wanted: Sequence[int] | None) -> tuple[int, ...]:
    """
    Raises:
        ConfigError: see `evaluate`.
    """
    samples = Counter(len(task.rewards) for task in tasks)
    most = max(samples, default=0)
    if wanted is not None:
        if wrong := [k for k in wanted if k < 1]:
            raise ConfigError(f"--k {wrong[0]}: expected at least 1")
        if wrong := [k for k in wanted if k > most]:
            raise ConfigError(f"--k {wrong[0]}: no task has more than {most} samples with a reward")
        return tuple(sorted(set(wanted)))
    usual = max(samples, key=lambda count: (samples[count], count), default=0)
    return tuple(sorted({k for k in (*(1 << bit for bit in range(usual.bit_length())), usual) if k >= 1}))


def estimates_of(
    tasks: Sequence[tuple[float | None, ...]], ks: Sequence[int], resamples: int, seed: str
) -> dict[str, Estimate]:
    names = (MEAN, *(f"pass@{k}" for k in ks))
    intervals = bootstrap(tasks, resamples=resamples, seed=seed) or [None] * len(names)
    estimates: dict[str, Estimate] = {}
    for at, name in enumerate(names):
        known = [value for row in tasks if (value := row[at]) is not None]
        estimates[name] = Estimate(mean(known), intervals[at], len(known))
    return estimates


def divided(attempts: Iterable[Attempt], tags: TagsOf) -> dict[str, list[Attempt]]:
    """The attempts by their values of a tag; one with several values is in each."""
    parts: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        for value in tags(attempt) or (UNKNOWN,):
            parts.setdefault(value, []).append(attempt)
    return parts


class _HasTasks(Protocol):
    @property
    def value(self) -> str: ...
    @property
    def tasks(self) -> int: ...


S = TypeVar("S", bound=_HasTasks)


def in_order(slices: Iterable[S]) -> list[S]:
    """Numbers, such as steps, by size; texts with most tasks first; what is unknown comes last."""

    def place(one: S) -> tuple[object, ...]:
        is_text, number, text = _natural(one.value)
        return one.value == UNKNOWN, is_text, -one.tasks if is_text else number, text

    return sorted(slices, key=place)


def _natural(value: str) -> tuple[int, float, str]:
    """Numbers by size, before texts."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value
