"""Toolyard: multi-turn tool rollouts for RL, with the sandbox built in.

The public names are imported on first use, so that `import toolyard` costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for True; importing `typing` would take longer than all of this
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
    "Task": "toolyard.tasks.protocol",
    "ToolyardError": "toolyard.errors",
    "Trajectory": "toolyard.records.trajectory",
    "Verdict": "toolyard.sandbox.protocol",
    "load_config": "toolyard.rollout.config",
    "run_rollouts": "toolyard.rollout.run",
}

if TYPE_CHECKING:
    from typing import Any

    from toolyard.errors import ConfigError, ProgramError, SandboxError, ToolyardError
    from toolyard.limits.local import LocalLimiter
    from toolyard.limits.protocol import Limiter
    from toolyard.limits.ray import RayLimiter
    from toolyard.records.trajectory import Trajectory
    from toolyard.rollout.config import load_config
    from toolyard.rollout.run import run_rollouts
    from toolyard.sandbox.local import LocalSandbox
    from toolyard.sandbox.protocol import Execution, Limits, Program, Sandbox, Session, Verdict
    from toolyard.sandbox.remote import RemoteSandbox
    from toolyard.tasks.protocol import Task

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
    "Task",
    "ToolyardError",
    "Trajectory",
    "Verdict",
    "__version__",
    "load_config",
    "run_rollouts",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'toolyard' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
