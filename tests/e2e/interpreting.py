"""What the code interpreter's tests share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from serving import OK

from patience import patient
from toolyard.sandbox.protocol import Execution, Limits, Program
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.instance import ToolResult, open_instance


@contextlib.asynccontextmanager
async def interpreter(url: str = "", **config: Any) -> AsyncIterator[SandboxFusionTool]:
    tool = SandboxFusionTool({"sandbox_fusion_url": url, **config})
    try:
        yield tool
    finally:
        await tool.close()


async def trajectory(tool: SandboxFusionTool, *calls: str | dict[str, Any], request_id: str = "r1") -> list[ToolResult]:
    """One whole trajectory; a text is code."""
    async with open_instance(tool, request_id) as instance:
        return [await instance.call({"code": call} if isinstance(call, str) else call) for call in calls]


async def texts(tool: SandboxFusionTool, *calls: str | dict[str, Any], request_id: str = "r1") -> list[str | None]:
    return [result.response.text for result in await trajectory(tool, *calls, request_id=request_id)]


class Counting:
    """What a scripted sandbox does: run for a moment, and count how many do at once.

    The first ones run until there are `at_once` of them: on a busy machine they would be done before the last began.
    """

    def __init__(self, seconds: float = 0.01, *, at_once: int = 1) -> None:
        self.at_once = at_once
        self.seconds = seconds
        self.running = self.most = self.ended = 0

    async def __call__(self, program: Program, limits: Limits) -> Execution:
        self.running += 1
        self.most = max(self.most, self.running)
        deadline = time.monotonic() + patient(5)
        try:
            await asyncio.sleep(self.seconds)
            while self.most < self.at_once and time.monotonic() < deadline:  # noqa: ASYNC110 - the count is all there is
                await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
            self.ended += 1
        return OK
