"""What the tests of engines over HTTP share: how to ask any of them, and how to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from toolyard.engines.http.openai import OpenaiEngine
from toolyard.engines.http.sglang import SglangEngine
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import ChatEngine, Sampling
from toolyard.messages import Message
from toolyard.testing.engine.byte_model import byte_encode
from toolyard.testing.engine.servers import EngineServer

PROMPT = byte_encode("Once upon a time")
SHORT = Sampling(max_tokens=8, temperature=0)
LONG = Sampling(max_tokens=2000, temperature=0)
KINDS = [SglangEngine, VllmEngine, OpenaiEngine]


async def ask(engine: Any, sampling: Sampling = SHORT, *, request_id: str = "r-1") -> Any:
    """An answer, of whichever kind of engine it is."""
    if isinstance(engine, ChatEngine):
        return await engine.chat([Message("user", "hello")], [], sampling, request_id=request_id)
    return await engine.generate(PROMPT, sampling, request_id=request_id)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


def answered(server: EngineServer) -> list[str]:
    """Paths of the requests for answers, in order."""
    return [path for path, _, _ in server.requests if path.endswith(("generate", "completions"))]
