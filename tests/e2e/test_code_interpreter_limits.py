"""The code interpreter under its limits, and what it says when the sandbox fails: nothing about the model."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Self

import pytest
from interpreting import Counting, interpreter, texts, trajectory
from serving import ScriptedSandbox, http, peer, server_process, service, until

from toolyard.limits.local import LocalLimiter
from toolyard.sandbox.local import LocalSandbox
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.instance import ToolOutcome, ToolResult, open_instance

UNAVAILABLE = "Error: code_interpreter is not available at the moment"


async def storm(tool: SandboxFusionTool, trajectories: int = 12) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(trajectories):
            group.create_task(trajectory(tool, "1", "1", "1", request_id=f"r{number}"))


# How many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"num_workers": 3, "rate_limit": 10}, 3),
        ({"num_workers": 10, "rate_limit": 4}, 4),
        ({}, 10),
        ({"num_workers": 5, "rate_limit": 2, "enable_global_rate_limit": False}, 5),
    ],
)
async def test_no_more_run_at_once_than_the_config_allows(config: dict[str, int], most: int) -> None:
    counting = Counting(at_once=most)
    async with service(ScriptedSandbox(counting, workers=64)) as running, interpreter(running.url, **config) as tool:
        await storm(tool)
    assert (counting.most, counting.ended) == (most, 36)


async def test_the_tools_of_a_process_share_one_rate_limit() -> None:
    counting = Counting(at_once=4)
    async with (
        service(ScriptedSandbox(counting, workers=64)) as running,
        interpreter(running.url, rate_limit=4) as one,
        interpreter(running.url, rate_limit=4) as other,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(storm(one))
        group.create_task(storm(other))
    assert (counting.most, counting.ended) == (4, 72)


async def test_two_tools_with_different_limits_are_an_error_that_names_both() -> None:
    async with (
        service(ScriptedSandbox()) as running,
        interpreter(running.url, rate_limit=4) as one,
        interpreter(running.url, rate_limit=5) as other,
    ):
        assert await texts(one, "1") == ["1\n"]
        [result] = await trajectory(other, "1")
        assert (result.outcome, result.response.text) == (ToolOutcome.FAILED, UNAVAILABLE)
        assert "limiter 'rate-limiter' exists with limit 4, but limit 5 was requested" in (result.error or "")
        await one.close()
        assert await texts(other, "1") == ["1\n"], "with the first closed there is no conflict any more"


async def test_trajectories_are_the_tenants_and_none_is_starved() -> None:
    sandbox = ScriptedSandbox(Counting(0.02), workers=64)
    async with (
        service(sandbox) as running,
        interpreter(running.url, num_workers=1) as tool,
        open_instance(tool, "greedy") as greedy,
        open_instance(tool, "modest") as modest,
    ):
        async with asyncio.TaskGroup() as group:
            for _ in range(40):
                group.create_task(greedy.call({"code": "greedy"}))
            await until(lambda: len(sandbox.programs) >= 3)
            before = len(sandbox.programs)
            group.create_task(modest.call({"code": "modest"}))
        assert tool._places.limiter is not None
        granted = {name: one.granted for name, one in (await tool._places.limiter.statistics()).tenants.items()}
    assert [program.code for program, _ in sandbox.programs].index("modest") <= before + 2
    assert granted == {"greedy": 40, "modest": 1}


async def test_a_wait_for_a_permit_is_no_time_out_of_the_model_and_is_measured() -> None:
    counting = Counting(0.05)
    async with (
        service(ScriptedSandbox(counting)) as running,
        interpreter(running.url, num_workers=1, default_timeout=0.1) as tool,
        asyncio.TaskGroup() as group,
    ):
        calls = [group.create_task(trajectory(tool, "1", request_id=f"r{number}")) for number in range(10)]
    results = [call.result()[0] for call in calls]
    assert {result.response.text for result in results} == {"1\n"}
    assert max(result.metrics["queue_seconds"] for result in results) > 0.4


async def test_a_cancelled_call_gives_its_permit_back() -> None:
    async with (
        service(ScriptedSandbox(Counting(60), workers=4)) as running,
        interpreter(running.url, rate_limit=2) as tool,
    ):
        calls = [asyncio.create_task(trajectory(tool, "1", request_id=f"r{number}")) for number in range(6)]
        await until(lambda: tool._places.limiter is not None and tool._places.limiter._desk.waiting == 4)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert tool._places.limiter is not None
        for limiter in (tool._places.limiter, tool._workers):
            statistics = await limiter.statistics()
            assert (statistics.in_flight, statistics.waiting) == (0, 0)


async def test_without_ray_the_limit_is_the_processs_own_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with service(ScriptedSandbox()) as running:
        async with interpreter(running.url) as tool:
            await trajectory(tool, "1")
            assert isinstance(tool._places.limiter, LocalLimiter)
        async with interpreter(running.url, enable_global_rate_limit=False, num_workers=7) as tool:
            await trajectory(tool, "1")
            assert tool._places.limiter is None
    said = [record.message for record in caplog.records if record.message.startswith("code_interpreter:")]
    assert said == [
        "code_interpreter: at most 10 executions in flight in this process; Ray is not connected",
        "code_interpreter: at most 7 executions in flight; no global limit",
    ]


# A time-out beyond the longest ----------------------------------------------------------------------------------------


@pytest.mark.kernel("confined")
@pytest.mark.parametrize("config", [{}, {"display_last": True}, {"stateful": True}])
async def test_a_model_whose_timeout_was_cut_is_told_so(config: dict[str, bool]) -> None:
    async with interpreter(**config) as tool:
        results = await trajectory(tool, *({"code": "print(42)", "timeout": asked} for asked in (99999, "inf", 300)))
    cut = "42\n[timeout cut to 300 s: that is the maximum]"
    assert [result.response.text for result in results] == [cut, cut, "42\n"]
    assert [result.metrics.get("timeout_cut_to") for result in results] == [300, 300, None]


async def test_a_default_beyond_the_longest_is_the_longest() -> None:
    async with service(ScriptedSandbox()) as running, interpreter(running.url, default_timeout=400) as tool:
        assert await texts(tool, {"code": "1", "timeout": 400}, {"code": "1", "timeout": 401}) == [
            "1\n",
            "1\n[timeout cut to 400 s: that is the maximum]",
        ]


# Opening and closing --------------------------------------------------------------------------------------------------


@pytest.mark.kernel("confined")
async def test_many_first_calls_open_one_sandbox_also_if_one_of_them_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = 0

    class Counted(LocalSandbox):
        async def __aenter__(self) -> Self:
            nonlocal opened
            opened += 1
            return await super().__aenter__()

    monkeypatch.setattr("toolyard.tools.code_interpreter.tool.LocalSandbox", Counted)
    tool = SandboxFusionTool({})
    first = asyncio.create_task(trajectory(tool, "print(1)", request_id="first"))
    others = [asyncio.create_task(texts(tool, "print(1)", request_id=str(number))) for number in range(8)]
    await until(lambda: opened == 1)
    first.cancel()
    await asyncio.wait([first, *others])
    assert (first.cancelled(), opened) == (True, 2)
    assert [other.result() for other in others] == [["1\n"]] * 8
    await tool.close()


@pytest.mark.kernel("confined")
async def test_a_closed_tool_can_be_used_again() -> None:
    async with interpreter() as tool:
        for _ in range(2):
            assert await texts(tool, "print(1)") == ["1\n"]
            await tool.close()
            await tool.close()


@pytest.mark.kernel("confined")
def test_a_tool_works_in_one_event_loop_after_another() -> None:
    tool = SandboxFusionTool({})

    async def use() -> list[str | None]:
        try:
            return await texts(tool, "print(1)")
        finally:
            await tool.close()

    assert [asyncio.run(use()) for _ in range(2)] == [["1\n"], ["1\n"]]


# Failures of ours -----------------------------------------------------------------------------------------------------


@pytest.mark.kernel("confined")
async def test_a_zygote_killed_in_mid_run_costs_a_retry() -> None:
    async with interpreter() as tool, asyncio.TaskGroup() as group:
        sandbox = (await tool._places.here()).sandbox
        assert isinstance(sandbox, LocalSandbox)
        running = group.create_task(trajectory(tool, "import time; time.sleep(0.5); print('done')"))
        await until(lambda: sandbox.statistics().busy == 1)
        await asyncio.sleep(0.1)
        os.kill(sandbox.process_ids["light"], signal.SIGKILL)
    [result] = running.result()
    assert (result.outcome, result.response.text, result.attempts) == (ToolOutcome.OK, "done\n", 2)


@pytest.mark.kernel("confined")
async def test_zygotes_killed_again_and_again_are_our_failure() -> None:
    async with interpreter() as tool:
        sandbox = (await tool._places.here()).sandbox
        assert isinstance(sandbox, LocalSandbox)
        running = asyncio.create_task(trajectory(tool, "import time; time.sleep(60)"))
        while not running.done():
            if sandbox.statistics().busy and (zygote := sandbox._pool.zygotes.get("light")) and zygote.alive:
                os.kill(zygote.pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
        [result] = await running
        assert (result.outcome, result.response.text, result.attempts) == (ToolOutcome.FAILED, UNAVAILABLE, 3)
        assert await texts(tool, "print('recovered')") == ["recovered\n"]


async def test_a_service_that_is_down_is_our_failure() -> None:
    async with peer() as gone:
        pass
    async with interpreter(gone.url, call={"retries": 0}) as tool:
        [result] = await trajectory(tool, "print(1)")
    assert (result.outcome, result.response.text) == (ToolOutcome.FAILED, UNAVAILABLE)
    assert "cannot connect" in (result.error or "")


async def test_a_service_that_dies_in_mid_run_is_our_failure() -> None:
    async with server_process(takes=60, grace=0) as (process, url), interpreter(url, call={"retries": 1}) as tool:
        running = asyncio.create_task(trajectory(tool, "print(1)"))
        await asyncio.sleep(0.5)
        process.kill()
        [result] = await running
    assert (result.outcome, result.response.text, result.attempts) == (ToolOutcome.FAILED, UNAVAILABLE, 2)


@pytest.mark.parametrize(
    "answer",
    [
        http(500, "oops"),
        http(401, {"detail": "who are you?"}),
        http(404, "not here"),
        http(200, "not JSON"),
        http(200, {"status": "SandboxError", "message": "no room", "run_result": None, "compile_result": None}),
    ],
    ids=["500", "401", "404", "nonsense", "SandboxError"],
)
async def test_an_answer_that_is_none_is_our_failure(answer: bytes) -> None:
    async with peer(answer) as server, interpreter(server.url, call={"retry_pause_seconds": 0}) as tool:
        [result] = await trajectory(tool, "print(1)")
    assert (result.outcome, result.response.text) == (ToolOutcome.FAILED, UNAVAILABLE)
    assert "Traceback" in (result.error or "")


async def test_a_failure_gives_the_permits_back() -> None:
    async with peer(http(500, "oops")) as server, interpreter(server.url, rate_limit=1, call={"retries": 0}) as tool:

        async def one(number: int) -> ToolResult:
            return (await trajectory(tool, "1", request_id=str(number)))[0]

        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            calls = [group.create_task(one(number)) for number in range(5)]
    assert {call.result().outcome for call in calls} == {ToolOutcome.FAILED}
