"""A gateway on a real socket for tests, with an engine that follows a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai

from playing import CHAT, TOKENIZER, scripted
from toolyard.engines.protocol import Sampling
from toolyard.gateway.config import GatewayConfig
from toolyard.gateway.server import RunningGateway, open_gateway
from toolyard.records.audit import audit
from toolyard.records.trajectory import Trajectory

Say = Callable[[str], Any]
"""What the model says after a prompt, given as text."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


_clients: list[Any] = []
"""Open clients of the current test."""


def openai_client(url: str, key: str = "any", **options: Any) -> openai.AsyncOpenAI:
    """A client that is closed with the gateway."""
    client = openai.AsyncOpenAI(base_url=url, api_key=key, **options)
    _clients.append(client)
    return client


def openai_at(running: RunningGateway, session: str = "s", **options: Any) -> openai.AsyncOpenAI:
    return openai_client(running.session_url(session), **options)


def anthropic_at(running: RunningGateway, session: str = "s", **options: Any) -> anthropic.AsyncAnthropic:
    url = running.session_url(session).removesuffix("/v1")
    client = anthropic.AsyncAnthropic(base_url=url, api_key="any", **options)
    _clients.append(client)
    return client


@asynccontextmanager
async def gateway(say: Say, *, seconds: float = 0.0, **config: Any) -> AsyncIterator[tuple[RunningGateway, list[Any]]]:
    """A running gateway, and the trajectories of the sessions that have ended."""
    ended: list[Trajectory] = []

    async def finish(trajectories: list[Trajectory]) -> None:
        ended.extend(trajectories)

    serving = GatewayConfig(**{"port": 0, "sampling": Sampling(max_tokens=4096), **config})
    async with (
        scripted(lambda request, turn, prompt: say(TOKENIZER.decode(prompt)), seconds=seconds) as engine,
        open_gateway(serving, engine, CHAT, TOKENIZER, model="scripted", finish=finish) as running,
    ):
        try:
            yield running, ended
        finally:
            while _clients:
                await _clients.pop().close()


def assert_exact(trajectories: Sequence[Trajectory]) -> None:
    """Every branch passes the audit, also with the tokenizer."""
    assert trajectories
    for one in trajectories:
        assert audit(one, TOKENIZER.decode, TOKENIZER.vocab_size) == []
        assert one.state == "COMPLETED", one.failure
