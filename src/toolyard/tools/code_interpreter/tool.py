"""`code_interpreter`: runs the model's code in a sandbox, under the limiter.

`text` composes what the model reads. A failure of the sandbox, its service or the limiter is an exception, never text:
our failure must not look like the model's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from toolyard.errors import ConfigError, ProgramError, ToolchainMissingError
from toolyard.execution.workplaces import Workplaces, check_place, new_ray_sandbox, permits
from toolyard.limits.local import LocalLimiter
from toolyard.limits.protocol import Limiter
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.sandbox.languages import find_language, own_name
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, CellResult, Execution, Limits, Program, Sandbox, Seconds
from toolyard.tools.arguments import ArgumentError
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.code_interpreter.session import TrajectorySession
from toolyard.tools.code_interpreter.text import LOST, cell_text, execution_text, with_timeout_cut
from toolyard.tools.policy import Recovery
from toolyard.tools.trajectories import Trajectories

_log = logging.getLogger(__name__)

_MAX_SECONDS = 300.0
"""Longest timeout in seconds that a model may request, unless the default is longer."""
_COMPILE_SECONDS = 30.0
"""Minimum; a program that may run longer may also compile that long."""
_SESSION_IDLE_SECONDS = 3600.0
"""Long, because a model may think for a while between calls; the end of the trajectory closes the session anyway."""
_SESSIONS = 1024
"""Maximum number kept under frameworks that do not report the end of a trajectory: each is a process."""

ExecuteResult = tuple[ToolResponse, float | None, dict[str, Any]]

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "A tool for executing code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to execute.", "enum": None}},
                "required": ["code"],
            },
            "strict": False,
        },
    }
)
"""As in verl."""


class CodeInterpreterConfig(BaseModel):
    """The tool's `config` in YAML. The first six keys are verl's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_workers: PositiveInt = 10
    """Maximum concurrent executions in this process."""
    rate_limit: PositiveInt = 10
    """Maximum executions in flight: in the whole Ray cluster if there is one, otherwise in this process. Tools share
    it, so two different limits are an error."""
    default_timeout: Seconds = 30.0
    """Time limit of one execution in seconds, unless the model requests another."""
    default_language: str = "python"
    enable_global_rate_limit: bool = True
    """False: only `num_workers` applies."""
    sandbox_fusion_url: str | tuple[str, ...] = ""
    """URL of `toolyard sandbox serve` or any SandboxFusion service, or a list of URLs: if one fails, the next is tried.
    Empty: the embedded sandbox."""
    sandbox: Literal["ray"] | None = None
    """`ray`: the sandboxes of all nodes of the Ray cluster, shared by all its processes. None: see
    `sandbox_fusion_url`."""
    memory_limit_mb: int = Field(1024, gt=0, lt=1 << 42)
    """Sent to a SandboxFusion service only if set explicitly."""
    stateful: bool = False
    """Keep one Python interpreter for the whole trajectory, with its variables, imports and files."""
    max_output_chars: PositiveInt = 16384
    """Maximum characters each of stdout and stderr; head and tail are kept."""
    display_last: bool = False
    """Show the value of the last line if it is an expression, as a notebook does. Python only."""
    type: str = "native"
    call: dict[str, Any] = {}
    """How calls are made: see `CallPolicy`."""

    @field_validator("sandbox_fusion_url", mode="before")
    @classmethod
    def _null_is_empty(cls, value: Any) -> Any:
        return "" if value is None else value

    @field_validator("default_language")
    @classmethod
    def _canonical_language(cls, value: str) -> str:
        return own_name(value) or value


class _LoopResources(NamedTuple):
    """The sandbox and limiter of one event loop."""

    sandbox: Sandbox
    limiter: Limiter | None


class SandboxFusionTool(BaseTool):
    """`toolyard.tools.code_interpreter.SandboxFusionTool` in YAML."""

    # The sandbox itself limits every program, and waiting for a slot is not the model's failure. Output is cut here,
    # per stream.
    call_defaults: Mapping[str, Any] = {"timeout_seconds": None, "max_response_chars": None, "repeatable": True}

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.settings = _validated(config)
        recovery = Recovery.RERUN if self.settings.stateful else Recovery.REPLAY
        self.call_defaults = {**self.call_defaults, "recovery": recovery}
        self._limits = self._limits_for(self.settings.default_timeout)
        self._trajectories: Trajectories[TrajectorySession] = Trajectories(TrajectorySession, most=_SESSIONS)
        self._workers = LocalLimiter(self.settings.num_workers)
        self._places = _places(self.settings, self.name)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return getattr(self, "tool_schema", None) or SCHEMA

    @property
    def limiter(self) -> Limiter | None:
        """The limiter of all executions. None: there is none, or no program has run yet."""
        return self._places.limiter

    # ---------------------------------------------------------------------------------------------- life cycle
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return self._trajectories.begin(instance_id, kwargs)[0], ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ExecuteResult:
        """Run `code`. The model may also give `language` and `timeout`, in seconds.

        Raises:
            ArgumentError: it cannot be run as requested.
            ToolyardError: our failure.
        """
        asked = parameters.get("language")
        named = str(asked or self.settings.default_language)
        language = own_name(named) or named
        try:
            seconds, cut = _seconds(parameters.get("timeout"), self.settings.default_timeout)
            limits = self._limits if seconds == self._limits.run_seconds else self._limits_for(seconds)
            session = self._trajectories.of(instance_id, kwargs)
            tenant = self._trajectories.key(instance_id, kwargs)
            source = _source(parameters.get("code", ""))
            text, metrics = await self._run(session, tenant, source, language, limits)
            if cut:
                text, metrics["timeout_cut_to"] = with_timeout_cut(text, seconds), seconds
            return ToolResponse(text=text), None, metrics
        except ToolchainMissingError as error:  # the installation hint is not for the model
            if not asked:
                raise ConfigError(f"config.default_language: {error}") from error
            _log.warning("%s: %s", self.name, error)
            raise self._refusal(f"language {language!r} is not installed here") from error
        except ProgramError as error:
            raise self._refusal(str(error)) from error

    def _refusal(self, why: str) -> ArgumentError:
        return ArgumentError(f"Error: {self.name} was not called: {why}")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return 0.0: running code earns nothing by itself."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        for session in self._trajectories.end(instance_id):
            await session.close()

    async def close(self) -> None:
        """End all sessions and the sandbox of this event loop. A later call opens another sandbox."""
        for session in self._trajectories.drain():
            await session.close()
        await self._places.close()

    # ------------------------------------------------------------------------------------------------- running
    async def _run(
        self, session: TrajectorySession, tenant: str, code: str, language: str, limits: Limits
    ) -> tuple[str, dict[str, Any]]:
        """Return what the model reads, and the metrics."""
        asked = time.monotonic()
        most = self.settings.max_output_chars
        python = language == "python"
        sandbox, limiter = await self._places.here()
        opened = time.monotonic()
        if python and self.settings.stateful:
            code = code if self.settings.display_last else f"{code}\nNone"  # a cell shows its last expression
            async with session.turn, permits(self._workers, limiter, tenant):
                waits = _Waits.now(asked, opened)
                cell, state_lost = await session.run(sandbox, self._limits, code, limits.run_seconds)
            text = (f"{LOST}\n" if state_lost else "") + cell_text(cell, limits, most, stateful=True)
            return text, _cell_metrics(cell, waits)
        async with permits(self._workers, limiter, tenant):
            waits = _Waits.now(asked, opened)
            if python and self.settings.display_last:
                async with sandbox.session(limits) as interpreter:
                    cell = await interpreter.run(code, seconds=limits.run_seconds)
                return cell_text(cell, limits, most, stateful=False), _cell_metrics(cell, waits)
            execution = await sandbox.run(Program(code, language), limits)
        return execution_text(execution, limits, most, python=python), _metrics(execution, waits)

    def _limits_for(self, seconds: float) -> Limits:
        limits = Limits(run_seconds=seconds, compile_seconds=max(seconds, _COMPILE_SECONDS))
        if "memory_limit_mb" not in self.settings.model_fields_set:
            return limits  # do not send a service a limit that was not configured
        return limits.model_copy(update={"memory_bytes": self.settings.memory_limit_mb * MIB})


def _places(settings: CodeInterpreterConfig, owner: str) -> Workplaces[_LoopResources]:
    """Refers to no tool: a tool that nobody closed then frees its limiter at once, not at the next collection."""

    async def open_resources(limiter: Limiter | None) -> _LoopResources:
        if limiter is None:
            _log.info("%s: at most %d executions in flight; no global limit", owner, settings.num_workers)
        return _LoopResources(await _new_sandbox(settings).__aenter__(), limiter)

    async def close_resources(resources: _LoopResources) -> None:
        await resources.sandbox.__aexit__(None, None, None)

    rate_limit = settings.rate_limit if settings.enable_global_rate_limit else None
    return Workplaces(open_resources, close_resources, rate_limit=rate_limit, owner=owner)


def _new_sandbox(settings: CodeInterpreterConfig) -> Sandbox:
    if settings.sandbox == "ray":
        return new_ray_sandbox()
    if settings.sandbox_fusion_url:
        return _service(settings.sandbox_fusion_url)
    # As many sessions as there are trajectories: that number is limited elsewhere.
    return LocalSandbox(max_sessions=1 << 20, session_idle_seconds=_SESSION_IDLE_SECONDS)


def _service(url: str | tuple[str, ...]) -> Sandbox:
    from toolyard.sandbox.remote.sandbox import RemoteSandbox  # aiohttp takes a third of a second, most of it for TLS

    return RemoteSandbox(url)


def _validated(config: dict[str, Any]) -> CodeInterpreterConfig:
    try:
        settings = CodeInterpreterConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            expected = ", ".join(CodeInterpreterConfig.model_fields)
            raise ConfigError(f"config: unknown key {where!r}; expected one of {expected}") from None
        raise ConfigError(f"config.{where}: {first['msg']}; given: {first['input']!r}") from None
    check_place(settings.sandbox, settings.sandbox_fusion_url)
    try:
        if settings.sandbox_fusion_url:
            _service(settings.sandbox_fusion_url)  # validates the URL
        else:
            find_language(settings.default_language)  # a service may support other languages
    except ProgramError as error:
        raise ConfigError(f"config.default_language: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"config.sandbox_fusion_url: {error}") from None
    return settings


def _seconds(asked: Any, default: float) -> tuple[float, bool]:
    """Return the time limit, and whether it is less than requested. Models also write numbers as text.

    Raises:
        ProgramError: it is not a number of seconds.
    """
    if asked is None or asked == "":
        return default, False
    try:
        seconds = 0.0 if isinstance(asked, bool) else float(asked)
    except OverflowError:  # an integer of hundreds of digits
        seconds = math.inf
    except (TypeError, ValueError):
        seconds = 0.0
    most = max(default, _MAX_SECONDS)
    if not seconds > 0:
        raise ProgramError(f"timeout: {str(asked)[:50]!r} is not a number of seconds above 0 and at most {most:g}")
    return min(seconds, most), seconds > most


def _source(code: Any) -> str:
    """Return the model's code with lone surrogates escaped: they cannot be encoded."""
    code = code if isinstance(code, str) else str(code)
    return code if code.isascii() else code.encode("utf-8", "backslashreplace").decode()


class _Waits(NamedTuple):
    """Seconds before a program could run."""

    total: float
    permit: float
    """Without opening the sandbox, which the first call does."""

    @classmethod
    def now(cls, asked: float, opened: float) -> Self:
        now = time.monotonic()
        return cls(now - asked, now - opened)


def _metrics(execution: Execution, waits: _Waits) -> dict[str, Any]:
    return {
        "verdict": execution.verdict.value,
        "exit_code": execution.exit_code,
        "run_seconds": execution.wall_seconds,
        "queue_seconds": waits.total + execution.queue_seconds,
        "permit_seconds": waits.permit,
        "isolation": str(execution.isolation),
    }


def _cell_metrics(cell: CellResult, waits: _Waits) -> dict[str, Any]:
    return {
        "verdict": cell.verdict.value,
        "run_seconds": cell.wall_seconds,
        "queue_seconds": waits.total,
        "permit_seconds": waits.permit,
        "session_lost": cell.session_lost,
    }
