"""Metrics of each step as one line of JSON: measured, summed over processes, written and read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from toolyard.errors import RecordError
from toolyard.messages import JSON
from toolyard.records.jsonl import decode, encode
from toolyard.records.writer import LineFile
from toolyard.rollout.summary import Summary
from toolyard.train.trl.rollout import StepReport

METRICS = "metrics.jsonl"
"""One line per update."""
EVALUATIONS = "evaluations.jsonl"
"""One line per evaluation."""

_OF_TRL = {
    "loss": "loss",
    "kl": "kl",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "reward_std": "reward_deviation",
    "frac_reward_zero_std": "groups_without_spread",
    "completions/clipped_ratio": "clipped",
    "clip_ratio/region_mean": "ratios_clipped",
    "sampling/sampling_logp_difference/mean": "logprob_difference",
}
"""Metrics that only the trainer has: its names, and ours."""
_GROUPS = ("sampled", "flat", "replaced")


# Measuring ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Measure:
    """Totals over trajectories. Measures can be added, also over processes."""

    trajectories: int = 0
    completed: int = 0
    scores: int = 0
    score_sum: float = 0.0
    turns: int = 0
    calls: int = 0
    calls_ok: int = 0
    """Successful calls: the tool answered, and programs ran without an error."""
    with_calls: int = 0
    """Trajectories with ≥ 1 successful tool call."""
    sampled_tokens: int = 0
    response_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    """Trajectories not trained on, by reason."""
    part_sums: Counter[str] = field(default_factory=Counter[str])
    """Sums of the parts of the reward, by name."""
    part_counts: Counter[str] = field(default_factory=Counter[str])
    finish_reasons: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """Calls as `tool/outcome`; for programs, the sandbox's verdict."""
    request_seconds: Counter[str] = field(default_factory=Counter[str])
    """Seconds by stage, summed over all requests, which run concurrently."""
    wall_seconds: Counter[str] = field(default_factory=Counter[str])
    """Wall time that the trainer waits for `sync` and `rollout`; with several processes, the slowest one's."""
    groups: Counter[str] = field(default_factory=Counter[str])
    """With dynamic sampling, how many groups were sampled, flat and replaced."""
    staleness: Counter[int] = field(default_factory=Counter[int])
    """With asynchronous training, sampled tokens by the number of updates since their weights."""

    @staticmethod
    def of(report: StepReport) -> Measure:
        summary = report.summary
        return Measure(
            trajectories=summary.trajectories,
            completed=summary.completed,
            scores=summary.score.count,
            score_sum=summary.score.mean * summary.score.count,
            turns=summary.turns,
            calls=sum(summary.outcomes.values()),
            calls_ok=sum(count for (_, outcome), count in summary.outcomes.items() if outcome == "ok"),
            with_calls=summary.with_calls,
            sampled_tokens=summary.sampled_tokens,
            response_tokens=summary.response_tokens,
            refused=Counter(str(one.refusal) for one in report.refused),
            part_sums=Counter({name: part.mean * part.count for name, part in summary.rewards.items()}),
            part_counts=Counter({name: part.count for name, part in summary.rewards.items()}),
            finish_reasons=Counter(summary.finish_reasons),
            outcomes=_outcomes(summary),
            request_seconds=Counter(summary.seconds),
            wall_seconds=Counter(report.seconds),
            groups=Counter(report.groups),
            staleness=Counter(report.staleness),
        )

    def __add__(self, other: Measure) -> Measure:
        """The sum of two measures taken one after the other."""
        return self._joined(other, self.wall_seconds + other.wall_seconds)

    @staticmethod
    def of_all(processes: Iterable[Measure]) -> Measure:
        """The sum over processes that worked at the same time."""
        joined = Measure()
        for one in processes:
            joined = joined._joined(one, joined.wall_seconds | one.wall_seconds)
        return joined

    def _joined(self, other: Measure, wall_seconds: Counter[str]) -> Measure:
        return Measure(
            self.trajectories + other.trajectories,
            self.completed + other.completed,
            self.scores + other.scores,
            self.score_sum + other.score_sum,
            self.turns + other.turns,
            self.calls + other.calls,
            self.calls_ok + other.calls_ok,
            self.with_calls + other.with_calls,
            self.sampled_tokens + other.sampled_tokens,
            self.response_tokens + other.response_tokens,
            self.refused + other.refused,
            _sum(self.part_sums, other.part_sums),
            self.part_counts + other.part_counts,
            self.finish_reasons + other.finish_reasons,
            self.outcomes + other.outcomes,
            self.request_seconds + other.request_seconds,
            wall_seconds,
            _sum(self.groups, other.groups),
            self.staleness + other.staleness,
        )

    def as_json(self) -> JSON:
        """Means are per trajectory; null if there are none."""
        return {
            "reward": _ratio(self.score_sum, self.scores),
            "tool_calls": _ratio(self.calls, self.trajectories),
            "calls_ok": _ratio(self.calls_ok, self.calls),
            "with_calls": _ratio(self.with_calls, self.trajectories),
            "turns": _ratio(self.turns, self.trajectories),
            "sampled_tokens": _ratio(self.sampled_tokens, self.trajectories),
            "response_tokens": _ratio(self.response_tokens, self.trajectories),
            "trajectories": self.trajectories,
            "completed": self.completed,
            "refused": dict(self.refused),
            "rewards": {name: _ratio(self.part_sums[name], count) for name, count in self.part_counts.items()},
            "finish_reasons": dict(self.finish_reasons),
            "outcomes": dict(self.outcomes),
            **({"dynamic_sampling": {name: self.groups[name] for name in _GROUPS}} if self.groups else {}),
            **({"staleness": _ages(self.staleness)} if self.staleness else {}),
        }


def step_line(step: int, measure: Measure, seconds: float, logs: Mapping[str, Any]) -> JSON:
    """The line of one update.

    Args:
        step: Number of updates including this one, as for checkpoints. Its trajectories were sampled with the weights
            before it and are dumped as step - 1.
        measure: Of its trajectories; empty if it reused those of the previous update.
        seconds: Duration of the whole step.
        logs: The trainer's metrics.
    """
    waited = sum(measure.wall_seconds.values())
    spent = {**measure.wall_seconds, "update": max(0.0, seconds - waited), "step": seconds}
    return {
        "step": step,
        **measure.as_json(),
        "seconds": _rounded(spent),
        "request_seconds": _rounded(measure.request_seconds),
        **{ours: logs[theirs] for theirs, ours in _OF_TRL.items() if theirs in logs},
    }


def evaluation_line(step: int, measure: Measure) -> JSON:
    """The line of one evaluation, after `step` updates."""
    return {"step": step, **measure.as_json(), "seconds": _rounded(measure.wall_seconds)}


def _outcomes(summary: Summary) -> Counter[str]:
    found = Counter[str]()
    for (tool, outcome), count in summary.outcomes.items():
        # The model may call an unknown tool anything; each name would be a new curve.
        found[f"{'?' if outcome == 'unknown_tool' else tool}/{outcome}"] += count
    return found


def _sum(one: Counter[str], other: Counter[str]) -> Counter[str]:
    """Like `+`, which would leave out what is not positive."""
    return Counter({name: one[name] + other[name] for name in one.keys() | other.keys()})


def _ages(tokens: Counter[int]) -> JSON:
    whole = sum(age * count for age, count in tokens.items())
    return {"mean": _ratio(whole, tokens.total()), "max": max(tokens)}


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole else None


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {stage: round(spent, 3) for stage, spent in seconds.items()}


# The file -------------------------------------------------------------------------------------------------------------


class MetricsFile:
    """Grows by whole lines, so it can be read while it is being written. If the process is killed, at most the last
    line is torn; it is removed when the file is next opened."""

    def __init__(self, path: Path, *, steps: int) -> None:
        """
        Args:
            steps: Drop an earlier run's lines after this step: the run continues from here and repeats those steps. 0:
                drop all of them, since an evaluation before the first step is repeated too.

        Raises:
            RecordError: the file cannot be read or written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot write to {path.parent}: {error.strerror}") from None
        kept: list[JSON] = []
        if path.exists():
            kept = [line for line in read_metrics(path) if steps and line["step"] <= steps]
            _keep(path, kept)
        self.kept_steps = {line["step"] for line in kept}
        """The steps of the earlier run's lines."""
        self._file = LineFile(path)

    def write(self, line: JSON) -> None:
        """
        Raises:
            RecordError: it could not be written; the file is unchanged.
        """
        self._file.append(encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[JSON]:
    """Read the complete lines of a metrics file.

    Raises:
        RecordError: the file cannot be read, or a line is not a line of metrics.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    found: list[JSON] = []
    for number, line in enumerate(lines, 1):
        try:
            read = decode(line)
        except RecordError as error:
            raise RecordError(f"{path}:{number}: {error}") from None
        if not isinstance(read, dict) or not isinstance(cast("JSON", read).get("step"), int):
            raise RecordError(f"{path}:{number}: not a line of metrics: it has no step")
        found.append(cast("JSON", read))
    return found


def _keep(path: Path, lines: Iterable[JSON]) -> None:
    """Replace the file's contents atomically."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as opened:
            opened.writelines(encode(line) + b"\n" for line in lines)
            opened.flush()
            os.fsync(opened.fileno())
        new.replace(path)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None
