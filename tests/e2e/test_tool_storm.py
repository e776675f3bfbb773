"""Ten thousand trajectories, failing and cancelled at every stage: everything created is released, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from left_behind import children
from toolyard.errors import SandboxError, ToolError
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.sandbox.local import LocalSandbox
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.instance import ToolInstances, ToolOutcome, handle_of, open_instances

AT_ONCE = 200


def schema(name: str) -> OpenAIFunctionToolSchema:
    properties = {"n": {"type": "integer"}}
    return OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": {"name": name, "parameters": {"properties": properties, "required": ["n"]}}}
    )


class Flaky(BaseTool):
    """Fails at every stage in every way, now and then, and keeps account of its instances."""

    def __init__(self, name: str, chance: random.Random) -> None:
        call = {"concurrency": 50, "timeout_seconds": 0.02, "retry_pause_seconds": 0.001, "finish_seconds": 0.05}
        super().__init__({"call": call}, schema(name))
        self.chance = chance
        self.live: set[str] = set()
        self.counts: Counter[str] = Counter()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        await self._stumble(0.05)
        assert instance_id is not None
        assert instance_id not in self.live
        self.live.add(instance_id)
        self.counts["created"] += 1
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        assert instance_id in self.live, "called before its creation or after its release"
        self.counts["executed"] += 1
        await self._stumble(0.3)
        return str(parameters["n"])

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        assert instance_id in self.live
        self.counts["rewarded"] += 1
        await self._stumble(0.1)
        return 1.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.live.remove(instance_id)
        self.counts["released"] += 1
        await self._stumble(0.1)

    async def _stumble(self, rate: float) -> None:
        await asyncio.sleep(0)
        if self.chance.random() > rate:
            return
        match self.chance.randrange(6):
            case 0:
                raise ValueError("the tool's failure")
            case 1:
                raise SandboxError("our failure")
            case 2:
                raise asyncio.CancelledError
            case 3:
                await asyncio.sleep(0.001)
            case 4:
                await asyncio.sleep(10)
            case _:
                with contextlib.suppress(asyncio.CancelledError):  # resists
                    await asyncio.sleep(10)


class Storm:
    """Runs trajectories, some of which are cancelled after a while, once or twice."""

    def __init__(self, chance: random.Random, longest: float) -> None:
        self.chance = chance
        self.longest = longest
        self.ends: Counter[str] = Counter()
        self.outcomes: Counter[ToolOutcome] = Counter()

    async def run(self, count: int, play: Callable[[int], Awaitable[ToolInstances]]) -> None:
        room = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                await room.acquire()
                trajectory = group.create_task(self._one(number, play))
                trajectory.add_done_callback(lambda _: room.release())
                if self.chance.random() < 0.4:
                    for _ in range(self.chance.choice((1, 1, 2))):
                        asyncio.get_running_loop().call_later(self.chance.random() * self.longest, trajectory.cancel)

    async def _one(self, number: int, play: Callable[[int], Awaitable[ToolInstances]]) -> None:
        try:
            instances = await play(number)
        except asyncio.CancelledError:
            self.ends["cancelled"] += 1
        except ToolError:
            self.ends["not created"] += 1
        except ZeroDivisionError:
            self.ends["failed"] += 1
        else:
            self.ends["whole"] += 1
            self.outcomes += instances.outcomes


@pytest.fixture
async def nothing_is_left() -> AsyncIterator[None]:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    tasks, processes = asyncio.all_tasks(), children()
    yield
    assert asyncio.all_tasks() - tasks <= {asyncio.current_task()}
    assert children() == processes
    assert complaints == []


@pytest.mark.exhaustive
@pytest.mark.usefixtures("nothing_is_left")
async def test_thousands_of_trajectories_leave_no_instance_no_permit_and_no_task() -> None:
    count = 10_000
    chance = random.Random(20261115)
    tools = {name: Flaky(name, chance) for name in ("a", "b")}
    storm = Storm(chance, 0.05)

    async def play(number: int) -> ToolInstances:
        async with open_instances(tools, f"r{number}") as instances:
            await instances.call("a", {"n": number})
            async with asyncio.TaskGroup() as group:
                for name in ("a", "b"):
                    group.create_task(instances.call(name, {"n": number}))
            await instances.call(*chance.choice((("b", '{"n": "one"}'), ("c", {}), ("a", '{"n": 1}'))))
            if chance.random() < 0.1:
                raise ZeroDivisionError
        return instances

    await storm.run(count, play)
    for tool in tools.values():
        assert tool.live == set()
        assert tool.counts["created"] == tool.counts["rewarded"] == tool.counts["released"] > count / 2
        limiter: Any = handle_of(tool)._limiter
        statistics = await limiter.statistics()
        assert (statistics.in_flight, statistics.waiting) == (0, 0)
    assert storm.ends.total() == count
    assert min(storm.ends[end] for end in ("whole", "cancelled", "not created", "failed")) > count / 100, storm.ends
    assert set(storm.outcomes) == set(ToolOutcome), "every way a call can end was seen"


@pytest.mark.kernel("confined")
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.slow
async def test_hundreds_of_trajectories_in_real_sandboxes_leave_no_session_and_no_process() -> None:
    chance = random.Random(4)
    codes = ["print(1)", "x = 1\nprint(x)", "1/0", "import os; os._exit(1)", "import time; time.sleep(0.05)", "x +"]
    plain = SandboxFusionTool({"num_workers": 8, "rate_limit": 8})
    kept = SandboxFusionTool({"num_workers": 8, "rate_limit": 8, "stateful": True})
    storm = Storm(chance, 1.0)
    sandboxes: list[LocalSandbox] = []
    for tool in (plain, kept):
        sandbox = (await tool._places.here()).sandbox
        assert isinstance(sandbox, LocalSandbox)
        sandboxes.append(sandbox)

    async def play(number: int) -> ToolInstances:
        tool = chance.choice((plain, plain, kept))
        async with open_instances({tool.name: tool}, f"r{number}") as instances, asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(instances.call(tool.name, {"code": chance.choice(codes)}))
        if number % 100 == 50:
            for pid in chance.choice(sandboxes).process_ids.values():
                os.kill(pid, signal.SIGKILL)
        return instances

    await storm.run(400, play)
    for tool, sandbox in zip((plain, kept), sandboxes, strict=True):
        found = sandbox.statistics()
        assert (len(tool._trajectories), found.sessions, found.busy, found.waiting) == (0, 0, 0, 0)
        for limiter in (tool._places.limiter, tool._workers):
            assert limiter is not None
            statistics = await limiter.statistics()
            assert (statistics.in_flight, statistics.waiting) == (0, 0)
        await tool.close()
    assert min(storm.ends["cancelled"], storm.ends["whole"]) > 20, storm.ends
    assert storm.outcomes[ToolOutcome.OK] > 100
