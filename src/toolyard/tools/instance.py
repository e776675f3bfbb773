"""A tool's state for one trajectory, owned by a context manager: created once and ended exactly once.

    async with open_instances(tools, request_id, tools_kwargs) as instances:
        result = await instances.call("code_interpreter", '{"code": "print(6 * 7)"}')
    instances["calc_gsm8k_reward"].reward

Nothing here raises for what a model did: an unknown name, invalid arguments or a tool that raises become a result whose
text explains the problem to the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from toolyard.errors import OURS, TASK, ConfigError, ToolError, ToolyardError, blame, summarize, unwrap
from toolyard.messages import JSON
from toolyard.rewards.explanation import Explanation, explanation_in
from toolyard.supervision import Call, uninterrupted
from toolyard.tools.answers import as_reward, created_id, created_response
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.calls import ToolHandle, ToolOutcome, ToolResult, handle_of, trace
from toolyard.tools.policy import Measure

__all__ = [
    "ToolHandle",
    "ToolInstance",
    "ToolInstances",
    "ToolOutcome",
    "ToolResult",
    "handle_of",
    "open_instance",
    "open_instances",
]

_log = logging.getLogger(__name__)
_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


class ToolInstance:
    """Created by `open_instance`."""

    def __init__(self, handle: ToolHandle, kwargs: Mapping[str, JSON], abandoned: list[str]) -> None:
        self.tool = handle.tool
        self.instance_id = ""
        self.creation = ToolResponse()
        """The response of `create`, if any."""
        self.reward: float | None = None
        """Result of `calc_reward`, once the block is left. None if it returned none or failed: see `rewarded`."""
        self.rewarded = False
        """Whether `calc_reward` completed."""
        self.explanation: Explanation | None = None
        """What `explain_reward` said."""
        self.step_rewards: list[float] = []
        self.outcomes: Counter[ToolOutcome] = Counter()
        self.problems: list[str] = []
        """Tracebacks of `calc_reward`, `explain_reward` and `release`."""
        self.our_failure = False
        """Whether the reward is missing because of our failure."""
        self.abandoned = abandoned
        """Calls of the trajectory's tools that ignored their cancellation, with the line they are stuck at."""
        self.begun = False
        """Whether `create` has returned, so that there is something to end."""
        self._handle = handle
        self._kwargs = kwargs
        self._open = False
        self._calls = 0
        self._idle: asyncio.Event | None = None
        """Set when the last call ends, if closing the instance waits for it."""

    async def call(self, arguments: str | Mapping[str, Any], *, measure: Measure | None = None) -> ToolResult:
        """Call the tool. `measure` counts tokens, if the policy limits them."""
        if not self._open:
            raise RuntimeError(f"tool {self.tool.name!r}: this trajectory's instance is not open")
        self._calls += 1
        try:
            result = await self._handle.call(
                self.instance_id, arguments, self._kwargs["execute_kwargs"], measure, self.abandoned
            )
        finally:
            self._calls -= 1
            if not self._calls and self._idle is not None:
                self._idle.set()
        self.outcomes[result.outcome] += 1
        if result.reward is not None:
            self.step_rewards.append(result.reward)
        return result

    # ---------------------------------------------------------------------------------------------- begin and end
    def create(self, request_id: str) -> Call | None:
        """Start `create`. None if the tool does not override it."""
        if type(self.tool).create is BaseTool.create:
            self.begun, self.instance_id, self._open = True, request_id, True
            return None
        return self._run("create", self.tool.create, request_id, of=request_id)

    def created(self, request_id: str, call: Call) -> ToolError | None:
        """Process the outcome of `create`. If it returned, there is something to release, even if it is invalid."""
        if call.abandoned:
            self.abandoned.append(f"{call.what}, at {call.place}")
        error = None if call.error is None else unwrap(call.error)
        if not call.abandoned and error is None:
            self.begun = True
            try:
                self.instance_id = created_id(call.value, request_id)
                self.creation = created_response(call.value)
            except Exception as problem:
                error = problem
        if call.expired:
            error = error if isinstance(error, Exception) else TimeoutError()
            return self._failed(f"took more than {self._handle.policy.finish_seconds:g} s", error)
        if error is not None:
            return self._failed(f"failed: {summarize(error)}", error)
        self._open = True
        return None

    def _failed(self, why: str, error: BaseException) -> ToolError:
        problem = ToolError(f"tool {self.tool.name!r}: create {why}")
        problem.source = f"tool {self.tool.name!r}"
        problem.whose = TASK  # the tool failed on the task's arguments; our own errors carry their own blame
        problem.retryable = isinstance(error, ToolyardError) and error.retryable
        problem.__cause__ = error
        return problem

    def last_call(self) -> Call | None:
        """Close the instance, and wait for calls still running: they must not find it gone."""
        self._open = False
        if not self._calls:
            return None
        self._idle = asyncio.Event()
        return self._run("the last call", self._idle.wait)

    def calc_reward(self) -> Call | None:
        if type(self.tool).calc_reward is BaseTool.calc_reward:
            self.reward, self.rewarded = 0.0, True
            return None
        return self._run("calc_reward", self.tool.calc_reward, self.instance_id)

    def explain_reward(self) -> Call | None:
        if self.reward is None or not _explains(type(self.tool)):
            return None
        return self._run("explain_reward", self.tool.explain_reward, self.instance_id)

    def release(self) -> Call | None:
        if type(self.tool).release is BaseTool.release:
            return None
        return self._run("release", self.tool.release, self.instance_id)

    def ended(self, stage: str, call: Call) -> None:
        """Record the outcome of one stage. A failure hides neither the other stages nor the reward."""
        error = call.error
        if stage == "calc_reward" and error is None and not call.expired:
            try:
                self.reward = None if call.value is None else as_reward(call.value)
                self.rewarded = True
            except ValueError as problem:
                error = problem
        if stage == "explain_reward" and error is None:
            self.explanation = explanation_in(call.value)
        if error is None and not call.expired:
            return
        stage = call.what.rpartition(": ")[2]
        late = f"{stage} took more than {self._handle.policy.finish_seconds:g} s\n" if call.expired else ""
        self.problems.append(late + ("" if error is None else trace(error)))
        self.our_failure = self.our_failure or (
            stage == "calc_reward" and isinstance(error, ToolyardError) and blame(error).whose == OURS
        )
        why = late.strip() or f"{stage} failed: {summarize(unwrap(error or TimeoutError()))}"
        _log.warning("tool %r, instance %r: %s", self.tool.name, self.instance_id, why)

    def _run(self, stage: str, method: Callable[..., Any], *args: Any, of: str = "") -> Call:
        kwargs = self._kwargs.get(f"{stage}_kwargs", {})
        what = f"tool {self.tool.name!r}: {stage}"
        return self._handle.run(method, *args, what=what, of=of or self.instance_id, **kwargs)


class ToolInstances(Mapping[str, ToolInstance]):
    """All tools of one trajectory, by name."""

    def __init__(self, instances: Mapping[str, ToolInstance]) -> None:
        self._instances = instances
        self._unknown = 0

    @property
    def outcomes(self) -> Counter[ToolOutcome]:
        """Outcomes of all calls, including calls of unknown tools."""
        counts = Counter({ToolOutcome.UNKNOWN_TOOL: self._unknown} if self._unknown else {})
        return sum((instance.outcomes for instance in self._instances.values()), counts)

    def call(
        self, name: str, arguments: str | Mapping[str, Any], *, measure: Measure | None = None
    ) -> Coroutine[Any, Any, ToolResult]:
        """See `ToolInstance.call`."""
        instance = self._instances.get(name)
        return self._unknown_tool(name) if instance is None else instance.call(arguments, measure=measure)

    async def _unknown_tool(self, name: str) -> ToolResult:
        self._unknown += 1
        there = ", ".join(self._instances) or "none"
        message = f"Error: there is no tool {name[:100]!r}. Tools that can be called: {there}"
        return ToolResult(name, ToolOutcome.UNKNOWN_TOOL, ToolResponse(text=message), error=message)

    def __getitem__(self, name: str) -> ToolInstance:
        return self._instances[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._instances)

    def __len__(self) -> int:
        return len(self._instances)


@asynccontextmanager
async def open_instances(
    tools: Mapping[str, BaseTool],
    request_id: str,
    tools_kwargs: Mapping[str, Mapping[str, JSON]] | None = None,
    abandoned: list[str] | None = None,
) -> AsyncGenerator[ToolInstances]:
    """Create instances of all `tools` concurrently; if one fails, end the others.

    Calls that ignore their cancellation are named in `abandoned`.

    If cancelled, it first ends what was created: a running `create` is awaited and then released.

    Raises:
        ToolError: the first `create` that failed.
        ConfigError: `tools_kwargs` is invalid.
    """
    given, left = tools_kwargs or {}, [] if abandoned is None else abandoned
    unknown = [name for name, kwargs in given.items() if kwargs and name not in tools]
    if unknown:
        there = ", ".join(tools) or "no tools"
        raise ConfigError(f"tools_kwargs: unknown tool {', '.join(map(repr, sorted(unknown)))}; available: {there}")
    instances = {
        name: ToolInstance(handle_of(tool), _checked_kwargs(name, given.get(name)), left)
        for name, tool in tools.items()
    }
    try:
        creating = {one: call for one in instances.values() if (call := one.create(request_id)) is not None}
        try:
            # Even if we are cancelled: otherwise we would not know what to release.
            await uninterrupted(*creating.values())
        finally:
            problems = [one.created(request_id, call) for one, call in creating.items()]
        for problem in problems:
            if problem is not None:
                raise problem
        yield ToolInstances(instances)
    finally:
        await _end([instance for instance in instances.values() if instance.begun])


async def _end(instances: Sequence[ToolInstance]) -> None:
    """Run `calc_reward`, `explain_reward`, then `release`. Cancellations are deferred until all have run."""
    cancelled = False
    for stage in ("last_call", "calc_reward", "explain_reward", "release"):
        begun = {one: call for one in instances if (call := getattr(one, stage)()) is not None}
        try:
            await uninterrupted(*begun.values())
        except asyncio.CancelledError:
            cancelled = True
        for instance, call in begun.items():
            if call.abandoned:
                instance.abandoned.append(f"{call.what}, at {call.place}")
            instance.ended(stage, call)
    if cancelled:
        raise asyncio.CancelledError


@asynccontextmanager
async def open_instance(
    tool: BaseTool, request_id: str, kwargs: Mapping[str, JSON] | None = None
) -> AsyncGenerator[ToolInstance]:
    """Like `open_instances`, for one tool."""
    async with open_instances({tool.name: tool}, request_id, {tool.name: kwargs or {}}) as instances:
        yield instances[tool.name]


def _explains(tool: type) -> bool:
    """Whether it explains its own `calc_reward`. A class that overrides only that one inherits a false explanation."""
    names = ("explain_reward", "calc_reward")
    explaining, calculating = (next((it for it in tool.__mro__ if name in vars(it)), BaseTool) for name in names)
    return explaining is not BaseTool and issubclass(explaining, calculating)


def _checked_kwargs(name: str, given: Mapping[str, JSON] | None) -> dict[str, JSON]:
    given = given or {}
    unknown = given.keys() - _KWARGS
    if unknown:
        raise ConfigError(f"tools_kwargs[{name!r}]: unknown key {min(unknown)!r}; expected {', '.join(_KWARGS)}")
    for key, kwargs in given.items():
        if kwargs and not isinstance(kwargs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"tools_kwargs[{name!r}][{key!r}]: expected a mapping, not {type(kwargs).__name__}")
    return {key: dict(given.get(key) or {}) for key in _KWARGS}
