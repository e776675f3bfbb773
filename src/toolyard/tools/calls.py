"""One call of a tool: its turn, its time, its retries, and what became of it.

Nothing here raises for what a model did or a tool raised. Cancellation is not the tool's to refuse: one that catches it
only delays it.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from toolyard.errors import ConfigError, LimiterError, SandboxBusyError, SandboxError, ToolyardError
from toolyard.limits.local import LocalLimiter
from toolyard.messages import JSON

from .answers import normalise, shortened
from .arguments import ArgumentError, Arguments
from .base import BaseTool, ToolResponse
from .policy import CallPolicy, Measure

_ERROR_CHARS = 500


class ToolOutcome(StrEnum):
    OK = "ok"
    BAD_ARGUMENTS = "bad_arguments"
    """The model's arguments are not what the tool asks for. It did nothing."""
    UNKNOWN_TOOL = "unknown_tool"
    """The model called a tool that this trajectory does not have."""
    TIMED_OUT = "timed_out"
    """The tool did not finish in time."""
    RAISED = "raised"
    """The tool raised. The model is told in short; `error` has the traceback."""
    FAILED = "failed"
    """Our failure: retries did not help. The answer says nothing about the model, and must not be scored."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """One call, as it ended."""

    tool: str
    outcome: ToolOutcome
    response: ToolResponse
    reward: float | None = None
    """The step reward, if the tool gave one."""
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 0.0
    """The wait for its turn included."""
    attempts: int = 0
    truncated: bool = False
    error: str | None = None
    """A traceback, or what went wrong; for the record, not for the model."""


@dataclass(slots=True)
class _Tries:
    start: float
    count: int = 0
    failure: BaseException | None = None
    """Of the last that was our failure, and was followed by another try."""


class ToolHandle:
    """A tool with what is the same for all its instances: the compiled check of its arguments, and its policy."""

    def __init__(self, tool: BaseTool) -> None:
        self.tool = tool
        self._arguments = Arguments(tool.tool_schema)
        given: Any = (tool.config or {}).get("call") or {}
        try:
            self.policy = CallPolicy.model_validate(
                {**tool.call_defaults, **given} if isinstance(given, Mapping) else given
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("config", "call", *first["loc"])))
            raise ConfigError(f"tool {tool.name!r}: {where}: {first['msg']}; given: {first['input']!r}") from None
        self._limiter = LocalLimiter(self.policy.concurrency) if self.policy.concurrency else None

    async def call(
        self, instance_id: str, arguments: str | Mapping[str, Any], kwargs: JSON, measure: Measure | None = None
    ) -> ToolResult:
        """Check the arguments, and `execute` with them and `kwargs`."""
        tries = _Tries(time.monotonic())
        try:
            parameters = self._arguments.check(arguments)
        except ArgumentError as error:
            return self._told(ToolOutcome.BAD_ARGUMENTS, str(error), str(error), tries)
        task = asyncio.current_task()
        assert task is not None
        cancellations = task.cancelling()
        answer = problem = deadline = None
        try:
            async with self._turn(instance_id):
                deadline = asyncio.timeout(self.policy.timeout_seconds)  # from now on
                async with deadline:
                    returned = await self._tried(instance_id, parameters, kwargs, tries)
            answer = normalise(returned)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            problem = error
        if task.cancelling() > cancellations:
            if isinstance(problem, asyncio.CancelledError):
                raise problem
            raise asyncio.CancelledError from problem
        if deadline is not None and deadline.expired():
            return self._overdue(problem, tries)
        if answer is None:
            assert problem is not None
            return self._raised(problem, tries)
        response, cut = shortened(answer[0], self.policy, measure)
        seconds = time.monotonic() - tries.start
        return ToolResult(self.tool.name, ToolOutcome.OK, response, answer[1], answer[2], seconds, tries.count, cut)

    def _turn(self, instance_id: str) -> AbstractAsyncContextManager[Any]:
        return nullcontext() if self._limiter is None else self._limiter.permit(instance_id)

    async def _tried(self, instance_id: str, parameters: JSON, kwargs: JSON, tries: _Tries) -> Any:
        pause = self.policy.retry_pause_seconds
        while True:
            tries.count += 1
            try:
                return await self.tool.execute(instance_id, dict(parameters), **kwargs)
            except Exception as raised:
                error = bare(raised)
                again = isinstance(error, ToolyardError) and error.retryable and tries.count <= self.policy.retries
                if not again:
                    raise
                tries.failure = error
            asked = error.retry_after if isinstance(error, SandboxBusyError) else None
            await asyncio.sleep(max(pause, asked or 0.0))
            pause *= 2

    def _overdue(self, problem: BaseException | None, tries: _Tries) -> ToolResult:
        if tries.failure is not None:  # it was our failure that took the time
            return self._raised(tries.failure, tries)
        said = f"Error: {self.tool.name} did not finish within {self.policy.timeout_seconds:g} s and was stopped"
        return self._told(ToolOutcome.TIMED_OUT, said, trace(problem or TimeoutError(said)), tries)

    def _raised(self, raised: BaseException, tries: _Tries) -> ToolResult:
        error = bare(raised)
        if isinstance(error, ArgumentError):  # a tool may check more than its schema says
            return self._told(ToolOutcome.BAD_ARGUMENTS, str(error), str(error), tries)
        if _is_ours(error):
            said = f"Error: {self.tool.name} is not available at the moment"
            return self._told(ToolOutcome.FAILED, said, trace(raised), tries)
        said = f"Error: {self.tool.name} failed: {in_short(error)}"
        return self._told(ToolOutcome.RAISED, said, trace(raised), tries)

    def _told(self, outcome: ToolOutcome, said: str, error: str, tries: _Tries) -> ToolResult:
        seconds = time.monotonic() - tries.start
        return ToolResult(
            self.tool.name, outcome, ToolResponse(text=said), seconds=seconds, attempts=tries.count, error=error
        )


def handle_of(tool: BaseTool) -> ToolHandle:
    """One for each tool."""
    handle: ToolHandle | None = getattr(tool, "_toolyard_handle", None)
    if handle is None:
        handle = ToolHandle(tool)
        tool._toolyard_handle = handle  # pyright: ignore  # noqa: SLF001 - lives and dies with the tool
    return handle


def _is_ours(error: BaseException) -> bool:
    """Whose failure it is: see `toolyard.errors`."""
    return isinstance(error, SandboxError | LimiterError | ConfigError) or (
        isinstance(error, ToolyardError) and error.retryable
    )


def bare(error: BaseException) -> BaseException:
    """Out of the groups that task groups put around a single error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        error = error.exceptions[0]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return error  # pyright: ignore[reportUnknownVariableType]


def in_short(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        said = str(error).strip()
    except Exception:
        said = ""
    said = said if len(said) <= _ERROR_CHARS else said[:_ERROR_CHARS] + "…"
    return f"{kind}: {said}" if said else kind


def trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
