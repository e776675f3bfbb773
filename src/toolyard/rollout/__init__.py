"""Rollouts: from a task to a scored, token-exact trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.rollout.agent.run import AgentTask
    from toolyard.rollout.assembly import OpenedRollout, open_rollout
    from toolyard.rollout.config import EMBEDDED, RolloutConfig, load_config
    from toolyard.rollout.finish import FinishReason, RolloutState
    from toolyard.rollout.interaction import BaseInteraction
    from toolyard.rollout.observer import Observer
    from toolyard.rollout.request import AsyncRolloutRequest
    from toolyard.rollout.run import RolloutResult, run_rollouts

__all__ = [
    "EMBEDDED",
    "AgentTask",
    "AsyncRolloutRequest",
    "BaseInteraction",
    "FinishReason",
    "Observer",
    "OpenedRollout",
    "RolloutConfig",
    "RolloutResult",
    "RolloutState",
    "load_config",
    "open_rollout",
    "run_rollouts",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.rollout.agent.run": "AgentTask",
        "toolyard.rollout.assembly": "OpenedRollout open_rollout",
        "toolyard.rollout.config": "EMBEDDED RolloutConfig load_config",
        "toolyard.rollout.finish": "FinishReason RolloutState",
        "toolyard.rollout.interaction": "BaseInteraction",
        "toolyard.rollout.observer": "Observer",
        "toolyard.rollout.request": "AsyncRolloutRequest",
        "toolyard.rollout.run": "RolloutResult run_rollouts",
    },
)
