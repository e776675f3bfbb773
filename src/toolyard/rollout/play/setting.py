"""What all requests of a run share: the speaker, the tools, the limits, the rewards, the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from toolyard.chat.protocol import ChatFormat
from toolyard.rewards.combination import Weights
from toolyard.rewards.protocol import FinalReward
from toolyard.rollout.admission import Loads
from toolyard.rollout.agent.run import Agent
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.interaction import BaseInteraction
from toolyard.rollout.play.speaker import Speaker
from toolyard.tools.base import BaseTool

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


@dataclass(frozen=True, slots=True)
class Setting:
    """The parts that all requests of a run share."""

    speaker: Speaker
    tools: Mapping[str, BaseTool] = field(default_factory=dict[str, BaseTool])
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    final_reward: FinalReward | None = None
    weights: Weights = field(default_factory=Weights)
    interaction: BaseInteraction | None = None
    loads: Loads | None = None
    """How much the engine's servers have to do. While they queue, fewer requests run than could."""
    agent: AgentSetting | None = None
    """Plays the requests instead of Toolyard's own loop."""
