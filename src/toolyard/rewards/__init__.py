"""What an answer is worth. Knows of texts and numbers, not of rollouts or tools."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolyard.rewards.data_sources import default_compute_score
    from toolyard.rewards.trl import trl_reward

_HOMES = {
    "default_compute_score": "toolyard.rewards.data_sources",
    "trl_reward": "toolyard.rewards.trl",
}

__all__ = ["default_compute_score", "trl_reward"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'toolyard.rewards' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
