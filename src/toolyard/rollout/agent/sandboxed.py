"""Runs an agent's command in the sandbox, from which it reaches the gateway and nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from toolyard.errors import ConfigError
from toolyard.rollout.agent.run import AgentExit, AgentTask, command_words, filled, is_function, until_over, variables
from toolyard.rollout.config import AgentConfig, AgentSandboxConfig
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Limits, Program, Verdict

_START = 'cd "$TOOLYARD_FOLDER" && exec "$@"\n'
_HOME = "/sandbox"
_TASK, _REWARD = "task.json", "reward"
_AT_ONCE = 4096
"""Bounded by the run's concurrency before."""
_DAY = 86_400.0


@asynccontextmanager
async def open_sandboxed_agent(
    agent: AgentConfig, sandbox: AgentSandboxConfig, gateway: str
) -> AsyncGenerator[SandboxedAgent]:
    """`gateway`: its address, `host:port`.

    Raises:
        ConfigError: the agent is a function, or its folder does not exist.
        IsolationError: this machine cannot keep programs from all other addresses.
    """
    words, folder = _checked(agent, sandbox)
    async with LocalSandbox(
        workers=_AT_ONCE, isolation="required", profiles={}, read_only_paths=[folder], reachable=gateway
    ) as jails:
        yield SandboxedAgent(words, agent.env, folder, jails, sandbox.limits)


def _checked(agent: AgentConfig, sandbox: AgentSandboxConfig) -> tuple[list[str], str]:
    """The words of the command, and its folder."""
    if is_function(agent.run):
        raise ConfigError(f"agent.sandbox: {agent.run!r} is a function in this process; only commands can be sandboxed")
    if agent.cwd is not None:
        raise ConfigError("agent.cwd: with agent.sandbox, the command starts in agent.sandbox.folder")
    folder = Path(sandbox.folder).absolute()
    if not folder.is_dir():
        raise ConfigError(f"agent.sandbox.folder: there is no folder {sandbox.folder!r}")
    return command_words(agent.run), str(folder)


class SandboxedAgent:
    """Runs a command line like `CommandAgent`, each time in a new jail."""

    def __init__(
        self, words: list[str], environment: Mapping[str, str], folder: str, sandbox: LocalSandbox, limits: Limits
    ) -> None:
        self._words = words
        self._environment = {"TOOLYARD_FOLDER": folder, **environment}
        self._sandbox = sandbox
        # Its last line may be the score: an agent that prints more than is kept fails.
        self._limits = limits.model_copy(update={"run_seconds": _DAY, "flood_bytes": limits.output_bytes})

    async def run(self, task: AgentTask, is_over: Callable[[], Awaitable[None]]) -> AgentExit:
        file = f"{_HOME}/{_TASK}"
        content = json.dumps(task.as_json()).encode()
        program = Program(
            _START,
            "bash",
            stdin=content,
            files={_TASK: content},
            fetch_files=[_REWARD],
            args=filled(self._words, task, file),
            env={**variables(task, file, f"{_HOME}/{_REWARD}"), **self._environment},
        )
        async with until_over(self._sandbox.run(program, self._limits), is_over) as work:
            return AgentExit(None) if work is None else _exit(work.result())


def _exit(execution: Execution) -> AgentExit:
    stage = execution.run
    assert stage is not None
    reward = execution.files.get(_REWARD)
    score = None if reward is None else reward[:1000].decode("utf-8", "replace")
    errors, code = stage.stderr, stage.exit_code
    if code is None:  # it was stopped at a limit
        code, errors = -9, f"{errors}\nthe agent was stopped: {execution.verdict.value.replace('_', ' ')}"
    if execution.verdict is Verdict.TIMED_OUT:
        code = None
    return AgentExit(code, stage.stdout, errors, score)
