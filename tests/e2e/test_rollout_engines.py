"""Rollouts over servers, on real sockets: by tokens, and by messages if the server's API has no tokens."""

from __future__ import annotations

import json

import pytest

from playing import CHAT, TOKENIZER, Echo, call, limits, request_for, task
from toolyard.engines.http.openai import OpenaiEngine
from toolyard.engines.http.sglang import SglangEngine
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import Sampling
from toolyard.records.audit import audit
from toolyard.rewards.registry import load_reward
from toolyard.rollout.finish import FinishReason
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.play.speaker import MessageSpeaker, TokenSpeaker
from toolyard.rollout.run_many import RolloutRun
from toolyard.testing.engine.byte_model import ByteModel
from toolyard.testing.engine.servers import OPENAI, SGLANG, VLLM, VLLM_TOKENS, EngineServer, Fault

HELD = limits(max_assistant_turns=3)
SAMPLING = Sampling(max_tokens=400)


async def run(place: Setting, count: int):
    requests = [request_for(place, task(id=f"task-{number}")) for number in range(count)]
    async with RolloutRun(place, requests, concurrency=count) as running:
        return [trajectory async for trajectory in running]


@pytest.mark.parametrize(
    ("engine_class", "routes"), [(SglangEngine, [SGLANG]), (VllmEngine, [VLLM]), (VllmEngine, [VLLM, VLLM_TOKENS])]
)
async def test_turns_over_servers_are_token_exact_through_their_failures(engine_class, routes):
    echo = Echo()
    model = ByteModel(call("echo", {"text": "hello"}))
    model.vocabulary = TOKENIZER.vocab_size
    async with EngineServer(routes, model=model) as one, EngineServer(routes, model=model) as two:
        one.faults = [Fault(503), None, Fault(hang_up_after=20), None, Fault(500, body=b"oops")]
        async with engine_class([one.url, two.url]) as engine:
            place = Setting(TokenSpeaker(engine, CHAT, SAMPLING, HELD), {"echo": echo}, HELD, load_reward("gsm8k"))
            ended = await run(place, 16)
    assert {trajectory.finish_reason for trajectory in ended} == {FinishReason.MAX_ASSISTANT_TURNS}
    for trajectory in ended:
        assert [message.role for message in trajectory.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
        assert trajectory.tokens.response_logprobs is not None
        assert audit(trajectory, TOKENIZER.decode) == []
    assert not echo.alive


def answering(body):
    if any(message["role"] == "tool" for message in body["messages"]):
        return {"role": "assistant", "content": "#### 42"}
    function = {"name": "echo", "arguments": json.dumps({"text": "42"})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("refuses_unknown", [True, False])
async def test_a_server_that_speaks_of_messages_is_played_and_marked_as_not_exact(refuses_unknown):
    """Whether or not it returns ids: those of this one do not extend each other, as it renders every time."""
    echo = Echo()
    async with EngineServer([OPENAI], model=ByteModel("ok"), chat=answering, refuses_unknown=refuses_unknown) as server:
        async with OpenaiEngine(server.url) as engine:
            place = Setting(MessageSpeaker(engine, SAMPLING, HELD), {"echo": echo}, HELD, load_reward("gsm8k"))
            ended = await run(place, 8)
        last = server.requests[-1][1]
    for trajectory in ended:
        assert (trajectory.finish_reason, trajectory.rewards["final"]) == (FinishReason.STOP, 1.0)
        assert (trajectory.token_exact, trajectory.tokens.response_ids) == (False, [])
        assert ("token_drift" in trajectory.metrics) == (not refuses_unknown)
        assert trajectory.turns[0].tool_calls[0].response == "42"
        assert audit(trajectory) == []
    assert [message["role"] for message in last["messages"]] == ["user", "assistant", "tool"]
    assert last["messages"][2]["tool_call_id"] == "c1"


async def test_ids_of_a_server_that_extend_each_other_are_exact():
    async with EngineServer([OPENAI], model=ByteModel("#### 42")) as server, OpenaiEngine(server.url) as engine:
        place = Setting(MessageSpeaker(engine, SAMPLING, HELD), {}, HELD, load_reward("gsm8k"))
        (trajectory,) = await run(place, 1)
    assert trajectory.token_exact
    assert bytes(trajectory.tokens.prompt_ids).decode().startswith("user: What is 6 times 7?")
    assert bytes(trajectory.tokens.response_ids[:7]).decode() == "#### 42"
    assert len(trajectory.tokens.response_ids) == sum(trajectory.tokens.response_mask)
    assert (trajectory.score, audit(trajectory)) == (1.0, [])
