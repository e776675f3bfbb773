"""What a real vLLM returns is what it sampled, token by token, by each of its routes."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

import aiohttp
import pytest
from vllm_server import NAME, VllmServer

from toolyard.chat.formats import open_format
from toolyard.chat.protocol import ChatFormat, Tokenizer
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import Finish, Generation, Sampling
from toolyard.errors import EngineRequestError
from toolyard.messages import Message

either_route = pytest.mark.parametrize("server", ["plain", "tokens"], indirect=True, scope="session")
in_development = pytest.mark.parametrize("server", ["development"], indirect=True, scope="session")
STORY = "Once upon a time, in a small village,"


@pytest.fixture(scope="session")
def chat(tokenizer: Tokenizer) -> ChatFormat:
    return open_format(tokenizer, format="code_block")


async def sample(engine: VllmEngine, prompt: list[int], request_id: str = "r-1", **sampling: object) -> Generation:
    wanted = Sampling.model_validate({"max_tokens": 24, "temperature": 0.0, **sampling})
    async with asyncio.timeout(60):
        return await engine.generate(prompt, wanted, request_id=request_id)


async def post(server: VllmServer, path: str, body: object = None) -> dict:
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


@either_route
async def test_the_tokens_are_those_of_the_text(engine: VllmEngine, server: VllmServer, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(STORY)
    found = await sample(engine, prompt)
    said = await post(server, "/v1/completions", {"model": NAME, "prompt": STORY, "max_tokens": 24, "temperature": 0.0})
    assert tokenizer.decode(found.token_ids) == said["choices"][0]["text"]


@either_route
async def test_log_probabilities_are_those_of_the_model_whatever_the_sampling(
    engine: VllmEngine, model: Path, tokenizer: Tokenizer
) -> None:
    """Those at temperature 1, vLLM's default (`--logprobs-mode raw_logprobs`)."""
    prompt = tokenizer.encode(STORY)
    for sampling in ({"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.9, "top_k": 50, "seed": 7}):
        found = await sample(engine, prompt, **sampling)
        expected = _scored_by_transformers(model, prompt, found.token_ids)
        assert found.logprobs == pytest.approx(expected, abs=2e-3)


@either_route
async def test_the_end_of_a_message_is_a_token_of_it(engine: VllmEngine, chat: ChatFormat) -> None:
    """Also where the model's own files say which token ends it, and the request does not."""
    prompt = chat.render([Message("user", "What is the capital of France? One word.")], ())
    (end,) = chat.stop_token_ids
    for stops in ((end,), ()):
        found = await sample(engine, prompt, max_tokens=200, stop_token_ids=stops)
        assert (found.finish, found.token_ids[-1]) == (Finish.STOP, end)
        assert end not in found.token_ids[:-1]
        assert found.logprobs is not None
        assert len(found.logprobs) == len(found.token_ids)
        assert found.stop_text is None


@either_route
async def test_a_closed_code_block_ends_a_message_and_is_kept(
    engine: VllmEngine, chat: ChatFormat, tokenizer: Tokenizer
) -> None:
    asked = Message("user", "Write a python code block that prints 6 * 7, and explain it.")
    prompt = [*chat.render([asked], ()), *tokenizer.encode("```python\n")]
    found = await sample(engine, prompt, max_tokens=200, stop=chat.stop, stop_token_ids=chat.stop_token_ids)
    assert (found.finish, found.stop_text) == (Finish.STOP, "\n```\n")
    text = tokenizer.decode(found.token_ids)
    assert "\n```\n" in text
    assert "\n```\n" not in tokenizer.decode(found.token_ids[:-1])


@either_route
async def test_the_beginning_of_a_conversation_is_not_computed_again(engine: VllmEngine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("A conversation about numbers. " + " ".join(map(str, range(200))))
    first = await sample(engine, prompt, max_tokens=4)
    second = await sample(engine, [*prompt, *first.token_ids], max_tokens=4)
    assert second.cached_tokens is not None
    assert len(prompt) // 2 < second.cached_tokens <= len(prompt) + 4


@pytest.mark.parametrize(("server", "version"), [("plain", None), ("tokens", "default")], indirect=["server"], scope="session")  # fmt: skip  # noqa: E501
async def test_the_version_of_the_weights_is_told_where_vllm_tells_it(
    engine: VllmEngine, tokenizer: Tokenizer, version: str | None
) -> None:
    assert (await sample(engine, tokenizer.encode(STORY))).weight_version == version


@either_route
async def test_a_model_that_is_not_served_is_refused(server: VllmServer, tokenizer: Tokenizer) -> None:
    async with VllmEngine(server.url, model="another") as engine:
        with pytest.raises(EngineRequestError, match="another"):
            await sample(engine, tokenizer.encode(STORY))


@in_development
async def test_a_request_goes_on_exactly_after_the_server_was_paused_for_new_weights(
    engine: VllmEngine, server: VllmServer, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(STORY)
    whole = (await sample(engine, prompt, max_tokens=200)).token_ids
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(sample(engine, prompt, max_tokens=200))
        await asyncio.sleep(0.5)
        await post(server, "/pause?mode=abort")
    try:
        first = running.result()
        assert first.finish is Finish.ABORT
        assert 0 < len(first.token_ids) < 200
    finally:
        await post(server, "/resume")
    left = 200 - len(first.token_ids)
    rest = await sample(engine, [*prompt, *first.token_ids], max_tokens=left)
    assert first.token_ids + rest.token_ids == whole


def _scored_by_transformers(model: Path, prompt: list[int], sampled: list[int]) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = loaded(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    scores = logits.log_softmax(-1)
    return [scores[place, token].item() for place, token in enumerate(sampled)]
