"""Evaluation of dumps: mean rewards and pass@k with intervals over tasks, and two runs compared task by task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.evaluation.comparison import Comparison, compare
    from toolyard.evaluation.estimators import pass_at_k
    from toolyard.evaluation.results import Evaluation, evaluate
    from toolyard.evaluation.runs import Run, read_run

__all__ = ["Comparison", "Evaluation", "Run", "compare", "evaluate", "pass_at_k", "read_run"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.evaluation.comparison": "Comparison compare",
        "toolyard.evaluation.estimators": "pass_at_k",
        "toolyard.evaluation.results": "Evaluation evaluate",
        "toolyard.evaluation.runs": "Run read_run",
    },
)
