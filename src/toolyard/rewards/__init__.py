"""Scoring of answers. Independent of rollouts and tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.rewards.code.judge import CodeJudge
    from toolyard.rewards.code.protocol import CodeResult, CodeSettings, Submission
    from toolyard.rewards.combination import Weights
    from toolyard.rewards.data_sources import register
    from toolyard.rewards.default import default_compute_score
    from toolyard.rewards.explanation import Explanation
    from toolyard.rewards.protocol import FinalReward, FinalScore
    from toolyard.rewards.registry import load_reward
    from toolyard.rewards.trl import trl_reward

__all__ = [
    "CodeJudge",
    "CodeResult",
    "CodeSettings",
    "Explanation",
    "FinalReward",
    "FinalScore",
    "Submission",
    "Weights",
    "default_compute_score",
    "load_reward",
    "register",
    "trl_reward",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.rewards.code.judge": "CodeJudge",
        "toolyard.rewards.code.protocol": "CodeResult CodeSettings Submission",
        "toolyard.rewards.combination": "Weights",
        "toolyard.rewards.data_sources": "register",
        "toolyard.rewards.default": "default_compute_score",
        "toolyard.rewards.explanation": "Explanation",
        "toolyard.rewards.protocol": "FinalReward FinalScore",
        "toolyard.rewards.registry": "load_reward",
        "toolyard.rewards.trl": "trl_reward",
    },
)
