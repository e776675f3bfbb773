"""Toolyard: multi-turn tool rollouts for RL, with the sandbox built in.

The public names are imported on first use, so that `import toolyard` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "toolyard.errors",
    "Execution": "toolyard.sandbox.protocol",
    "Limiter": "toolyard.limits.protocol",
    "Limits": "toolyard.sandbox.protocol",
    "LocalLimiter": "toolyard.limits.local",
    "LocalSandbox": "toolyard.sandbox.local",
    "Program": "toolyard.sandbox.protocol",
    "ProgramError": "toolyard.errors",
    "RayLimiter": "toolyard.limits.ray",
    "RemoteSandbox": "toolyard.sandbox.remote",
    "Sandbox": "toolyard.sandbox.protocol",
    "SandboxError": "toolyard.errors",
    "Session": "toolyard.sandbox.protocol",
    "ToolyardError": "toolyard.errors",
    "Verdict": "toolyard.sandbox.protocol",
}

if TYPE_CHECKING:
    from toolyard.errors import ConfigError, ProgramError, SandboxError, ToolyardError
    from toolyard.limits.local import LocalLimiter
    from toolyard.limits.protocol import Limiter
    from toolyard.limits.ray import RayLimiter
    from toolyard.sandbox.local import LocalSandbox
    from toolyard.sandbox.protocol import Execution, Limits, Program, Sandbox, Session, Verdict
    from toolyard.sandbox.remote import RemoteSandbox

__all__ = [
    "ConfigError",
    "Execution",
    "Limiter",
    "Limits",
    "LocalLimiter",
    "LocalSandbox",
    "Program",
    "ProgramError",
    "RayLimiter",
    "RemoteSandbox",
    "Sandbox",
    "SandboxError",
    "Session",
    "ToolyardError",
    "Verdict",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'toolyard' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
