"""`toolyard sandbox serve`: a sandbox behind SandboxFusion's HTTP API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.sandbox.service.config import ServiceConfig, Token
    from toolyard.sandbox.service.server import RunningService, open_service, serve

__all__ = ["RunningService", "ServiceConfig", "Token", "open_service", "serve"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.sandbox.service.config": "ServiceConfig Token",
        "toolyard.sandbox.service.server": "RunningService open_service serve",
    },
)
