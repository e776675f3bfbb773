"""Statistics of a run, updated with each trajectory, and the accounting of its requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from toolyard.errors import OURS, ToolyardError
from toolyard.messages import JSON
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.finish import RolloutState


@dataclass(slots=True)
class RunningStats:
    """Mean and standard deviation of values added one by one."""

    count: int = 0
    mean: float = 0.0
    _squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        off = value - self.mean
        self.mean += off / self.count
        self._squares += off * (value - self.mean)

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / self.count) if self.count else 0.0


@dataclass(slots=True)
class Summary:
    """Totals over all trajectories that ended in this run."""

    trajectories: int = 0
    completed: int = 0
    token_exact: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    with_calls: int = 0
    """Trajectories with ≥ 1 successful tool call: the tool answered, and programs ran without an error."""
    score: RunningStats = field(default_factory=RunningStats)
    rewards: dict[str, RunningStats] = field(default_factory=dict[str, RunningStats])
    finish_reasons: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Number of tool calls by tool and outcome; for programs, the sandbox's verdict."""
    seconds: Counter[str] = field(default_factory=Counter[str])
    """Seconds by stage, summed over all requests."""
    failures: dict[str, str] = field(default_factory=dict[str, str])
    """One example for each finish reason: the request and its error."""
    stuck: int = 0
    near_misses: int = 0
    """Texts that look like a call but are not in the format's syntax."""
    abandoned: Counter[str] = field(default_factory=Counter[str])
    """Calls that ignored their cancellation, by name and place."""

    def add(self, trajectory: Trajectory) -> None:
        self.trajectories += 1
        self.completed += trajectory.state == RolloutState.COMPLETED
        self.token_exact += trajectory.token_exact
        self.turns += len(trajectory.turns)
        self.prompt_tokens += len(trajectory.tokens.prompt_ids)
        self.response_tokens += len(trajectory.tokens.response_ids)
        self.sampled_tokens += trajectory.metrics.get("sampled_tokens", 0)
        self.finish_reasons[trajectory.finish_reason] += 1
        self.stuck += bool(trajectory.metrics.get("stuck"))
        self.near_misses += trajectory.metrics.get("near_misses", 0)
        self.abandoned.update(trajectory.metrics.get("abandoned", ()))
        if trajectory.score is not None:
            self.score.add(trajectory.score)
        for name, reward in trajectory.rewards.items():
            if reward is not None:
                self.rewards.setdefault(name, RunningStats()).add(reward)
        for stage, seconds in trajectory.metrics.get("seconds", {}).items():
            self.seconds[stage] += seconds
        calls = [call for turn in trajectory.turns for call in turn.tool_calls]
        ends = [(call.name or "?", str(call.metrics.get("verdict") or call.outcome)) for call in calls]
        self.outcomes.update(ends)
        self.with_calls += any(outcome == "ok" for _, outcome in ends)
        failure = trajectory.failure
        if failure is not None:
            last = (failure.error.strip().splitlines() or [""])[-1]
            fault = "infrastructure" if failure.whose == OURS else failure.whose
            told = f"{fault} failure in {failure.stage}" + (f", {failure.source}" if failure.source else "")
            self.failures.setdefault(trajectory.finish_reason, f"{trajectory.request_id} ({told}): {last}")

    def as_json(self) -> JSON:
        return {
            "trajectories": self.trajectories,
            "completed": self.completed,
            "failed": self.trajectories - self.completed,
            "token_exact": self.token_exact,
            "turns": self.turns,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "sampled_tokens": self.sampled_tokens,
            "trajectories_with_calls": self.with_calls,
            "score": {"count": self.score.count, "mean": self.score.mean, "deviation": self.score.deviation},
            "rewards": {name: {"count": spread.count, "mean": spread.mean} for name, spread in self.rewards.items()},
            "finish_reasons": dict(self.finish_reasons.most_common()),
            "tool_calls": [
                {"tool": tool, "outcome": outcome, "count": count}
                for (tool, outcome), count in self.outcomes.most_common()
            ],
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.most_common()},
            "failures": self.failures,
            "stuck": self.stuck,
            "near_misses": self.near_misses,
            "abandoned": dict(self.abandoned.most_common()),
        }


class Groups:
    """How many tasks have all their samples in the dump."""

    def __init__(self, ids: Iterable[str], n: int, left: Collection[str]) -> None:
        """`ids`: of all requests, the `n` samples of a task one after another. `left`: those not in the dump."""
        self._group = {request_id: place // n for place, request_id in enumerate(ids)}
        self._left = Counter(self._group[request_id] for request_id in left)
        self.total = len(set(self._group.values()))

    @property
    def done(self) -> int:
        return self.total - len(self._left)

    def add(self, request_id: str) -> bool:
        """A request is in the dump. Returns whether its group is complete."""
        group = self._group[request_id]
        self._left[group] -= 1
        if self._left[group]:
            return False
        del self._left[group]
        return True


# Accounting: every planned request is in the dump or listed as missing ------------------------------------------------

_SHOWN = 5


class AccountingError(ToolyardError):
    """Some requests of a run are unaccounted for."""


@dataclass(slots=True)
class Accounting:
    """planned = dumped + missing. Everything else is an error."""

    planned: int = 0
    before: int = 0
    """Requests found in the dump and not played again."""
    dumped: set[str] = field(default_factory=set[str])
    """Requests written by this run; without a dump, delivered to the caller."""
    missing: dict[str, str] = field(default_factory=dict[str, str])
    """Ids of requests without a line, and the reason for each."""
    problems: list[str] = field(default_factory=list[str])
    """Errors: requests that disappeared, workers that died, missing lines."""

    @property
    def in_dump(self) -> int:
        return self.before + len(self.dumped)

    def close(self, wanted: Iterable[str]) -> None:
        """Compare with the requests that this run should have played."""
        lost = [request_id for request_id in wanted if request_id not in self.dumped and request_id not in self.missing]
        if lost:
            self.problems.append(f"{_count(len(lost))} disappeared: {_named(lost)}")
        if twice := self.dumped & self.missing.keys():
            self.problems.append(f"{_count(len(twice))} both dumped and missing: {_named(sorted(twice))}")

    def check(self) -> None:
        """
        Raises:
            AccountingError: the equation does not hold.
        """
        if self.problems:
            raise AccountingError(f"the run does not add up: {'; '.join(self.problems)}")

    def __str__(self) -> str:
        earlier = f" ({self.before} of them by an earlier run)" if self.before else ""
        line = f"{self.planned} planned = {self.in_dump} in the dump{earlier} + {len(self.missing)} missing"
        reasons: dict[str, list[str]] = {}
        for request_id, why in self.missing.items():
            reasons.setdefault(why, []).append(request_id)
        return line + "".join(f"; {why}: {_named(ids)}" for why, ids in reasons.items())

    def as_json(self) -> JSON:
        return {
            "planned": self.planned,
            "dumped": self.in_dump,
            "dumped_before": self.before,
            "missing": self.missing,
            "problems": self.problems,
        }


def _count(number: int) -> str:
    return f"{number} request{'' if number == 1 else 's'}"


def _named(ids: list[str]) -> str:
    more = len(ids) - _SHOWN
    return ", ".join(ids[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
