"""The message engine, against servers that implement OpenAI's API differently."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from toolyard.engines.http.openai import OpenaiEngine
from toolyard.engines.protocol import ChatEngine, ChatGeneration, Finish, Sampling
from toolyard.errors import EngineError, EngineRequestError
from toolyard.messages import Message, OpenAIFunctionToolSchema, ToolCall
from toolyard.testing.engine.byte_model import byte_decode
from toolyard.testing.engine.servers import EngineServer, Fault

TOOL = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Runs Python.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
)
TALK = [
    Message("system", "Be brief."),
    Message("user", "What is 6 times 7?"),
    Message("assistant", "", tool_calls=(ToolCall("c1", "code_interpreter", '{"code": "print(6*7)"}'),)),
    Message("tool", "42", tool_call_id="c1", name="code_interpreter"),
]
PATH = "/v1/chat/completions"


async def chat(
    engine: ChatEngine, tools: Sequence[OpenAIFunctionToolSchema] = (), request_id: str = "r-1", **sampling: Any
) -> ChatGeneration:
    wanted = Sampling.model_validate({"max_tokens": 8, **sampling})
    return await engine.chat(TALK, tools, wanted, request_id=request_id)


def calls(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(pairs)
    ]


async def test_messages_tools_and_wishes_are_sent_in_openais_shape() -> None:
    async with EngineServer() as server, OpenaiEngine(server.url) as engine:
        assert isinstance(engine, ChatEngine)
        await chat(engine, [TOOL], temperature=0.7, seed=-1, stop=("X",), top_k=5, stop_token_ids=(3,))
        (body,) = server.posts(PATH)
        assert body == {
            "model": "byte-model",
            "messages": [message.as_openai() for message in TALK],
            "tools": [TOOL.model_dump()],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_tokens": 8,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 5,
            "seed": 2**63 - 1,
            "stop": ["X"],
            "stop_token_ids": [3],
            "logprobs": True,
            "return_token_ids": True,
        }


async def test_an_answer_is_token_exact_where_the_server_returns_tokens() -> None:
    async with EngineServer() as server, OpenaiEngine(server.url) as engine:
        found = await chat(engine)
        assert found.message == Message("assistant", byte_decode(found.token_ids or []))
        assert found.finish is Finish.LENGTH
        assert len(found.token_ids or []) == len(found.logprobs or []) == found.completion_tokens == 8
        assert len(found.prompt_ids or []) == found.prompt_tokens


async def test_sglangs_places_for_tokens_are_known_as_well() -> None:
    def as_sglang(answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        choice["response_token_ids"] = choice.pop("token_ids")
        choice["prompt_token_ids"] = answer.pop("prompt_token_ids")
        return answer | {"metadata": {"weight_version": "step-3"}}

    async with EngineServer() as server, OpenaiEngine(server.url) as engine:
        right = await chat(engine, temperature=0)
        server.rewrite = as_sglang
        found = await chat(engine, temperature=0)
        assert (found.prompt_ids, found.token_ids, found.logprobs) == (
            right.prompt_ids,
            right.token_ids,
            right.logprobs,
        )
        assert found.weight_version == "step-3"


async def test_a_server_that_returns_no_tokens_is_not_taken_to_be_token_exact() -> None:
    def plain(answer: dict[str, Any]) -> dict[str, Any]:
        answer.pop("prompt_token_ids")
        del answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]
        return answer

    async with EngineServer() as server, OpenaiEngine(server.url) as engine:
        server.rewrite = plain
        found = await chat(engine)
        assert (found.prompt_ids, found.token_ids, found.logprobs) == (None, None, None)
        assert found.message.content


async def test_calls_and_reasoning_are_taken_out_of_the_message() -> None:
    said = calls(("code_interpreter", '{"code": "1"}'), ("other", "no JSON"), ("third", {"a": 1}))
    answers = [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": said},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}], "reasoning": "ho", "tool_calls": None},
    ]
    async with EngineServer(chat=lambda body: answers.pop(0)) as server, OpenaiEngine(server.url) as engine:
        first = await chat(engine, [TOOL])
        assert first.finish is Finish.STOP
        assert first.message == Message(
            "assistant",
            "",
            "hm",
            (
                ToolCall("c0", "code_interpreter", '{"code": "1"}'),
                ToolCall("c1", "other", "no JSON"),
                ToolCall("c2", "third", '{"a": 1}'),
            ),
        )
        assert (await chat(engine)).message == Message("assistant", "hi", "ho")


async def test_a_server_that_refuses_what_it_does_not_know_is_asked_without_and_that_is_remembered() -> None:
    async with EngineServer(refuses_unknown=True) as server, OpenaiEngine(server.url) as engine:
        for _ in range(3):
            found = await chat(engine, [TOOL], seed=1)
            assert found.message.content
        first, second, *later = server.posts(PATH)
        assert "return_token_ids" in first
        assert first.keys() - second.keys() == {"logprobs", "return_token_ids", "parallel_tool_calls"}
        assert [body.keys() for body in later] == [second.keys()] * 2


async def test_what_was_asked_for_by_name_is_never_left_out() -> None:
    async with EngineServer(refuses_unknown=True) as server, OpenaiEngine(server.url) as engine:
        with pytest.raises(EngineRequestError, match="top_k"):
            await chat(engine, top_k=5)
        assert all(body["top_k"] == 5 for body in server.posts(PATH))


async def test_a_server_that_calls_max_tokens_otherwise_is_understood() -> None:
    words = b"""{"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}}"""
    async with EngineServer() as server, OpenaiEngine(server.url) as engine:
        server.faults = [Fault(status=400, body=words)]
        await chat(engine)
        await chat(engine)
        first, *later = server.posts(PATH)
        assert first["max_tokens"] == 8
        assert ["max_tokens" in body for body in later] == [False, False]
        assert [body["max_completion_tokens"] for body in later] == [8, 8]
        assert all(body["return_token_ids"] for body in later), "nothing else was refused"


async def test_a_request_that_is_too_long_is_not_blamed_on_the_fields() -> None:
    async with EngineServer(context=10) as server, OpenaiEngine(server.url) as engine:
        with pytest.raises(EngineRequestError, match="context length is 10"):
            await chat(engine)
        assert not engine._refused


async def test_an_empty_conversation_is_refused() -> None:
    async with EngineServer() as server, OpenaiEngine(server.url) as engine:
        with pytest.raises(EngineRequestError, match="empty"):
            await engine.chat([], [], Sampling(), request_id="r")


@pytest.mark.parametrize(
    ("finish", "found"),
    [("stop", Finish.STOP), ("length", Finish.LENGTH), ("tool_calls", Finish.STOP), ("abort", Finish.ABORT)],
)
async def test_finish_reasons_are_understood(finish: str, found: Finish) -> None:
    async with EngineServer() as server, OpenaiEngine(server.url) as engine:
        server.rewrite = lambda answer: answer | {"choices": [answer["choices"][0] | {"finish_reason": finish}]}
        assert (await chat(engine)).finish is found


BAD = {
    "no choices": {"choices": []},
    "choices of null": {"choices": None},
    "a choice that is none": {"choices": [7]},
    "no message": {"choices": [{"finish_reason": "stop"}]},
    "an unknown finish": {"choices": [{"message": {"content": "x"}, "finish_reason": ["stop"]}]},
    "content that is none": {"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]},
    "calls that are none": {"choices": [{"message": {"tool_calls": [7]}, "finish_reason": "stop"}]},
    "calls that are no list": {"choices": [{"message": {"tool_calls": 7}, "finish_reason": "stop"}]},
    "ids that are none": {"choices": [{"message": {"content": "x"}, "finish_reason": "stop", "token_ids": ["x"]}]},
    "parts that are no text": {"choices": [{"message": {"content": [{"type": "image"}]}, "finish_reason": "stop"}]},
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD.keys())
async def test_an_answer_that_is_none_is_an_engine_error(answer: dict[str, Any]) -> None:
    async with EngineServer() as server, OpenaiEngine(server.url, retries=0) as engine:
        server.rewrite = lambda _: answer
        with pytest.raises(EngineError, match=server.url) as failed:
            await chat(engine)
        assert failed.value.retryable


async def test_an_answer_that_was_withheld_is_a_refusal() -> None:
    async with EngineServer() as server, OpenaiEngine(server.url) as engine:
        server.rewrite = lambda _: {"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}
        with pytest.raises(EngineRequestError, match="content_filter"):
            await chat(engine)


async def test_logprobs_that_do_not_fit_the_tokens_are_left_out() -> None:
    def shorter(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0]["logprobs"]["content"].pop()
        return answer

    async with EngineServer() as server, OpenaiEngine(server.url) as engine:
        server.rewrite = shorter
        found = await chat(engine)
        assert (len(found.token_ids or []), found.logprobs) == (8, None)


async def test_a_url_with_a_path_is_taken_as_it_is_and_a_model_can_be_named() -> None:
    async with EngineServer() as server, OpenaiEngine(f"{server.url}/v1/", model="mine") as engine:
        await chat(engine)
        assert server.posts(PATH)[0]["model"] == "mine"


async def test_an_aborted_chat_ends_on_the_server_as_well() -> None:
    async with EngineServer(token_seconds=0.005) as server, OpenaiEngine(server.url) as engine:
        chatting = asyncio.ensure_future(chat(engine, max_tokens=2000))
        async with asyncio.timeout(5):
            while not server.running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await engine.abort("r-1")
            found = await chatting
            assert (found.finish, found.message.content, found.token_ids) == (Finish.ABORT, "", None)
            while server.running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
