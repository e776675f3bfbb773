"""One call: what the model reads, whose failure it was, how long it may take, and how often it is tried."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from toolyard.errors import (
    ConfigError,
    LimiterTimeoutError,
    ProgramError,
    SandboxBusyError,
    SandboxClosedError,
    SandboxError,
    ToolError,
)
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.tools.arguments import ArgumentError
from toolyard.tools.base import BaseTool
from toolyard.tools.instance import ToolOutcome, ToolResult, open_instance, open_instances

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
)
QUERY = {"query": "x"}


class Tool(BaseTool):
    """Calls `act` with the number of the call, from 1."""

    def __init__(self, act: Callable[[int], Any], **call: Any) -> None:
        super().__init__({"call": {"retry_pause_seconds": 0.001, **call}}, SCHEMA)
        self.act = act
        self.calls = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.calls += 1
        done = self.act(self.calls)
        return await done if asyncio.iscoroutine(done) else done


def failing(error: BaseException, *, times: int = 1000) -> Callable[[int], Any]:
    def act(call: int) -> str:
        if call <= times:
            raise error
        return "found"

    return act


async def sleep(call: int) -> str:
    await asyncio.sleep(60)
    return "late"


async def once(tool: BaseTool, arguments: Any = QUERY, **options: Any) -> ToolResult:
    async with open_instance(tool, "r1") as instance:
        return await instance.call(arguments, **options)


# What models do wrong -------------------------------------------------------------------------------------------------


async def test_an_unknown_tool_is_told_with_those_there_are() -> None:
    async with open_instances({"search": Tool(lambda _: "found")}, "r1") as instances:
        result = await instances.call("serach", "{}")
        assert (result.tool, result.outcome) == ("serach", ToolOutcome.UNKNOWN_TOOL)
        assert result.response.text == "Error: there is no tool 'serach'. Tools that can be called: search"
    async with open_instances({}, "r1") as instances:
        assert (await instances.call("x" * 500, "{}")).response.text == (
            f"Error: there is no tool '{'x' * 100}'. Tools that can be called: none"
        )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"query": ', "the arguments are not valid JSON: Expecting value"),
        ("[1]", "the arguments are not a JSON object, but an array"),
        ('{"query": 5}', 'query: 5 is not of type "string"'),
        ("{}", '"query" is a required property'),
        ({}, '"query" is a required property'),
    ],
)
async def test_bad_arguments_are_told_and_the_tool_is_not_called(arguments: Any, why: str) -> None:
    tool = Tool(lambda _: "found")
    result = await once(tool, arguments)
    assert (result.outcome, tool.calls, result.attempts) == (ToolOutcome.BAD_ARGUMENTS, 0, 0)
    assert (result.response.text or "").startswith(f"Error: search was not called: {why}")
    assert (result.response.text or "").endswith('Expected arguments: {"query": string}')


async def test_a_tool_may_refuse_arguments_that_its_schema_allows() -> None:
    result = await once(Tool(failing(ArgumentError("Error: search was not called: too vague"))))
    assert (result.outcome, result.response.text) == (
        ToolOutcome.BAD_ARGUMENTS,
        "Error: search was not called: too vague",
    )


async def test_outcomes_are_counted() -> None:
    tool = Tool(lambda call: "found" if call < 3 else failing(ValueError("no"))(call))
    async with open_instances({"search": tool}, "r1") as instances:
        for name, arguments in (
            ("search", QUERY), ("search", QUERY), ("search", QUERY), ("search", "{"), ("other", {})
        ):  # fmt: skip
            await instances.call(name, arguments)
        counts = {ToolOutcome.OK: 2, ToolOutcome.RAISED: 1, ToolOutcome.BAD_ARGUMENTS: 1}
        assert instances["search"].outcomes == Counter(counts)
        assert instances.outcomes == Counter({**counts, ToolOutcome.UNKNOWN_TOOL: 1})


# What tools raise -----------------------------------------------------------------------------------------------------


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no such page"), "Error: search failed: ValueError: no such page"),
        (KeyError("page"), "Error: search failed: KeyError: 'page'"),
        (RuntimeError(), "Error: search failed: RuntimeError"),
        (ValueError("x" * 10_000), f"Error: search failed: ValueError: {'x' * 500}…"),
        (UnspeakableError(), "Error: search failed: UnspeakableError"),
        (ExceptionGroup("in a task group", [ValueError("no")]), "Error: search failed: ValueError: no"),
        (TimeoutError("of its own"), "Error: search failed: TimeoutError: of its own"),
        (ProgramError("unknown language"), "Error: search failed: ProgramError: unknown language"),
        (ToolError("not a valid answer"), "Error: search failed: ToolError: not a valid answer"),
        (SystemExit(3), "Error: search failed: SystemExit: 3"),
        (asyncio.CancelledError("of something it awaited"), "Error: search failed: CancelledError: of something it "),
    ],
    ids=repr,
)
async def test_a_tool_that_raises_is_told_in_short_and_recorded_in_full(error: BaseException, said: str) -> None:
    tool = Tool(failing(error))
    result = await once(tool)
    assert (result.outcome, tool.calls) == (ToolOutcome.RAISED, 1), "only failures of ours are tried again"
    assert (result.response.text or "").startswith(said)
    assert "Traceback (most recent call last)" in (result.error or "")
    assert "in act" in (result.error or ""), "the place in the tool"


# Our failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SandboxError("a worker died"), ExceptionGroup("", [SandboxError("a worker died")])])
async def test_a_failure_that_may_pass_is_tried_again(error: Exception) -> None:
    result = await once(Tool(failing(error, times=2)))
    assert (result.outcome, result.response.text, result.attempts) == (ToolOutcome.OK, "found", 3)


async def test_after_its_retries_a_failure_of_ours_says_nothing_about_the_model() -> None:
    tool = Tool(failing(SandboxError("a worker died")), retries=1)
    result = await once(tool)
    assert (result.outcome, result.attempts, tool.calls) == (ToolOutcome.FAILED, 2, 2)
    assert result.response.text == "Error: search is not available at the moment"
    assert "SandboxError: a worker died" in (result.error or "")


@pytest.mark.parametrize("error", [SandboxClosedError("closed"), ConfigError("no such limiter")])
async def test_a_failure_of_ours_that_stays_is_not_tried_again(error: Exception) -> None:
    result = await once(Tool(failing(error)))
    assert (result.outcome, result.attempts) == (ToolOutcome.FAILED, 1)


async def test_a_limiter_out_of_time_is_our_failure_and_no_time_out_of_the_tool() -> None:
    assert (await once(Tool(failing(LimiterTimeoutError("no permit")), retries=0))).outcome is ToolOutcome.FAILED


async def test_pauses_between_tries_grow_and_a_busy_service_is_asked_when_it_wishes() -> None:
    times: list[float] = []

    def act(call: int) -> str:
        times.append(time.monotonic())
        return failing(SandboxBusyError("busy", retry_after=0.3 if call == 3 else None), times=3)(call)

    await once(Tool(act, retries=3, retry_pause_seconds=0.05))
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.3), strict=True)), pauses


# Time -----------------------------------------------------------------------------------------------------------------


async def test_a_call_that_takes_too_long_is_cancelled_and_the_model_told() -> None:
    stopped: list[str] = []

    async def act() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append("here")

    result = await once(Tool(lambda _: act(), timeout_seconds=0.05))
    assert (result.outcome, stopped) == (ToolOutcome.TIMED_OUT, ["here"])
    assert result.response.text == "Error: search did not finish within 0.05 s and was stopped"
    assert "await asyncio.sleep(60)" in (result.error or ""), "where it was stopped"


@pytest.mark.parametrize("answer", ["returns", "raises"])
async def test_a_tool_that_resists_its_cancellation_for_a_while_has_timed_out_all_the_same(answer: str) -> None:
    async def act() -> str:
        try:
            await asyncio.sleep(60)
        except BaseException:
            await asyncio.sleep(0.1)
            if answer == "raises":
                raise ValueError("interrupted") from None
        return "Error: "

    result = await once(Tool(lambda _: act(), timeout_seconds=0.05))
    assert (result.outcome, result.seconds >= 0.15) == (ToolOutcome.TIMED_OUT, True), "it was waited for"


@pytest.mark.parametrize("answer", ["returns", "raises"])
async def test_a_tool_cannot_keep_its_trajectory_from_being_cancelled(answer: str) -> None:
    begun = asyncio.Event()

    async def act() -> str:
        begun.set()
        try:
            await asyncio.sleep(60)
        except BaseException:
            if answer == "raises":
                raise ValueError("interrupted") from None
        return "Error: "

    running = asyncio.create_task(once(Tool(lambda _: act())))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_time_that_our_failures_took_is_not_held_against_the_model() -> None:
    tool = Tool(failing(SandboxError("a worker died")), timeout_seconds=0.05, retry_pause_seconds=60)
    result = await once(tool)
    assert (result.outcome, result.attempts) == (ToolOutcome.FAILED, 1)
    assert "a worker died" in (result.error or "")


async def test_no_time_limit_is_possible() -> None:
    assert (await once(Tool(lambda _: "found", timeout_seconds=None))).outcome is ToolOutcome.OK


# Number at once -------------------------------------------------------------------------------------------------------


async def test_no_more_calls_run_at_once_than_the_policy_allows() -> None:
    running = most = 0

    async def act() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return "found"

    tool = Tool(lambda _: act(), concurrency=3)
    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(once(tool))
    assert most == 3


async def test_a_trajectory_with_one_call_is_not_starved_by_one_with_many() -> None:
    order: list[str] = []

    class Slow(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            await asyncio.sleep(0.001)
            order.append(instance_id)

    tool = Slow({"call": {"concurrency": 1}}, SCHEMA)
    async with (
        open_instance(tool, "greedy") as greedy,
        open_instance(tool, "modest") as modest,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(50):
            group.create_task(greedy.call(QUERY))
        await asyncio.sleep(0)
        group.create_task(modest.call(QUERY))
    assert order.index("modest") <= 2


async def test_waiting_for_its_turn_takes_nothing_from_a_calls_time() -> None:
    async def act() -> str:
        await asyncio.sleep(0.1)
        return "found"

    tool = Tool(lambda _: act(), concurrency=1, timeout_seconds=1.2)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(once(tool)) for _ in range(14)]
    assert {call.result().outcome for call in calls} == {ToolOutcome.OK}
    assert max(call.result().seconds for call in calls) > 1.3


# Policies -------------------------------------------------------------------------------------------------------------


async def test_a_wrong_policy_is_named() -> None:
    for call, said in ({"retries": -1}, "config.call.retries: Input should be"), ({"x": 1}, "config.call.x: Extra"):
        with pytest.raises(ConfigError, match=f"^tool 'search': {said}"):
            await once(Tool(lambda _: None, **call))


async def test_a_tool_has_defaults_of_its_own_which_its_config_overrides() -> None:
    class Patient(Tool):
        call_defaults = {"timeout_seconds": 0.05, "retries": 7}  # noqa: RUF012

    assert (await once(Patient(sleep))).outcome is ToolOutcome.TIMED_OUT
    result = await once(Patient(failing(SandboxError("died")), retries=0))
    assert (result.outcome, result.attempts) == (ToolOutcome.FAILED, 1)
