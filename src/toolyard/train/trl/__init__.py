"""Toolyard's rollouts for TRL: a `rollout_func` for its `GRPOTrainer`, and complete training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer
    from toolyard.train.trl.rollout import RolloutReward, StepObserver, StepReport, ToolyardRollout
    from toolyard.train.trl.run import run_training
    from toolyard.train.trl.stream import StreamSettings

__all__ = [
    "OffPolicyGRPOTrainer",
    "RolloutReward",
    "StepObserver",
    "StepReport",
    "StreamSettings",
    "ToolyardRollout",
    "run_training",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.train.trl.off_policy": "OffPolicyGRPOTrainer",
        "toolyard.train.trl.rollout": "RolloutReward StepObserver StepReport ToolyardRollout",
        "toolyard.train.trl.run": "run_training",
        "toolyard.train.trl.stream": "StreamSettings",
    },
)
