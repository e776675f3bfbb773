"""With Ray connected, the code interpreters of the whole cluster share one limit."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from interpreting import Counting, interpreter, texts, trajectory
from serving import ScriptedSandbox, service

ray = pytest.importorskip("ray", reason="needs Ray")

from toolyard.limits.cluster.ray import RayLimiter  # noqa: E402 - needs Ray
from toolyard.sandbox.protocol import Execution, Limits, Program  # noqa: E402

pytestmark = pytest.mark.usefixtures("ray_connection")

STORM = """
import asyncio, os, sys
sys.path[:0] = {folders!r}
from interpreting import interpreter, trajectory

calls = 0

async def go_on(tool, name):
    global calls
    while not os.path.exists({enough!r}):
        await trajectory(tool, "there", request_id=name)
        calls += 1

async def main():
    async with interpreter({url!r}, rate_limit=3) as tool, asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(go_on(tool, f"there-{{number}}"))

asyncio.run(main())
"""


async def test_the_clusters_limiter_is_used_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with service(ScriptedSandbox()) as running, interpreter(running.url, rate_limit=3) as tool:
        assert await texts(tool, "1") == ["1\n"]
        limiter = (await tool._places.here()).limiter
        assert isinstance(limiter, RayLimiter)
        assert (limiter.name, limiter.limit) == ("rate-limiter", 3)
    assert "code_interpreter: at most 3 executions in flight in the Ray cluster" in caplog.text


class Telling(Counting):
    """Of whom they are as well."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.codes: list[str] = []
        self.mixed = False

    async def __call__(self, program: Program, limits: Limits) -> Execution:
        self.codes.append(program.code)
        self.mixed |= len(set(self.codes)) == 2
        try:
            return await super().__call__(program, limits)
        finally:
            self.codes.remove(program.code)


@pytest.mark.slow
async def test_processes_share_the_limit(tmp_path: Path) -> None:
    counting = Telling(0.03)
    enough = tmp_path / "enough"

    @ray.remote
    def storm(program: str) -> int:
        scope: dict[str, Any] = {"__name__": "elsewhere"}
        exec(program, scope)
        return scope["calls"]

    async with service(ScriptedSandbox(counting, workers=64)) as running:
        here = Path(__file__).parent
        program = STORM.format(folders=[str(here), str(here.parent)], url=running.url, enough=str(enough))
        elsewhere: Any = storm.remote(program)
        async with asyncio.timeout(180):
            while not counting.ended:
                await asyncio.to_thread(ray.wait, [elsewhere], timeout=0.1)
                assert counting.ended or not ray.wait([elsewhere], timeout=0)[0], ray.get(elsewhere)
        async with interpreter(running.url, rate_limit=3) as tool, asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(trajectory(tool, "here", "here", request_id=f"here-{number}"))
        enough.touch()
        calls = await asyncio.to_thread(ray.get, elsewhere, timeout=60)
    assert counting.mixed, "both were at it"
    assert (counting.most, counting.ended) == (3, 40 + calls)


async def test_the_limit_can_be_left_out() -> None:
    counting = Counting(0.02)
    async with (
        service(ScriptedSandbox(counting, workers=64)) as running,
        interpreter(running.url, rate_limit=3, num_workers=6, enable_global_rate_limit=False) as tool,
        asyncio.TaskGroup() as group,
    ):
        for number in range(20):
            group.create_task(trajectory(tool, "1", request_id=f"r{number}"))
    assert (counting.most, tool._places.limiter) == (6, None)
