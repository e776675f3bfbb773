"""`OpenaiEngine` at a real vLLM: messages in, a message out, and the tokens of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from vllm_server import VllmServer

from toolyard.chat.formats import open_format
from toolyard.chat.protocol import Tokenizer
from toolyard.engines.http.openai import OpenaiEngine
from toolyard.engines.protocol import ChatGeneration, Finish, Sampling
from toolyard.errors import EngineRequestError
from toolyard.messages import Message
from toolyard.tools.code_interpreter.tool import SCHEMA

pytestmark = pytest.mark.parametrize("server", ["plain"], indirect=True, scope="session")
TALK = [Message("system", "You are a careful helper."), Message("user", "What is the capital of France? One word.")]


@pytest_asyncio.fixture
async def chatting(server: VllmServer) -> AsyncIterator[OpenaiEngine]:
    async with OpenaiEngine(server.url) as engine:
        yield engine


async def chat(engine: OpenaiEngine, talk: list[Message], **sampling: object) -> ChatGeneration:
    wanted = Sampling.model_validate({"max_tokens": 120, "temperature": 0.0, **sampling})
    async with asyncio.timeout(60):
        return await engine.chat(talk, (), wanted, request_id="r-1")


async def test_an_answer_comes_with_the_tokens_of_its_prompt_and_its_own(
    chatting: OpenaiEngine, tokenizer: Tokenizer
) -> None:
    format = open_format(tokenizer, format="code_block")  # noqa: A001 - as everywhere
    found = await chat(chatting, TALK)
    assert found.finish is Finish.STOP
    assert found.prompt_ids == format.render(TALK, ())
    assert found.token_ids is not None
    (end,) = format.stop_token_ids
    assert found.token_ids[-1] == end
    assert tokenizer.decode(found.token_ids[:-1]) == found.message.content
    assert found.logprobs is not None
    assert len(found.logprobs) == len(found.token_ids)
    assert max(found.logprobs) <= 0
    assert (found.prompt_tokens, found.completion_tokens) == (len(found.prompt_ids), len(found.token_ids))


async def test_the_next_turn_extends_the_tokens_of_the_last(chatting: OpenaiEngine) -> None:
    first = await chat(chatting, TALK)
    assert first.prompt_ids is not None
    assert first.token_ids is not None
    second = await chat(chatting, [*TALK, first.message, Message("user", "And of Italy?")], max_tokens=4)
    assert second.prompt_ids is not None
    so_far = [*first.prompt_ids, *first.token_ids]
    assert second.prompt_ids[: len(so_far)] == so_far


async def test_the_same_seed_answers_the_same(chatting: OpenaiEngine) -> None:
    first, again = [await chat(chatting, TALK, temperature=1.0, seed=5, max_tokens=20) for _ in range(2)]
    assert first.token_ids == again.token_ids


async def test_an_aborted_answer_ends_and_the_server_stops_working_on_it(
    chatting: OpenaiEngine, server: VllmServer
) -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        doomed = tasks.create_task(chat(chatting, [Message("user", "Tell a long story.")], max_tokens=1500))
        await asyncio.sleep(1.0)
        await chatting.abort("r-1")
        assert (await doomed).finish is Finish.ABORT
        while await asyncio.to_thread(server.running):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.1)


async def test_tools_at_a_server_that_parses_no_calls_are_refused_in_its_words(chatting: OpenaiEngine) -> None:
    with pytest.raises(EngineRequestError, match="enable-auto-tool-choice"):
        await chatting.chat(TALK, (SCHEMA,), Sampling(max_tokens=4), request_id="r-1")
    assert (await chat(chatting, TALK)).token_ids is not None
