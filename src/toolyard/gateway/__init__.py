"""OpenAI's and Anthropic's APIs in front of an engine: records the exact tokens that agents sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.gateway.config import GatewayConfig, SessionLimits
    from toolyard.gateway.server import RunningGateway, open_gateway
    from toolyard.gateway.sessions import Session, SessionEnd, SessionTask

__all__ = [
    "GatewayConfig",
    "RunningGateway",
    "Session",
    "SessionEnd",
    "SessionLimits",
    "SessionTask",
    "open_gateway",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.gateway.config": "GatewayConfig SessionLimits",
        "toolyard.gateway.server": "RunningGateway open_gateway",
        "toolyard.gateway.sessions": "Session SessionEnd SessionTask",
    },
)
