"""The HTTP engines keep the contract, each with a server that speaks its protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from toolyard.engines.http.openai import OpenaiEngine
from toolyard.engines.http.sglang import SglangEngine
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import Engine
from toolyard.testing import EngineContract
from toolyard.testing.engine.byte_model import BYTE_VOCABULARY, byte_decode
from toolyard.testing.engine.chat_as_engine import ChatAsEngine
from toolyard.testing.engine.servers import OPENAI, SGLANG, VLLM, VLLM_TOKENS, EngineServer


class HttpContract(EngineContract):
    vocabulary = BYTE_VOCABULARY
    context: int | None = 4096
    speaks: Sequence[str] = ()
    kind: type[SglangEngine | VllmEngine]

    @pytest_asyncio.fixture(scope="class", loop_scope="class", autouse=True)
    @classmethod
    async def server(cls) -> AsyncIterator[EngineServer]:
        async with EngineServer(cls.speaks, token_seconds=0.001, context=cls.context or 4096) as server:
            cls.url = server.url
            yield server

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, server: EngineServer) -> AsyncIterator[Engine]:
        async with cls.make() as engine:
            yield engine

    @classmethod
    def make(cls) -> Engine:
        return cls.kind(cls.url)

    def decode(self, ids: Sequence[int]) -> str:
        return byte_decode(ids)

    @pytest.mark.asyncio(loop_scope="class")
    async def test_the_server_has_nothing_left_to_do(self, engine: Engine, server: EngineServer) -> None:
        """After everything that was cancelled, aborted and left above."""
        async with asyncio.timeout(5):
            while server.running:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)


class TestOpenai(HttpContract):
    speaks = (OPENAI,)
    context = None  # how much of it the server's own words take is not known
    continues_tokens = False
    out_of_range_is_refused = False

    @classmethod
    def make(cls) -> Engine:
        return ChatAsEngine(OpenaiEngine(cls.url), byte_decode)


class TestSglang(HttpContract):
    kind, speaks = SglangEngine, (SGLANG,)


class TestVllm(HttpContract):
    kind, speaks = VllmEngine, (VLLM, VLLM_TOKENS)


class TestVllmByCompletions(HttpContract):
    kind, speaks = VllmEngine, (VLLM,)
