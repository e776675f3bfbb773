"""Toolyard's rollouts as an agent loop for verl."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.train.verl.agent_loop import ToolyardAgentLoop

__all__ = ["ToolyardAgentLoop"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.train.verl.agent_loop": "ToolyardAgentLoop",
    },
)
