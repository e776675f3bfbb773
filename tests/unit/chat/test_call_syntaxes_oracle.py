"""The parsers of `renderers`, which read tokens, find the same in what well-behaved models write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from late import Late
from toolyard.chat.protocol import ParsedCall, ParsedTurn
from toolyard.chat.syntax import syntax_of
from toolyard.messages import OpenAIFunctionToolSchema

parsing = Late("renderers.parsing")  # of the extra 'chat'


class Letters:
    """A tokenizer with a token for each character and each of some tags."""

    unk_token_id = -1

    def __init__(self, *tags: str) -> None:
        self._tags = dict(zip(tags, range(0x110000, 0x110000 + len(tags)), strict=True))
        self._pattern = re.compile("|".join([*map(re.escape, tags), "."]), re.DOTALL)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self._tags.get(part) or ord(part) for part in self._pattern.findall(text)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        named = {token: tag for tag, token in self._tags.items()}
        return "".join(named.get(token) or chr(token) for token in ids)

    def convert_tokens_to_ids(self, tag: str) -> int:
        return self._tags.get(tag, self.unk_token_id)


def oracle(parser: str, prefix: str = "", **tags: str) -> Callable[..., Any]:
    """`parser`: its name there. `tags`: the keyword of the token, and its text."""
    letters = Letters(*tags.values())
    ids = {keyword: letters.convert_tokens_to_ids(tag) for keyword, tag in tags.items()}
    stops = {} if parser == "parse_gpt_oss" else {"stop_ids": set[int]()}

    def parse(text: str, **more: Any) -> Any:
        return getattr(parsing, parser)(letters, letters.encode(prefix + text), **stops, **ids, **more)

    return parse


TOOL_CALL = {"tool_call_id": "<tool_call>", "tool_call_end_id": "</tool_call>"}
THINK = {"think_id": "<think>", "think_end_id": "</think>"}
ORACLES = {
    "hermes": oracle("parse_qwen3", **TOOL_CALL, reasoning_end_id="</think>"),
    "qwen3_coder": oracle("parse_qwen35", **TOOL_CALL, **THINK),
    "llama3": oracle("parse_llama_3"),
    "deepseek_v3": oracle(
        "parse_deepseek_v3",
        tool_calls_begin_id="<｜tool▁calls▁begin｜>",
        tool_calls_end_id="<｜tool▁calls▁end｜>",
        tool_call_begin_id="<｜tool▁call▁begin｜>",
        tool_call_end_id="<｜tool▁call▁end｜>",
        tool_sep_id="<｜tool▁sep｜>",
    ),
    "glm45": oracle(
        "parse_glm",
        **TOOL_CALL,
        **THINK,
        arg_key_id="<arg_key>",
        arg_key_end_id="</arg_key>",
        arg_value_id="<arg_value>",
        arg_value_end_id="</arg_value>",
    ),
    "kimi_k2": oracle(
        "parse_kimi_k2",
        tool_calls_section_begin_id="<|tool_calls_section_begin|>",
        tool_calls_section_end_id="<|tool_calls_section_end|>",
        tool_call_begin_id="<|tool_call_begin|>",
        tool_call_argument_begin_id="<|tool_call_argument_begin|>",
        tool_call_end_id="<|tool_call_end|>",
    ),
    "minimax_m2": oracle(
        "parse_minimax",
        **THINK,
        tool_call_id="<minimax:tool_call>",
        tool_call_end_id="</minimax:tool_call>",
    ),
    "harmony": oracle(
        "parse_gpt_oss",
        "<|start|>assistant",
        return_id="<|return|>",
        call_id="<|call|>",
        start_id="<|start|>",
        end_id="<|end|>",
        channel_id="<|channel|>",
        message_id="<|message|>",
        constrain_id="<|constrain|>",
    ),
}
TYPED = ("qwen3_coder", "glm45", "minimax_m2")
"""Those that ask the tools' schemas."""

PROSE = st.from_regex(r"([A-Z][a-z ,']{0,20}[.!]\n?){0,2}", fullmatch=True).map(str.strip)
STRINGS = st.text(st.characters(exclude_characters="<>[]{}", exclude_categories=("Cs", "Cc")), max_size=12).map(
    str.strip
)
ARGUMENTS = st.fixed_dictionaries({"text": STRINGS, "count": st.integers(), "deep": st.lists(STRINGS, max_size=2)})
CALLS = st.lists(st.tuples(st.sampled_from(["add", "get_weather"]), ARGUMENTS), max_size=3)
SCHEMA = {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "array"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": SCHEMA}}}
    for name in ("add", "get_weather")
]
OUR_TOOLS = [OpenAIFunctionToolSchema.model_validate(tool) for tool in TOOLS]


def turn_text(name: str, prose: str, calls: list[tuple[str, Any]], reasoning: str | None) -> str:
    written = syntax_of(name).write([ParsedCall(called, json.dumps(given)) for called, given in calls])
    if name == "harmony":
        thought = "" if reasoning is None else f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
        said = f"<|channel|>commentary<|message|>{prose}<|end|>" if prose else ""
        return thought + said + ("<|start|>assistant" if said and written else "") + written
    return ("" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n") + prose + written


def heard(turn: ParsedTurn) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [(call.name, json.loads(call.arguments)) for call in turn.calls]
    return turn.text, turn.reasoning or "", calls


@pytest.mark.parametrize("name", ORACLES)
@given(prose=PROSE, calls=CALLS, reasoning=st.one_of(st.none(), PROSE))
@settings(max_examples=examples(40), deadline=None)
def test_renderers_finds_the_same(name: str, prose: str, calls: list[tuple[str, Any]], reasoning: str | None) -> None:
    if name == "llama3":  # which has one call and nothing else, and no reasoning
        prose, calls, reasoning = ("" if calls else prose), calls[:1], None
    text = turn_text(name, prose, calls, reasoning)
    found = ORACLES[name](text, **({"tools": TOOLS} if name in TYPED else {}))
    assert [str(call.status.value) for call in found.tool_calls] == ["ok"] * len(calls)
    theirs = [(call.name, call.arguments) for call in found.tool_calls]
    ours = heard(syntax_of(name).parse(text, OUR_TOOLS))
    assert ours == (found.content.strip(), (found.reasoning_content or "").strip(), theirs)
    assert ours[2] == calls


BROKEN = {
    "hermes": [
        '<tool_call>{"name": "f", "arguments": {}',
        '<tool_call>{"a": 1}</tool_call>',
        "<tool_call>f()</tool_call>",
    ],
    "qwen3_coder": ["<tool_call>\n<function=f>\n", "<tool_call>hello</tool_call>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"],
    "kimi_k2": ["<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"],
    "glm45": ["<tool_call>f\n<arg_key>a</arg_key>"],
    "harmony": ['<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": oops}<|call|>'],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_renderers_finds_it_broken_too(name: str, text: str) -> None:
    found = ORACLES[name](text)
    assert [call.status.value == "ok" for call in found.tool_calls] == [False]
    turn = syntax_of(name).parse(text)
    assert (len(turn.calls), len(turn.malformed)) == (0, 1)
