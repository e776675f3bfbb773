"""Toolyard: multi-turn tool rollouts for RL, with the sandbox built in.

Public names are imported on first use, so `import toolyard` costs next to nothing.
"""

from __future__ import annotations

from toolyard._lazy import exports

TYPE_CHECKING = False  # type checkers treat it as True; importing `typing` would take longer than everything else here

if TYPE_CHECKING:
    from toolyard._version import __version__
    from toolyard.errors import ConfigError, ProgramError, SandboxError, ToolyardError
    from toolyard.limits.cluster.ray import RayLimiter
    from toolyard.limits.local import LocalLimiter
    from toolyard.limits.protocol import Limiter
    from toolyard.records.trajectory import Trajectory
    from toolyard.rollout.config import load_config
    from toolyard.rollout.run import run_rollouts
    from toolyard.sandbox.cluster.ray import RaySandbox
    from toolyard.sandbox.local import LocalSandbox
    from toolyard.sandbox.protocol import Execution, Limits, Program, Sandbox, Session, Verdict
    from toolyard.sandbox.remote.sandbox import RemoteSandbox
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
    "RaySandbox",
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

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard._version": "__version__",
        "toolyard.errors": "ConfigError ProgramError SandboxError ToolyardError",
        "toolyard.limits.cluster.ray": "RayLimiter",
        "toolyard.limits.local": "LocalLimiter",
        "toolyard.limits.protocol": "Limiter",
        "toolyard.records.trajectory": "Trajectory",
        "toolyard.rollout.config": "load_config",
        "toolyard.rollout.run": "run_rollouts",
        "toolyard.sandbox.cluster.ray": "RaySandbox",
        "toolyard.sandbox.local": "LocalSandbox",
        "toolyard.sandbox.protocol": "Execution Limits Program Sandbox Session Verdict",
        "toolyard.sandbox.remote.sandbox": "RemoteSandbox",
        "toolyard.tasks.protocol": "Task",
    },
)
