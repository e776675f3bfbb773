"""Real clients, unmodified, at the embedded model: every branch is exact, as a forward pass confirms."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anthropic
import openai
import pytest

from toolyard.engines.models import resolve_model
from toolyard.engines.protocol import Sampling
from toolyard.gateway import GatewayConfig, RunningGateway, SessionEnd, open_gateway
from toolyard.records.audit import audit
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.assembly import open_token_engine
from toolyard.rollout.config import load_config
from training_trl import recomputed

ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object"}},
}


async def with_openai(running: RunningGateway) -> None:
    """Two turns, streaming and not, with tools on offer; then the history is compacted."""
    async with openai.AsyncOpenAI(base_url=running.session_url("openai"), api_key="any") as client:
        messages: list[Any] = [{"role": "user", "content": "What is 20 + 22? Think step by step."}]
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD], max_tokens=16)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content"}))
        messages.append({"role": "user", "content": "Are you sure?"})
        asked: Any = {"model": "m", "messages": messages, "tools": [ADD], "max_tokens": 16}
        stream = await client.chat.completions.create(**asked, stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        summary = f"So far you said: {said}. Finish."
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": summary}], max_tokens=16)


async def with_anthropic(running: RunningGateway) -> None:
    """A main agent that asks a sub-agent in between."""
    url = running.session_url("anthropic").removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:

        async def ask(messages: list[Any], **options: Any) -> list[Any]:
            answer = await client.messages.create(model="m", max_tokens=16, messages=messages, **options)
            return [*messages, {"role": "assistant", "content": answer.content}]

        said = await ask([{"role": "user", "content": "Name a colour."}])
        helped = await ask([{"role": "user", "content": "Name an animal."}], system="You help.")
        await ask([*said, {"role": "user", "content": f"And for {helped[-1]['content'][0].text}?"}])


async def with_a_framework(running: RunningGateway) -> None:
    """The OpenAI Agents SDK, over two runs of one conversation."""
    import agents

    agents.set_tracing_disabled(disabled=True)
    async with openai.AsyncOpenAI(base_url=running.session_url("framework"), api_key="any") as client:
        model = agents.OpenAIResponsesModel(model="m", openai_client=client)
        calm = agents.ModelSettings(temperature=0.0)  # it ends its turns soon: the SDK raises if one is cut off
        agent = agents.Agent(name="friend", instructions="Be brief.", model=model, model_settings=calm)
        first = await agents.Runner.run(agent, "Hello!")
        await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And you?"}])


@pytest.mark.slow
async def test_every_branch_of_every_client_is_exact_to_the_token_and_its_probability() -> None:
    import torch
    import transformers

    ended: list[Trajectory] = []

    async def finish(trajectories: list[Trajectory]) -> None:
        ended.extend(trajectories)

    config = load_config(None)
    serving = GatewayConfig(port=0, sampling=Sampling(max_tokens=300))
    async with AsyncExitStack() as stack:
        opened = await open_token_engine(config, stack, lambda _: None)
        running = await stack.enter_async_context(
            open_gateway(serving, opened.engine, opened.chat, opened.tokenizer, finish=finish)
        )
        for play in (with_openai, with_anthropic, with_a_framework):
            await play(running)
        for session in running.sessions.open:
            await running.gateway.end(session, SessionEnd.STOP)
    assert sorted(branch.request_id for branch in ended) == [
        "anthropic",
        "anthropic-branch-0",
        "framework",
        "openai",
        "openai-branch-0",
    ]
    of_two_turns = [branch.request_id for branch in ended if len(branch.turns) == 2]
    assert of_two_turns == ["openai-branch-0", "anthropic", "framework"]
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_pretrained(resolve_model(opened.name), dtype=torch.float32)
    for branch in ended:
        assert audit(branch, opened.tokenizer.decode, opened.tokenizer.vocab_size) == []
        tokens = branch.tokens
        expected = recomputed(model, tokens.prompt_ids, tokens.response_ids)
        pairs = zip(tokens.response_logprobs or (), expected, tokens.response_mask, strict=True)
        assert max(abs(one - other) for one, other, sampled in pairs if sampled) < 1e-4
