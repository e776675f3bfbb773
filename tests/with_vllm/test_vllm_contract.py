"""`VllmEngine` keeps the engine contract at a real vLLM, whatever routes it was started with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from vllm_server import CONTEXT, VllmServer

from toolyard.chat.protocol import Tokenizer
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import Engine, Finish
from toolyard.testing.engine.contract import EngineContract


class VllmContract(EngineContract):
    vocabulary = 49152
    context = CONTEXT
    endless = 1900
    some = 16
    crowd = 24
    settle_seconds = 0.5
    keeps_aborted_tokens: bool
    url: str
    tokenizer: Tokenizer

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, server: VllmServer, tokenizer: Tokenizer) -> AsyncIterator[Engine]:
        cls.url, cls.tokenizer = server.url, tokenizer
        cls.prompt = tokenizer.encode("Once upon a time, in a small village,")
        async with cls.make() as engine:
            yield engine

    @pytest.fixture(autouse=True)
    def _ready(self, engine: Engine) -> None:
        """Also for tests that make engines of their own."""

    @classmethod
    def make(cls) -> Engine:
        return VllmEngine(cls.url)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    @pytest.mark.asyncio(loop_scope="class")
    async def test_what_was_sampled_until_an_abort_is_kept_where_the_server_can_be_told(self, engine: Engine) -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            doomed = tasks.create_task(self.greedy(engine, max_tokens=self.endless, request_id="kept"))
            await asyncio.sleep(2 * self.settle_seconds)
            await engine.abort("kept")
        found = doomed.result()
        assert found.finish is Finish.ABORT
        assert bool(found.token_ids) is self.keeps_aborted_tokens

    @pytest.mark.asyncio(loop_scope="class")
    async def test_the_server_has_nothing_left_to_do(self, engine: Engine, server: VllmServer) -> None:
        """After everything that was cancelled, aborted and left above."""
        async with asyncio.timeout(10):
            while await asyncio.to_thread(server.running):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("server", ["plain"], indirect=True, scope="session")
class TestCompletions(VllmContract):
    """As most servers are: an abort closes the connection."""

    keeps_aborted_tokens = False


@pytest.mark.parametrize("server", ["development"], indirect=True, scope="session")
class TestCompletionsInDevelopmentMode(VllmContract):
    keeps_aborted_tokens = True


@pytest.mark.parametrize("server", ["tokens"], indirect=True, scope="session")
class TestTokens(VllmContract):
    keeps_aborted_tokens = True
