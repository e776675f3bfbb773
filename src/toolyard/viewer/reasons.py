"""Why a trajectory has its score: the formula, and what each reward's scorer said."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from toolyard.records.trajectory import Trajectory
from toolyard.rewards.explanation import short_text

_MOST_PARTS = 50
_NAME_CHARS = 80
_QUOTED_CHARS = 60
_ALIASES = (("reason", "why", "reward_error"), ("extracted", "pred"), ("expected",))
"""Names under which lines have these: `why` in earlier versions of Toolyard, `pred` in verl, `reward_error` in verl's
lines that were scored again."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """A reward that is part of the score. None: the line does not say."""

    name: str
    value: float | None
    """Before weighting."""
    weight: float | None
    reason: str | None = None
    extracted: str | None = None
    expected: str | None = None
    sentence: str = ""
    """Reason, extracted and expected on one line, cut; empty if none is known."""


@dataclass(frozen=True, slots=True)
class RewardBreakdown:
    """A score and its parts, ready to be shown."""

    formula: str
    """`score 1 = 1 × final 1 + 0 × tool/search 0`. It has – for what is unknown, and ≠ if the sum is not the score."""
    parts: tuple[RewardPart, ...]
    """In the order of the formula. verl's lines have one, called `score`, if they explain it."""


def reward_breakdown(trajectory: Trajectory) -> RewardBreakdown:
    """Explain the score of any line: ours, of any version, or verl's. It shows what the line has."""
    score = f"score {_shown(trajectory.score)}"
    if not trajectory.rewards:
        part = _part("score", trajectory.score, None, trajectory.extra)
        return RewardBreakdown(score, (part,) if part.sentence else ())
    parts = tuple(_parts(trajectory))
    terms = [f"{_shown(part.weight)} × {part.name} {_shown(part.value)}" for part in parts]
    hidden = len(trajectory.rewards) - len(parts)
    if hidden:
        terms.append(f"{hidden} more")
    sign = "=" if hidden or _adds_up(parts, trajectory.score) else "≠"
    return RewardBreakdown(f"{score} {sign} {' + '.join(terms)}", parts)


def _parts(trajectory: Trajectory) -> Iterator[RewardPart]:
    for name in list(trajectory.rewards)[:_MOST_PARTS]:
        said = detail = _mapping(trajectory.reward_details.get(name))
        if name == "final":
            said = _mapping(trajectory.metrics.get("reward")) | detail
        if name == "step" and (count := _step_rewards(trajectory)):
            said = {"reason": f"the sum of {count} step reward{'' if count == 1 else 's'}"} | detail
        yield _part(name, trajectory.rewards[name], detail.get("weight"), said)


def _part(name: str, value: Any, weight: Any, said: Mapping[str, Any]) -> RewardPart:
    reason, extracted, expected = (_first(said, names) for names in _ALIASES)
    told = [reason or ""]
    for what, text in (("extracted", extracted), ("expected", expected)):
        if text and text not in told[0]:  # the reason may quote it already
            told.append(f"{what} {_one_line(text, _QUOTED_CHARS)}")
    return RewardPart(
        _one_line(name, _NAME_CHARS),
        _finite(value),
        _finite(weight),
        reason,
        extracted,
        expected,
        " · ".join(filter(None, told)),
    )


def _first(said: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((text for name in names if (text := short_text(said.get(name)))), None)


def _adds_up(parts: tuple[RewardPart, ...], score: float | None) -> bool:
    """Whether they give the score, approximately, as far as that is known."""
    counted = [part for part in parts if part.weight != 0]
    terms = [part.weight * part.value for part in counted if part.weight is not None and part.value is not None]
    if len(terms) < len(counted):
        return True
    if score is None:  # withdrawn, for example by the audit, unless nothing counts
        return not terms
    return math.isclose(sum(terms), score, rel_tol=1e-6, abs_tol=1e-9)


def _step_rewards(trajectory: Trajectory) -> int:
    return sum(call.reward is not None for turn in trajectory.turns for call in turn.tool_calls)


def _mapping(value: Any) -> dict[str, Any]:
    """Lines are checked for their shape, not for what is in `metrics` and `reward_details`."""
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _shown(number: float | None) -> str:
    return "–" if number is None else f"{number:.6g}"


def _one_line(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
