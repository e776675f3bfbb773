"""The life of an instance: created once, ended exactly once, whatever happens and whatever cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from toolyard.errors import ConfigError, SandboxError, ToolError
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.instance import ToolOutcome, open_instance, open_instances

STAGES = ("create", "execute", "calc_reward", "release")


def schema(name: str = "echo") -> OpenAIFunctionToolSchema:
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": name}})


class Recorder(BaseTool):
    """Records how it is used. `at` adds an action to a stage: raising or waiting."""

    def __init__(self, name: str = "echo", config: dict[str, Any] | None = None, **at: Callable[[], Awaitable[Any]]):
        super().__init__(config or {}, schema(name))
        self.at = at
        self.begun: list[str] = []
        self.done: list[str] = []
        self.kwargs: dict[str, Any] = {}
        self.reached = {stage: asyncio.Event() for stage in STAGES}

    async def _pass(self, stage: str, kwargs: dict[str, Any]) -> Any:
        self.begun.append(stage)
        self.kwargs[stage] = kwargs
        self.reached[stage].set()
        answer = await self.at[stage]() if stage in self.at else None
        self.done.append(stage)
        return answer

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return await self._pass("create", kwargs) or (instance_id, ToolResponse())

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return await self._pass("execute", kwargs) or (ToolResponse(text=f"for {instance_id}"), None, {})

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._pass("calc_reward", kwargs) or 0.5

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._pass("release", kwargs)


def raising(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def act() -> None:
        raise error

    return act


def sleeping(seconds: float) -> Callable[[], Awaitable[Any]]:
    async def act() -> None:
        await asyncio.sleep(seconds)

    return act


def returning(value: Any) -> Callable[[], Awaitable[Any]]:
    async def act() -> Any:
        return value

    return act


async def trajectory(tool: BaseTool) -> None:
    async with open_instance(tool, "r1") as instance:
        await instance.call({})


# The usual way --------------------------------------------------------------------------------------------------------


async def test_an_instance_is_created_called_rewarded_and_released() -> None:
    tool = Recorder()
    async with open_instance(tool, "r1") as instance:
        assert (instance.instance_id, instance.reward) == ("r1", None)
        for _ in range(3):
            assert (await instance.call({})).response.text == "for r1"
        assert tool.done == ["create", "execute", "execute", "execute"]
    assert tool.done == ["create", "execute", "execute", "execute", "calc_reward", "release"]
    assert (instance.reward, instance.problems) == (0.5, [])


async def test_each_stage_gets_its_own_kwargs() -> None:
    tool = Recorder()
    kwargs = {f"{stage}_kwargs": {"stage": stage} for stage in STAGES}
    async with open_instance(tool, "r1", kwargs) as instance:
        await instance.call({})
    assert tool.kwargs == {stage: {"stage": stage} for stage in STAGES}


async def test_calls_of_one_instance_run_at_the_same_time() -> None:
    together = asyncio.Barrier(3)
    tool = Recorder(execute=together.wait)
    async with open_instance(tool, "r1") as instance, asyncio.timeout(5), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(instance.call({}))
    assert tool.done.count("execute") == 3


async def test_instances_are_created_and_ended_at_the_same_time() -> None:
    starts, ends = asyncio.Barrier(3), asyncio.Barrier(3)
    tools = {name: Recorder(name, create=starts.wait, release=ends.wait) for name in ("a", "b", "c")}
    async with asyncio.timeout(5), open_instances(tools, "r1") as instances:
        assert list(instances) == ["a", "b", "c"]


async def test_what_create_says_is_kept_for_the_conversation() -> None:
    tool = Recorder(create=returning(("chosen", ToolResponse(text="You have three tries."))))
    async with open_instance(tool, "r1") as instance:
        assert (instance.instance_id, instance.creation.text) == ("chosen", "You have three tries.")
        assert (await instance.call({})).response.text == "for chosen"


@pytest.mark.parametrize(
    ("returned", "instance_id"), [("mine", "mine"), (("mine",), "mine"), (("mine", None), "mine"), ((None, None), "r1")]
)
async def test_older_tools_return_only_an_id_from_create(returned: Any, instance_id: str) -> None:
    async with open_instance(Recorder(create=returning(returned)), "r1") as instance:
        assert instance.instance_id == instance_id
        assert instance.creation.is_empty()


async def test_a_tool_whose_create_returns_nothing_goes_by_the_request() -> None:
    class Silent(BaseTool):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> None:  # type: ignore[override]
            pass

    async with open_instance(Silent({}, schema()), "r1") as instance:
        assert instance.instance_id == "r1"


async def test_an_instance_cannot_be_called_outside_its_block() -> None:
    async with open_instance(Recorder(), "r1") as instance:
        pass
    with pytest.raises(RuntimeError, match="'echo': this trajectory's instance is not open"):
        await instance.call({})


# Failures -------------------------------------------------------------------------------------------------------------


async def test_an_exception_in_the_body_ends_the_instance_and_goes_on() -> None:
    tool = Recorder()
    with pytest.raises(ZeroDivisionError):
        async with open_instance(tool, "r1"):
            raise ZeroDivisionError
    assert tool.done == ["create", "calc_reward", "release"]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(2), asyncio.CancelledError()])
async def test_a_failing_calc_reward_gives_no_reward_and_release_still_runs(error: BaseException) -> None:
    tool = Recorder(calc_reward=raising(error))
    async with open_instance(tool, "r1") as instance:
        pass
    assert tool.done == ["create", "release"]
    assert instance.reward is None
    assert [type(error).__name__ in problem and "Traceback" in problem for problem in instance.problems] == [True]


async def test_a_failing_release_is_noted_and_logged_and_the_reward_kept(caplog: pytest.LogCaptureFixture) -> None:
    tool = Recorder(release=raising(OSError("the server is gone")))
    async with open_instance(tool, "r1") as instance:
        pass
    assert instance.reward == 0.5
    assert ["the server is gone" in problem for problem in instance.problems] == [True]
    assert "tool 'echo', instance 'r1': release failed: OSError: the server is gone" in caplog.text


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "0.5", [1]])
async def test_a_reward_that_is_no_number_is_none_and_noted(reward: Any) -> None:
    async with open_instance(Recorder(calc_reward=returning(reward)), "r1") as instance:
        pass
    assert instance.reward is None
    assert "is not a finite number" in instance.problems[0]


async def test_a_tool_without_a_reward_has_none_and_nothing_is_wrong() -> None:
    class NoReward(BaseTool):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
            return None

    async with open_instance(NoReward({}, schema()), "r1") as instance:
        pass
    assert (instance.reward, instance.problems) == (None, [])


@pytest.mark.parametrize("stage", ["calc_reward", "release"])
async def test_an_end_that_takes_too_long_is_stopped_and_noted(stage: str) -> None:
    tool = Recorder(config={"call": {"finish_seconds": 0.05}}, **{stage: sleeping(60)})
    async with asyncio.timeout(5):
        async with open_instance(tool, "r1") as instance:
            pass
    assert instance.problems[0].startswith(f"{stage} took more than 0.05 s")
    assert tool.begun == ["create", "calc_reward", "release"]


async def test_a_create_that_raises_is_a_tool_error_and_its_siblings_are_ended() -> None:
    failing = Recorder("failing", create=raising(ValueError("no ground truth")))
    siblings = {"a": Recorder("a"), "b": Recorder("b", create=sleeping(0.05))}
    with pytest.raises(ToolError, match=r"^tool 'failing': create failed: ValueError: no ground truth$") as raised:
        async with open_instances({"failing": failing, **siblings}, "r1"):
            pytest.fail("the block must not be entered")
    assert not raised.value.retryable
    assert isinstance(raised.value.__cause__, ValueError)
    assert failing.begun == ["create"], "what was not created is not released"
    assert all(sibling.done == ["create", "calc_reward", "release"] for sibling in siblings.values())


async def test_whether_creating_again_may_help_is_known() -> None:
    with pytest.raises(ToolError) as raised:
        await trajectory(Recorder(create=raising(SandboxError("busy"))))
    assert raised.value.retryable


async def test_a_create_that_takes_too_long_is_a_tool_error() -> None:
    tool = Recorder(config={"call": {"finish_seconds": 0.05}}, create=sleeping(60))
    with pytest.raises(ToolError, match=r"^tool 'echo': create took more than 0\.05 s$"):
        await trajectory(tool)


async def test_a_creation_that_cannot_be_shown_is_released_all_the_same() -> None:
    tool = Recorder(create=returning(("mine", {"image": "no list"})))
    with pytest.raises(ToolError, match="create failed: ValidationError"):
        await trajectory(tool)
    assert tool.done == ["create", "calc_reward", "release"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"other": {"create_kwargs": {"x": 1}}}, r"unknown tool 'other'; available: echo"),
        ({"echo": {"create": {}}}, r"\['echo'\]: unknown key 'create'; expected create_kwargs, execute_kwargs"),
        ({"echo": {"create_kwargs": [1]}}, r"\['echo'\]\['create_kwargs'\]: expected a mapping, not list"),
    ],
)
async def test_wrong_tools_kwargs_are_named_before_anything_is_created(kwargs: Any, message: str) -> None:
    tool = Recorder()
    with pytest.raises(ConfigError, match=message):
        async with open_instances({"echo": tool}, "r1", kwargs):
            pass
    assert tool.begun == []


async def test_parquet_fills_rows_with_nulls_which_mean_nothing() -> None:
    kwargs: Any = {"other": None, "echo": {"create_kwargs": None, "release_kwargs": None}}
    async with open_instances({"echo": Recorder()}, "r1", kwargs) as instances:
        assert (await instances.call("echo", {})).outcome is ToolOutcome.OK


# Cancellation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("times", [1, 2])
async def test_cancelled_at_any_stage_the_instance_is_ended_once(stage: str, times: int) -> None:
    tool = Recorder(**{stage: sleeping(0.1)})
    running = asyncio.create_task(trajectory(tool))
    await tool.reached[stage].wait()
    for _ in range(times):
        running.cancel()
        await asyncio.sleep(0.02)
    with pytest.raises(asyncio.CancelledError):
        await running
    executed = ["execute"] if stage in ("calc_reward", "release") else []
    assert tool.done == ["create", *executed, "calc_reward", "release"]


async def test_while_it_is_cancelled_in_its_end_the_reward_is_still_found() -> None:
    tool = Recorder(calc_reward=sleeping(0.05))

    async def run() -> float | None:
        try:
            async with open_instance(tool, "r1") as instance:
                pass
        except asyncio.CancelledError:
            return instance.reward
        return None

    running = asyncio.create_task(run())
    await tool.reached["calc_reward"].wait()
    running.cancel()
    assert await running == 0.5


async def test_a_time_limit_of_the_whole_trajectory_is_its_own() -> None:
    tool = Recorder(execute=sleeping(60))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await trajectory(tool)
    assert tool.done == ["create", "calc_reward", "release"]


async def test_one_of_many_trajectories_fails_and_all_are_ended() -> None:
    tool = Recorder(execute=sleeping(60))

    async def failing() -> None:
        async with open_instance(tool, "other"):
            raise ZeroDivisionError

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(trajectory(tool))
            await asyncio.sleep(0.01)
            group.create_task(failing())

    with pytest.raises(ExceptionGroup):
        await all_of_them()
    assert (tool.done.count("create"), tool.done.count("release")) == (6, 6)


def test_the_end_of_the_event_loop_ends_the_instances() -> None:
    made: list[Recorder] = []
    left: list[asyncio.Task[None]] = []

    async def main() -> None:
        for stage in ("create", "execute", "calc_reward"):
            tool = Recorder(**{stage: sleeping(60)})
            left.append(asyncio.create_task(trajectory(tool)))
            made.append(tool)
            await tool.reached[stage].wait()

    asyncio.run(main())
    creating, executing, rewarding = made
    assert creating.done == [], "cancelled by the loop itself: there is nothing to release"
    assert executing.done == ["create", "calc_reward", "release"]
    assert rewarding.done == ["create", "execute", "release"]


async def test_an_abandoned_call_ends_before_its_instance_does() -> None:
    tool = Recorder(execute=sleeping(0.05))
    async with open_instance(tool, "r1") as instance:
        abandoned = asyncio.create_task(instance.call({}))
        await tool.reached["execute"].wait()
    assert tool.done == ["create", "execute", "calc_reward", "release"]
    assert (await abandoned).outcome is ToolOutcome.OK


async def test_an_abandoned_call_that_never_ends_is_not_waited_for_for_ever() -> None:
    tool = Recorder(config={"call": {"finish_seconds": 0.05}}, execute=sleeping(60))
    async with open_instance(tool, "r1") as instance:
        abandoned = asyncio.create_task(instance.call({}))
        await tool.reached["execute"].wait()
    assert instance.problems[0].startswith("the last call took more than 0.05 s")
    assert tool.done == ["create", "calc_reward", "release"]
    abandoned.cancel()
    await asyncio.wait([abandoned])
