"""Score answers by running their program on a task's test cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.rewards.code.judge import CodeJudge
    from toolyard.rewards.code.protocol import (
        Aggregation,
        Case,
        CaseResult,
        CaseVerdict,
        CodeResult,
        CodeSettings,
        Comparison,
        Submission,
        Suite,
    )

__all__ = [
    "Aggregation",
    "Case",
    "CaseResult",
    "CaseVerdict",
    "CodeJudge",
    "CodeResult",
    "CodeSettings",
    "Comparison",
    "Submission",
    "Suite",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.rewards.code.judge": "CodeJudge",
        "toolyard.rewards.code.protocol": (
            "Aggregation Case CaseResult CaseVerdict CodeResult CodeSettings Comparison Submission Suite"
        ),
    },
)
