"""512 requests while everything around them fails: all end, each with its reason, none is lost, nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from typing import Any

import pytest

from left_behind import children
from playing import TOKENIZER, call, request_for, scripted, setting, task
from toolyard.engines.protocol import Finish, Generation
from toolyard.errors import EngineError, SandboxError
from toolyard.records.audit import audit
from toolyard.records.dump import DumpWriter, read_dump
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.run_many import RolloutRun
from toolyard.sandbox.local import LocalSandbox
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.code_interpreter.tool import SandboxFusionTool

REQUESTS = 512
SCHEMA: Any = {"type": "function", "function": {"name": "flaky", "parameters": {"type": "object", "properties": {}}}}
CODES = ["print(6 * 7)", "1 / 0", "import os; os._exit(1)", "x +", "print('<|im_end|>')"]


class Flaky(BaseTool):
    """Now and then raises, hangs, or is not available; keeps account of its instances."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__({"call": {"retries": 0}}, SCHEMA)
        self.chance = chance
        self.live: set[str] = set()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        if self.chance.random() < 0.03:
            raise RuntimeError("no quota")
        assert instance_id is not None
        self.live.add(instance_id)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        match self.chance.randrange(12):
            case 0:
                raise ValueError("the tool's failure")
            case 1:
                raise SandboxError("our failure")
            case 2:
                await asyncio.sleep(60)
            case 3:
                raise asyncio.CancelledError
        return "fine", 0.1, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.live.remove(instance_id)


def script(chance: random.Random):
    def say(request_id: str, turn: int, prompt: Any) -> Any:
        match chance.randrange(16):
            case 0 | 1:
                return EngineError("busy")
            case 2:
                ids = TOKENIZER.encode("Hm, ")
                return Generation(ids, [-0.5] * len(ids), Finish.ABORT)
            case 3:
                return "<tool_call>\n{broken\n</tool_call>"
            case 4 | 5 | 6 | 7:
                return call("flaky", {})
            case 8 | 9 | 10:
                return call("code_interpreter", {"code": chance.choice(CODES)})
            case 11:
                return call("flaky", {}) + "\n" + call("code_interpreter", {"code": "print(1)"})
            case 12:
                return "x" * 3000
            case _:
                return "#### 42"

    return say


@pytest.mark.kernel("confined")
async def test_512_requests_all_end_with_their_reason_and_leave_nothing(tmp_path):
    chance = random.Random(20261115)
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    tasks_before, processes = asyncio.all_tasks(), children()
    flaky = Flaky(chance)
    code = SandboxFusionTool({"num_workers": 8, "rate_limit": 8, "call": {"retries": 1}})
    sandbox = (await code._places.here()).sandbox
    assert isinstance(sandbox, LocalSandbox)
    lines = script(chance)
    async with scripted(lines, token_seconds=1e-5) as engine, DumpWriter(tmp_path) as dump:
        place = setting(
            engine, [flaky, code], max_assistant_turns=4, response_length=2500, tool_seconds=0.5, engine_retries=1
        )
        requests = [request_for(place, task(id=f"task-{number}")) for number in range(REQUESTS)]
        ended = 0
        async with RolloutRun(place, requests, concurrency=128) as run:
            async for trajectory in run:
                await dump.write(trajectory)
                ended += 1
                if ended % 40 == 0 and run.running:
                    run.abort(chance.choice(run.running).request_id)
                if ended in (100, 300):
                    for pid in sandbox.process_ids.values():
                        os.kill(pid, signal.SIGKILL)
    found = sandbox.statistics()
    await code.close()

    trajectories = [line.trajectory for line in read_dump(tmp_path)]
    assert len(trajectories) == REQUESTS
    assert {trajectory.request_id for trajectory in trajectories} == {request.request_id for request in requests}
    reasons = Counter(trajectory.finish_reason for trajectory in trajectories)
    expected = {"stop", "length", "engine_failure", "tool_failure", "stage_deadline", "aborted", "max_assistant_turns"}
    assert expected <= reasons.keys(), reasons
    assert FinishReason.INTERNAL_ERROR not in reasons, [t.failure for t in trajectories if t.failure][:3]
    assert FinishReason.TOKEN_DRIFT not in reasons
    problems = [problem for trajectory in trajectories for problem in audit(trajectory, TOKENIZER.decode)]
    assert problems == []
    for trajectory in trajectories:
        assert (trajectory.state == RolloutState.FAILED) == (trajectory.failure is not None)
        assert trajectory.state != RolloutState.FAILED or trajectory.score is None

    assert flaky.live == set()
    assert (found.busy, found.waiting, found.sessions) == (0, 0, 0)
    assert asyncio.all_tasks() == tasks_before
    assert children() == processes
    assert complaints == []
