"""One call of a tool: its turn, its time, its retries, and what became of it.

Nothing here raises for what a model did or a tool raised. Tools run in tasks of their own (`toolyard.supervision`),
plain functions in threads. A tool that ignores its cancellation is abandoned, and cannot hold up the trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from pydantic import ValidationError

from toolyard.errors import (
    ConfigError,
    LimiterError,
    SandboxBusyError,
    SandboxError,
    ToolyardError,
    blame,
    summarize,
    unwrap,
)
from toolyard.limits.local import LocalLimiter
from toolyard.messages import JSON
from toolyard.supervision import Call, loop_clock, run_in_thread
from toolyard.tools.answers import normalise, shortened
from toolyard.tools.arguments import ArgumentError, Arguments
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.policy import CallPolicy, Measure


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
    source: str = ""
    """What failed, where it is known better than by the tool's name: the URL of a server."""
    cause: str = ""
    """The last cause of a failure, in a line."""


@dataclass(slots=True)
class _Tries:
    start: float
    abandoned: list[str]
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
        self._what = f"tool {tool.name!r}: execute"

    def run(self, method: Callable[..., Any], *args: Any, what: str, of: str, **kwargs: Any) -> Call:
        """Begin `create`, `calc_reward` or `release`, within `finish_seconds`."""
        policy = self.policy
        return Call(
            run_method(method, *args, **kwargs), what, of, seconds=policy.finish_seconds, grace=policy.grace_seconds
        )

    async def call(
        self,
        instance_id: str,
        arguments: str | Mapping[str, Any],
        kwargs: JSON,
        measure: Measure | None = None,
        abandoned: list[str] | None = None,
    ) -> ToolResult:
        """Check the arguments, and `execute` with them and `kwargs`.

        What had to be abandoned is named in `abandoned`, also if this is cancelled.
        """
        tries = _Tries(time.monotonic(), [] if abandoned is None else abandoned)
        try:
            parameters = self._arguments.check(arguments)
        except ArgumentError as error:
            return self._told(ToolOutcome.BAD_ARGUMENTS, str(error), str(error), tries)
        if self._limiter is None:
            return await self._called(instance_id, parameters, kwargs, measure, tries)
        try:
            async with self._limiter.permit(instance_id):
                return await self._called(instance_id, parameters, kwargs, measure, tries)
        except LimiterError as error:
            return self._raised(error, tries)

    async def _called(
        self, instance_id: str, parameters: JSON, kwargs: JSON, measure: Measure | None, tries: _Tries
    ) -> ToolResult:
        policy, pause = self.policy, self.policy.retry_pause_seconds
        clock, left = loop_clock(), policy.timeout_seconds
        end = None if left is None else clock.now() + left
        while True:
            tries.count += 1
            work = run_method(self.tool.execute, instance_id, dict(parameters), **kwargs)
            call = Call(work, self._what, instance_id, seconds=left, grace=policy.grace_seconds, clock=clock)
            try:
                await call.ended()
            finally:
                if call.abandoned:
                    tries.abandoned.append(f"{call.what}, at {call.place}")
            if call.expired:
                return self._overdue(call.error, tries)
            if call.error is None:
                return self._answered(call.value, measure, tries)
            error = unwrap(call.error)
            if not (isinstance(error, ToolyardError) and error.retryable and tries.count <= policy.retries):
                return self._raised(call.error, tries)
            tries.failure = call.error
            wait = max(pause, error.retry_after or 0.0) if isinstance(error, SandboxBusyError) else pause
            left = None if end is None else end - clock.now() - wait
            if left is not None and left <= 0:
                return self._raised(call.error, tries)
            await asyncio.sleep(wait)
            pause *= 2

    def _answered(self, returned: Any, measure: Measure | None, tries: _Tries) -> ToolResult:
        try:
            said, reward, metrics = normalise(returned)
        except Exception as error:
            return self._raised(error, tries)
        response, cut = shortened(said, self.policy, measure)
        seconds = time.monotonic() - tries.start
        return ToolResult(self.tool.name, ToolOutcome.OK, response, reward, metrics, seconds, tries.count, cut)

    def _overdue(self, problem: BaseException | None, tries: _Tries) -> ToolResult:
        if tries.failure is not None:  # it was our failure that took the time
            return self._raised(tries.failure, tries)
        said = f"Error: {self.tool.name} did not finish within {self.policy.timeout_seconds:g} s and was stopped"
        return self._told(ToolOutcome.TIMED_OUT, said, trace(problem or TimeoutError(said)), tries)

    def _raised(self, raised: BaseException, tries: _Tries) -> ToolResult:
        error = unwrap(raised)
        if isinstance(error, ArgumentError):  # a tool may check more than its schema says
            return self._told(ToolOutcome.BAD_ARGUMENTS, str(error), str(error), tries)
        if _is_ours(error):
            said, found = f"Error: {self.tool.name} is not available at the moment", blame(error)
            result = self._told(ToolOutcome.FAILED, said, trace(raised), tries)
            return replace(result, source=found.source, cause=found.cause)
        said = f"Error: {self.tool.name} failed: {summarize(error)}"
        return self._told(ToolOutcome.RAISED, said, trace(raised), tries)

    def _told(self, outcome: ToolOutcome, said: str, error: str, tries: _Tries) -> ToolResult:
        seconds = time.monotonic() - tries.start
        return ToolResult(
            self.tool.name, outcome, ToolResponse(text=said), seconds=seconds, attempts=tries.count, error=error
        )


async def run_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a tool's method returns. A plain function runs in a thread: in the loop it would hold up everybody."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    returned = await run_in_thread(partial(method, *args, **kwargs), "toolyard tool")
    return await returned if inspect.isawaitable(returned) else returned


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


def trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
