"""A tool's state for one trajectory, owned by a context manager: created once, ended exactly once, whatever happens.

    async with open_instances(tools, request_id, tools_kwargs) as instances:
        result = await instances.call("code_interpreter", '{"code": "print(6 * 7)"}')
    instances["calc_gsm8k_reward"].reward

Nothing here raises for what a model did: a wrong name, wrong arguments or a tool that raises become a result, whose
text tells the model what was wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from toolyard.errors import ConfigError, ToolError, ToolyardError
from toolyard.messages import JSON

from .answers import as_reward, created_id, created_response
from .base import BaseTool, ToolResponse
from .calls import ToolHandle, ToolOutcome, ToolResult, bare, handle_of, in_short, trace
from .policy import Measure

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
T = TypeVar("T")
_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


class ToolInstance:
    """Made by `open_instance`."""

    def __init__(self, handle: ToolHandle, kwargs: Mapping[str, JSON]) -> None:
        self.tool = handle.tool
        self.instance_id = ""
        self.creation = ToolResponse()
        """What `create` had to say to the model, if anything."""
        self.reward: float | None = None
        """Of `calc_reward`, once the block is left. None if it gave none, or failed: see `rewarded`."""
        self.rewarded = False
        """`calc_reward` came to its end."""
        self.step_rewards: list[float] = []
        self.outcomes: Counter[ToolOutcome] = Counter()
        self.problems: list[str] = []
        """Tracebacks of `calc_reward` and `release`."""
        self.begun = False
        """`create` has returned: there is something to end."""
        self._handle = handle
        self._kwargs = kwargs
        self._open = False
        self._calls = 0
        self._quiet: asyncio.Event | None = None
        """Set when the last call has ended, if the instance's end waits for it."""

    async def call(self, arguments: str | Mapping[str, Any], *, measure: Measure | None = None) -> ToolResult:
        """Call the tool. `measure` counts tokens, where the policy limits them."""
        if not self._open:
            raise RuntimeError(f"tool {self.tool.name!r}: this trajectory's instance is not open")
        self._calls += 1
        try:
            result = await self._handle.call(self.instance_id, arguments, self._kwargs["execute_kwargs"], measure)
        finally:
            self._calls -= 1
            if not self._calls and self._quiet is not None:
                self._quiet.set()
        self.outcomes[result.outcome] += 1
        if result.reward is not None:
            self.step_rewards.append(result.reward)
        return result

    # ---------------------------------------------------------------------------------------------- begin and end
    async def begin(self, request_id: str) -> ToolError | None:
        seconds = self._handle.policy.finish_seconds
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                created: Any = await self.tool.create(request_id, **self._kwargs["create_kwargs"])
            # From here on there is something to release, whatever is wrong with what came with it.
            self.begun, self.instance_id = True, created_id(created, request_id)
            self.creation = created_response(created)
        except (Exception, SystemExit, asyncio.CancelledError) as raised:
            error = bare(raised)
            why = f"took more than {seconds:g} s" if deadline.expired() else f"failed: {in_short(error)}"
            problem = ToolError(f"tool {self.tool.name!r}: create {why}")
            problem.retryable = isinstance(error, ToolyardError) and error.retryable
            problem.__cause__ = error
            return problem
        self._open = True
        return None

    async def end(self) -> None:
        """`calc_reward`, then `release`. One that fails is noted, and hides neither the other nor the reward."""
        self._open = False
        if self._calls:  # in tasks that nobody awaited: they must not find the instance gone
            self._quiet = asyncio.Event()
            await self._finished("the last call", self._quiet.wait)

        async def calc_reward() -> None:
            reward: Any = await self.tool.calc_reward(self.instance_id, **self._kwargs["calc_reward_kwargs"])
            self.reward = None if reward is None else as_reward(reward)
            self.rewarded = True

        async def release() -> None:
            await self.tool.release(self.instance_id, **self._kwargs["release_kwargs"])

        await self._finished("calc_reward", calc_reward)
        await self._finished("release", release)

    async def _finished(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        seconds = self._handle.policy.finish_seconds
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                await work()
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # Cancelled: this task is ours alone, so that is the end of the whole event loop, or the tool's own doing.
            late = f"{what} took more than {seconds:g} s\n" if deadline.expired() else ""
            self.problems.append(late + trace(error))
            why = late.strip() or f"{what} failed: {in_short(bare(error))}"
            _log.warning("tool %r, instance %r: %s", self.tool.name, self.instance_id, why)


class ToolInstances(Mapping[str, ToolInstance]):
    """All tools of one trajectory, by name."""

    def __init__(self, instances: Mapping[str, ToolInstance]) -> None:
        self._instances = instances
        self._unknown = 0

    @property
    def outcomes(self) -> Counter[ToolOutcome]:
        """Of all calls, also of tools that are not there."""
        counts = Counter({ToolOutcome.UNKNOWN_TOOL: self._unknown} if self._unknown else {})
        return sum((instance.outcomes for instance in self._instances.values()), counts)

    async def call(
        self, name: str, arguments: str | Mapping[str, Any], *, measure: Measure | None = None
    ) -> ToolResult:
        instance = self._instances.get(name)
        if instance is None:
            self._unknown += 1
            there = ", ".join(self._instances) or "none"
            said = f"Error: there is no tool {name[:100]!r}. Tools that can be called: {there}"
            return ToolResult(name, ToolOutcome.UNKNOWN_TOOL, ToolResponse(text=said), error=said)
        return await instance.call(arguments, measure=measure)

    def __getitem__(self, name: str) -> ToolInstance:
        return self._instances[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._instances)

    def __len__(self) -> int:
        return len(self._instances)


@asynccontextmanager
async def open_instances(
    tools: Mapping[str, BaseTool], request_id: str, tools_kwargs: Mapping[str, Mapping[str, JSON]] | None = None
) -> AsyncGenerator[ToolInstances]:
    """Instances of all `tools`, created at the same time; if one cannot be, those that were are ended.

    Cancelled, it ends what was created before it lets go: a creation is finished and then released.

    Raises:
        ToolError: of the first that could not be created.
        ConfigError: `tools_kwargs` is not what it should be.
    """
    given = tools_kwargs or {}
    unknown = [name for name, kwargs in given.items() if kwargs and name not in tools]
    if unknown:
        there = ", ".join(tools) or "no tools"
        raise ConfigError(
            f"tools_kwargs: no tool is called {', '.join(map(repr, sorted(unknown)))}; there are: {there}"
        )
    instances = {
        name: ToolInstance(handle_of(tool), _checked_kwargs(name, given.get(name))) for name, tool in tools.items()
    }
    try:
        # To its end even if we are cancelled meanwhile: or nobody would know what there is to release.
        problems = await to_the_end(instance.begin(request_id) for instance in instances.values())
        for problem in problems:
            if problem is not None:
                raise problem
        yield ToolInstances(instances)
    finally:
        await to_the_end(instance.end() for instance in instances.values() if instance.begun)


@asynccontextmanager
async def open_instance(
    tool: BaseTool, request_id: str, kwargs: Mapping[str, JSON] | None = None
) -> AsyncGenerator[ToolInstance]:
    """The same for one tool."""
    async with open_instances({tool.name: tool}, request_id, {tool.name: kwargs or {}}) as instances:
        yield instances[tool.name]


async def to_the_end(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all of `works` at once, whatever cancellations come; they are delivered afterwards.

    Not a task group, which would cancel them when it is cancelled itself.
    """
    tasks = [asyncio.create_task(work) for work in works]
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return [task.result() for task in tasks]


def _checked_kwargs(name: str, given: Mapping[str, JSON] | None) -> dict[str, JSON]:
    given = given or {}
    unknown = given.keys() - _KWARGS
    if unknown:
        raise ConfigError(f"tools_kwargs[{name!r}]: unknown key {min(unknown)!r}; expected {', '.join(_KWARGS)}")
    for key, kwargs in given.items():
        if kwargs and not isinstance(kwargs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"tools_kwargs[{name!r}][{key!r}]: expected a mapping, not {type(kwargs).__name__}")
    return {key: dict(given.get(key) or {}) for key in _KWARGS}
