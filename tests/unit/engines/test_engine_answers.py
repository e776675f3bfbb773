"""Whatever a server answers, the result is consistent or an `EngineError`: never another exception."""

from __future__ import annotations

import copy
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from toolyard.engines.http import openai, sglang, vllm
from toolyard.engines.protocol import ChatGeneration, Generation, Sampling
from toolyard.errors import EngineError

SAMPLING = Sampling(max_tokens=4, stop=("x",), stop_token_ids=(2,))

SGLANG = {
    "text": "ab",
    "output_ids": [1, 2],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_version": "v1",
        "weight_versions": [{"version": "v1", "start": 0, "end": 2}],
        "cached_tokens": 3,
        "output_token_logprobs": [[-0.5, 1, None], [-0.25, 2, None]],
    },
}
VLLM_TOKENS = {
    "choices": [
        {
            "finish_reason": "stop",
            "stop_reason": 2,
            "token_ids": [1, 2],
            "logprobs": {"content": [{"token_id": 1, "logprob": -0.5}, {"token_id": 2, "logprob": -0.25}]},
            "weight_versions": [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": 2}],
        }
    ],
    "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
}
VLLM = {
    "choices": [
        {
            "finish_reason": "stop",
            "stop_reason": "x",
            "token_ids": [1, 2],
            "logprobs": {"token_logprobs": [-0.5, -0.25]},
        }
    ],
    "usage": None,
}
CHAT = {
    "choices": [
        {
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "hi",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            "token_ids": [1, 2],
            "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
        }
    ],
    "prompt_token_ids": [7],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    "metadata": {"weight_version": "v1"},
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, part in inner for found in places(part, (*path, key)))]


def damaged(answer: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The answer, with something else, or nothing, in up to three of its places."""

    def damage(changes: list[tuple[tuple[Any, ...], Any, bool]]) -> dict[str, Any]:
        changed, changes = copy.deepcopy((answer, changes))
        for path, value, is_removed in changes:
            at = changed
            try:
                for key in path[:-1]:
                    at = at[key]
                if is_removed:
                    del at[path[-1]]
                else:
                    at[path[-1]] = value
            except (LookupError, TypeError):
                continue  # an earlier change took the place away
        return changed

    change = st.tuples(st.sampled_from(places(answer)[1:]), ANYTHING, st.booleans())
    return st.lists(change, max_size=3).map(damage)


def check(found: Generation | ChatGeneration) -> None:
    for ids in (found.token_ids, getattr(found, "prompt_ids", None)):
        assert ids is None or all(type(token) is int and token >= 0 for token in ids)
    if found.logprobs is not None:
        assert all(type(value) is float and math.isfinite(value) and value <= 0 for value in found.logprobs)
        assert found.token_ids is None or len(found.logprobs) == len(found.token_ids)
    assert found.weight_version is None or isinstance(found.weight_version, str)
    if isinstance(found, Generation):
        assert len(found.token_ids) <= SAMPLING.max_tokens
        assert found.cached_tokens is None or type(found.cached_tokens) is int
        assert found.stop_text in (None, "x")
    else:
        assert isinstance(found.message.content, str)
        assert all(isinstance(text, str) for call in found.message.tool_calls for text in (call.id, call.arguments))


def test_whole_answers_are_read() -> None:
    first = sglang._generation("s", SGLANG, SAMPLING, 4)
    assert (first.token_ids, first.logprobs, first.weight_version, first.cached_tokens) == (
        [1, 2],
        [-0.5, -0.25],
        "v1",
        3,
    )
    assert vllm._of_tokens("s", VLLM_TOKENS, SAMPLING, 4).weight_version == "v1,v2"
    assert vllm._of_completion("s", VLLM, SAMPLING, 4).stop_text == "x"
    assert openai._answer("s", CHAT).message.tool_calls[0].name == "f"


@settings(max_examples=examples(100), deadline=None)
@given(damaged(SGLANG), damaged(VLLM_TOKENS), damaged(VLLM), damaged(CHAT))
def test_damaged_answers_add_up_or_are_engine_errors(
    of_sglang: dict[str, Any], of_tokens: dict[str, Any], of_completion: dict[str, Any], of_chat: dict[str, Any]
) -> None:
    for read, answer in (
        (lambda a: sglang._generation("s", a, SAMPLING, 4), of_sglang),
        (lambda a: vllm._of_tokens("s", a, SAMPLING, 4), of_tokens),
        (lambda a: vllm._of_completion("s", a, SAMPLING, 4), of_completion),
        (lambda a: openai._answer("s", a), of_chat),
    ):
        try:
            found = read(answer)
        except EngineError:
            continue
        check(found)
