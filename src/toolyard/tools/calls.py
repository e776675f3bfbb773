"""One call of a tool: waiting for a slot, time limit, retries, and outcome.

Nothing here raises for what a model did or a tool raised. Tools run in their own tasks (`toolyard.supervision`), plain
functions in threads. A tool that ignores its cancellation is abandoned; it cannot hold up the trajectory.
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
from toolyard.tools.answers import normalize, shorten
from toolyard.tools.arguments import ArgumentError, Arguments
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.policy import CallPolicy, Measure


class ToolOutcome(StrEnum):
    OK = "ok"
    BAD_ARGUMENTS = "bad_arguments"
    """The model's arguments do not match the tool's schema. The tool was not called."""
    UNKNOWN_TOOL = "unknown_tool"
    """The model called a tool that this trajectory does not have."""
    TIMED_OUT = "timed_out"
    """The tool did not finish in time."""
    RAISED = "raised"
    """The tool raised. The model gets a short message; `error` has the traceback."""
    FAILED = "failed"
    """Our failure: retries did not help. The answer says nothing about the model and must not be scored."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of one call."""

    tool: str
    outcome: ToolOutcome
    response: ToolResponse
    reward: float | None = None
    """The step reward, if the tool gave one."""
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 0.0
    """Includes the wait for a slot."""
    attempts: int = 0
    truncated: bool = False
    error: str | None = None
    """A traceback, or what went wrong; for the record, not for the model."""
    source: str = ""
    """What failed, if that is more specific than the tool's name: a server's URL."""
    cause: str = ""
    """The root cause of a failure, on one line."""
    started: float = 0.0
    """When it began, in seconds after the turn's tool calls began."""
    queue_seconds: float = 0.0
    """Wait for one of the tool's slots."""


@dataclass(slots=True)
class _Attempts:
    start: float
    abandoned: list[str]
    queued: float = 0.0
    count: int = 0
    failure: BaseException | None = None
    """The last failure of ours that was retried."""


class ToolHandle:
    """A tool with what all its instances share: the compiled argument check and the policy."""

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
        """Start `create`, `calc_reward` or `release`, limited to `finish_seconds`."""
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
        """Check the arguments, then call `execute` with them and `kwargs`.

        Abandoned calls are added to `abandoned`, even if this call is cancelled.
        """
        attempts = _Attempts(time.monotonic(), [] if abandoned is None else abandoned)
        try:
            parameters = self._arguments.check(arguments)
        except ArgumentError as error:
            return self._error_result(ToolOutcome.BAD_ARGUMENTS, str(error), str(error), attempts)
        if self._limiter is None:
            return await self._execute(instance_id, parameters, kwargs, measure, attempts)
        try:
            async with self._limiter.permit(instance_id):
                attempts.queued = time.monotonic() - attempts.start
                return await self._execute(instance_id, parameters, kwargs, measure, attempts)
        except LimiterError as error:
            return self._failure(error, attempts)

    async def _execute(
        self, instance_id: str, parameters: JSON, kwargs: JSON, measure: Measure | None, attempts: _Attempts
    ) -> ToolResult:
        policy, pause = self.policy, self.policy.retry_pause_seconds
        clock, left = loop_clock(), policy.timeout_seconds
        end = None if left is None else clock.now() + left
        while True:
            attempts.count += 1
            work = run_method(self.tool.execute, instance_id, dict(parameters), **kwargs)
            call = Call(work, self._what, instance_id, seconds=left, grace=policy.grace_seconds, clock=clock)
            try:
                await call.ended()
            finally:
                if call.abandoned:
                    attempts.abandoned.append(f"{call.what}, at {call.place}")
            if call.expired:
                return self._timed_out(call.error, attempts)
            if call.error is None:
                return self._success(call.value, measure, attempts)
            error = unwrap(call.error)
            if not (isinstance(error, ToolyardError) and error.retryable and attempts.count <= policy.retries):
                return self._failure(call.error, attempts)
            attempts.failure = call.error
            wait = max(pause, error.retry_after or 0.0) if isinstance(error, SandboxBusyError) else pause
            left = None if end is None else end - clock.now() - wait
            if left is not None and left <= 0:
                return self._failure(call.error, attempts)
            await asyncio.sleep(wait)
            pause *= 2

    def _success(self, returned: Any, measure: Measure | None, attempts: _Attempts) -> ToolResult:
        try:
            full_response, reward, metrics = normalize(returned)
        except Exception as error:
            return self._failure(error, attempts)
        response, cut = shorten(full_response, self.policy, measure)
        seconds = time.monotonic() - attempts.start
        return ToolResult(
            self.tool.name,
            ToolOutcome.OK,
            response,
            reward,
            metrics,
            seconds,
            attempts.count,
            cut,
            queue_seconds=attempts.queued,
        )

    def _timed_out(self, problem: BaseException | None, attempts: _Attempts) -> ToolResult:
        if attempts.failure is not None:  # the time went into retrying our failure
            return self._failure(attempts.failure, attempts)
        message = f"Error: {self.tool.name} did not finish within {self.policy.timeout_seconds:g} s and was stopped"
        return self._error_result(ToolOutcome.TIMED_OUT, message, trace(problem or TimeoutError(message)), attempts)

    def _failure(self, raised: BaseException, attempts: _Attempts) -> ToolResult:
        error = unwrap(raised)
        if isinstance(error, ArgumentError):  # a tool may check more than its schema says
            return self._error_result(ToolOutcome.BAD_ARGUMENTS, str(error), str(error), attempts)
        if _is_ours(error):
            message, found = f"Error: {self.tool.name} is not available at the moment", blame(error)
            result = self._error_result(ToolOutcome.FAILED, message, trace(raised), attempts)
            return replace(result, source=found.source, cause=found.cause)
        message = f"Error: {self.tool.name} failed: {summarize(error)}"
        return self._error_result(ToolOutcome.RAISED, message, trace(raised), attempts)

    def _error_result(self, outcome: ToolOutcome, message: str, error: str, attempts: _Attempts) -> ToolResult:
        seconds = time.monotonic() - attempts.start
        return ToolResult(
            self.tool.name,
            outcome,
            ToolResponse(text=message),
            seconds=seconds,
            attempts=attempts.count,
            error=error,
            queue_seconds=attempts.queued,
        )


async def run_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a tool's method. A plain function runs in a thread: in the event loop it would block everything else."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    returned = await run_in_thread(partial(method, *args, **kwargs), "toolyard tool")
    return await returned if inspect.isawaitable(returned) else returned


def handle_of(tool: BaseTool) -> ToolHandle:
    """Return the tool's handle; there is one per tool."""
    handle: ToolHandle | None = getattr(tool, "_toolyard_handle", None)
    if handle is None:
        handle = ToolHandle(tool)
        use_handle(handle)
    return handle


def use_handle(handle: ToolHandle) -> None:
    """Make it the handle of its tool."""
    handle.tool._toolyard_handle = handle  # pyright: ignore  # noqa: SLF001 - lives and dies with the tool


def _is_ours(error: BaseException) -> bool:
    """Whether it is our failure: see `toolyard.errors`."""
    return isinstance(error, SandboxError | LimiterError | ConfigError) or (
        isinstance(error, ToolyardError) and error.retryable
    )


def trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
