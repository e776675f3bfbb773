"""Score answers that are mathematical expressions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.rewards.math.scorer import MathChecker, MathScore, check, close, compute_score, score

__all__ = ["MathChecker", "MathScore", "check", "close", "compute_score", "score"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.rewards.math.scorer": "MathChecker MathScore check close compute_score score",
    },
)
