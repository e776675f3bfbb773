"""Combine several rewards into one score, by configured weights, with a breakdown.

If a part that applies could not be computed, the score is absent, not smaller: a trajectory that lost its final reward
to our failure must not be trained on as if it had scored 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict, FiniteFloat

from toolyard.messages import JSON
from toolyard.rewards.explanation import Explanation, explain


class Missing(Enum):
    """The type of `MISSING`."""

    MISSING = "missing"


MISSING = Missing.MISSING
"""Marks a reward that does not apply: none is configured. None means that it applies but failed."""


class Weights(BaseModel):
    """The weight of each reward in the score. A reward with weight 0 is only listed in the breakdown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    final: FiniteFloat = 1.0
    """Weight of the final reward, which scores the answer."""
    step: FiniteFloat = 1.0
    """Weight of the sum of all step rewards. They are small by design (the GSM8K tool's penalty is -0.05), so they
    count fully: they distinguish trajectories with the same answer."""
    tool: FiniteFloat | dict[str, FiniteFloat] = 0.0
    """Weight of each tool's `calc_reward`: one for all, or by tool; tools not listed have 0. The default is 0, because
    GSM8K's tool scores the same answer as the final reward, which would count twice."""
    interaction: FiniteFloat = 1.0
    """Weight of the user simulator's score."""

    def of(self, part: str) -> float:
        """The weight of a part, by its name in `Combined.parts`."""
        kind, _, tool = part.partition("/")
        if kind != "tool":
            return getattr(self, kind)
        return self.tool.get(tool, 0.0) if isinstance(self.tool, dict) else self.tool


@dataclass(frozen=True, slots=True)
class Combined:
    """A score and its parts."""

    score: float | None
    """None if a part of it is missing: a failure is never 0."""
    parts: dict[str, float | None]
    """`final`, `step`, `tool/<name>` and `interaction`, if they apply, before weighting. None: it failed."""
    why_missing: str | None = None
    """Why there is no score."""
    failed: tuple[str, ...] = ()
    """Parts that count but could not be computed. If empty and there is no score: no reward applies."""


def combine(
    weights: Weights,
    *,
    final: float | Missing | None,
    steps: Mapping[str, Sequence[float]],
    tools: Mapping[str, float | None],
    interaction: float | Missing | None = MISSING,
    reasons: Mapping[str, str] | None = None,
) -> Combined:
    """Return the weighted sum of what applies.

    Args:
        weights: The weight of each part.
        final: MISSING if no final reward is configured; then the rest makes the score.
        steps: Step rewards by tool. Empty if the trajectory has no tools.
        tools: `calc_reward` by tool; a tool that gives none is omitted.
        interaction: MISSING if there is no user simulator.
        reasons: Why a part failed, for `why_missing`.

    A trajectory without any reward (no final reward, no step rewards, nothing else that counts) has no score: 0.0 would
    claim that it was judged.
    """
    given = [reward for rewards in steps.values() for reward in rewards]
    parts: dict[str, float | None] = {}
    if final is not MISSING:
        parts["final"] = final
    if steps:
        parts["step"] = _sum(given)
    parts |= {f"tool/{name}": reward for name, reward in tools.items()}
    if interaction is not MISSING:
        parts["interaction"] = interaction
    counts = {name: weights.of(name) for name in parts}
    parts = {name: value if value is not None and math.isfinite(value) else None for name, value in parts.items()}
    failed = [name for name, value in parts.items() if value is None and counts[name]]
    if failed:
        return Combined(None, parts, "; ".join(_why(name, reasons or {}) for name in failed), tuple(failed))
    judged = [name for name in parts if counts[name] and (name != "step" or given)]
    if not judged:
        return Combined(None, parts, "no reward applies: none is configured, or its weight is 0")
    score = _sum([counts[name] * value for name, value in parts.items() if value is not None and counts[name]])
    if score is None:
        return Combined(None, parts, "the weighted sum is not a finite number")
    return Combined(score, parts)


def reward_details(
    weights: Weights,
    parts: Mapping[str, float | None],
    explanations: Mapping[str, Explanation | None],
    failures: Mapping[str, str],
) -> dict[str, JSON]:
    """Return the weight and explanation of each part, as a dump has them. `failures`: error messages, by part."""
    details: dict[str, JSON] = {}
    for name, value in parts.items():
        said = explanations.get(name) or Explanation()
        if value is None and name in failures:
            said = explain(failures[name].strip().rpartition("\n")[2])  # the last line of a traceback is the error
        details[name] = {"weight": weights.of(name), **said.as_json()}
    return details


def _why(name: str, reasons: Mapping[str, str]) -> str:
    reason = reasons.get(name)
    return f"{name} could not be computed" + (f": {reason}" if reason else "")


def _sum(values: Sequence[float]) -> float | None:
    """Sum exactly, so that the order in which calls ended does not matter. None if it is not finite."""
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):
        return None
    return total if math.isfinite(total) else None
