"""One score of several rewards, by stated weights, with what each of them was.

A part that applies and could not be computed makes the score absent, not smaller: a trajectory that lost its final
reward to a failure of ours must not be trained on as if it were worth nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict, FiniteFloat


class Missing(Enum):
    """The type of `MISSING`."""

    MISSING = "missing"


MISSING = Missing.MISSING
"""In place of a reward that does not apply: none is configured. None means that there should be one, and it failed."""


class Weights(BaseModel):
    """What each reward counts in the score. A weight of 0 keeps it in the breakdown only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    final: FiniteFloat = 1.0
    """Of the final reward: what the answer is worth."""
    step: FiniteFloat = 1.0
    """Of the sum of all step rewards. They are small by design (the GSM8K tool's penalty is -0.05), so they count in
    full: they tell apart trajectories with the same answer."""
    tool: FiniteFloat | dict[str, FiniteFloat] = 0.0
    """Of each tool's `calc_reward`: one weight for all, or by tool, where tools that are not named have 0. By default
    none counts: GSM8K's tool scores the same answer that the final reward does, and it would count twice."""
    interaction: FiniteFloat = 1.0
    """Of the user simulator's score."""

    def of_tool(self, name: str) -> float:
        return self.tool.get(name, 0.0) if isinstance(self.tool, dict) else self.tool


@dataclass(frozen=True, slots=True)
class Combined:
    """A score and what it was made of."""

    score: float | None
    """None where a part of it is missing: never 0 for a failure."""
    parts: dict[str, float | None]
    """`final`, `step`, `tool/<name>`, `interaction`, as far as they apply, before weighting. None: it failed."""
    why_missing: str | None = None
    """Why there is no score."""
    failed: tuple[str, ...] = ()
    """Parts that count and could not be computed. None of them, and still no score: nobody gives rewards here."""


def combine(
    weights: Weights,
    *,
    final: float | Missing | None,
    steps: Mapping[str, Sequence[float]],
    tools: Mapping[str, float | None],
    interaction: float | Missing | None = MISSING,
    reasons: Mapping[str, str] | None = None,
) -> Combined:
    """The weighted sum of what applies.

    Args:
        weights: What counts how much.
        final: MISSING if no final reward is configured; then the rest makes the score.
        steps: By tool, the step rewards that it gave. Empty if the trajectory has no tools.
        tools: By tool, its `calc_reward`; a tool that gives none is left out.
        interaction: MISSING if there is no user simulator.
        reasons: By part, why it failed, for `why_missing`.

    A trajectory in which nobody gave any reward (no final one, no step rewards, nothing else that counts) has no score:
    0.0 would claim that it was judged.
    """
    given = [reward for rewards in steps.values() for reward in rewards]
    parts: dict[str, float | None] = {}
    counts: dict[str, float] = {}
    if final is not MISSING:
        parts["final"], counts["final"] = final, weights.final
    if steps:
        parts["step"], counts["step"] = _sum(given), weights.step
    for name, reward in tools.items():
        parts[f"tool/{name}"], counts[f"tool/{name}"] = reward, weights.of_tool(name)
    if interaction is not MISSING:
        parts["interaction"], counts["interaction"] = interaction, weights.interaction
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


def _why(name: str, reasons: Mapping[str, str]) -> str:
    reason = reasons.get(name)
    return f"{name} could not be computed" + (f": {reason}" if reason else "")


def _sum(values: Sequence[float]) -> float | None:
    """Exact, so that it does not depend on the order in which calls ended. None if it is not finite."""
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):
        return None
    return total if math.isfinite(total) else None
