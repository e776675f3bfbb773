"""Runs model-written programs safely and fast. Standalone: does not depend on rollouts, tools or rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.sandbox.cluster.ray import RaySandbox
    from toolyard.sandbox.local import LocalSandbox, SandboxConfig
    from toolyard.sandbox.protocol import (
        CellError,
        CellResult,
        Execution,
        Limits,
        Program,
        Sandbox,
        Session,
        StageResult,
        Verdict,
    )
    from toolyard.sandbox.remote.sandbox import RemoteSandbox

__all__ = [
    "CellError",
    "CellResult",
    "Execution",
    "Limits",
    "LocalSandbox",
    "Program",
    "RaySandbox",
    "RemoteSandbox",
    "Sandbox",
    "SandboxConfig",
    "Session",
    "StageResult",
    "Verdict",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.sandbox.cluster.ray": "RaySandbox",
        "toolyard.sandbox.local": "LocalSandbox SandboxConfig",
        "toolyard.sandbox.protocol": (
            "CellError CellResult Execution Limits Program Sandbox Session StageResult Verdict"
        ),
        "toolyard.sandbox.remote.sandbox": "RemoteSandbox",
    },
)
