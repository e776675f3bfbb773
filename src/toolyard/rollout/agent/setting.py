"""What all requests of a run share that an agent plays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from toolyard.chat.protocol import ChatFormat
from toolyard.rollout.agent.run import Agent

if TYPE_CHECKING:
    from toolyard.gateway.server import RunningGateway

ScoreFrom = Literal["messages", "output", "printed", "file"]


@dataclass(frozen=True, slots=True)
class AgentSetting:
    """What all requests of a run share that an agent plays."""

    agent: Agent | None
    """None in a replay, as is the gateway."""
    gateway: RunningGateway | None
    chat: ChatFormat
    score_from: ScoreFrom = "messages"
    grace_seconds: float = 10.0
    """How long an agent may go on after an error that told it of a limit."""
