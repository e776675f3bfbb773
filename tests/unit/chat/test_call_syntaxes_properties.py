"""What holds for every syntax and every text: it is read, never raises, and what is written is found again."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from expensive import examples
from patience import processor_time
from toolyard.chat.protocol import ParsedCall
from toolyard.chat.syntax import SYNTAXES, syntax_of
from toolyard.errors import ChatError
from toolyard.messages import OpenAIFunctionToolSchema, decode_arguments

TAGS = (
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.f:0", "<minimax:tool_call>", "</minimax:tool_call>",
    '<invoke name="f">', "</invoke>", '<parameter name="a">', "<|start|>", "<|channel|>", "<|message|>", "<|end|>",
    "<|call|>", "<|return|>", "<|constrain|>", "commentary", "analysis", "final", " to=functions.f ", "```",
    "```python\n", "\n```\n", "```json\n", "<code>", "</code>", "<think>", "</think>", '"""', "'''", "\n", "\\", ";",
    '{"name": "f", "arguments": {"a": 1}}', '"', "{", "}", "[", "]", ",", ":", "#", "\ud800", "\x00",
)  # fmt: skip
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
TEXTS = st.one_of(st.text(max_size=20), st.lists(st.sampled_from(TAGS), max_size=6).map("".join))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
JSON_SYNTAXES = ("hermes", "llama3", "mistral", "deepseek_v3", "kimi_k2", "harmony")
ANY_NAME = ("hermes", "llama3", "mistral")
XML = ("qwen3_coder", "glm45", "minimax_m2")


def kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    known = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return known[type(value)]


@pytest.mark.parametrize("name", JSON_SYNTAXES)
@given(data=st.data(), ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
@settings(max_examples=examples(40), deadline=None)
def test_what_is_written_is_found_again_to_the_letter(
    name: str, data: st.DataObject, ascii_only: bool, indent: int | None
) -> None:
    names = st.one_of(NAMES, TEXTS.filter(str.strip)) if name in ANY_NAME else NAMES
    objects = st.dictionaries(TEXTS, VALUES, max_size=3)
    made = data.draw(st.lists(st.tuples(names, objects), min_size=1, max_size=3))
    calls = [ParsedCall(called, json.dumps(given, ensure_ascii=ascii_only, indent=indent)) for called, given in made]
    syntax = syntax_of(name)
    prose = "I call.\n" if name not in ("llama3", "harmony") else ""
    turn = syntax.parse(prose + syntax.write(calls))
    assert [(call.name, call.arguments) for call in turn.calls] == [(call.name, call.arguments) for call in calls]
    assert (turn.text, turn.reasoning, turn.malformed) == (prose.strip(), None, ())


@pytest.mark.parametrize("name", XML)
@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_values_that_are_text_are_found_again_if_the_schema_is_known(name: str, data: st.DataObject) -> None:
    objects = st.dictionaries(NAMES, VALUES, max_size=3)
    made = data.draw(st.dictionaries(NAMES, objects, min_size=1, max_size=3))
    calls = [ParsedCall(called, json.dumps(given, ensure_ascii=False)) for called, given in made.items()]
    tools = [
        OpenAIFunctionToolSchema.model_validate(
            {
                "function": {
                    "name": called,
                    "parameters": {"properties": {key: {"type": kind(v)} for key, v in given.items()}},
                }
            }
        )
        for called, given in made.items()
    ]
    syntax = syntax_of(name)
    try:
        written = syntax.write(calls)
    except ChatError:
        return  # a value holds what ends values; that it is refused is the point
    turn = syntax.parse(f"I call.\n{written}", tools)
    assert [(call.name, json.loads(call.arguments)) for call in turn.calls] == list(made.items())
    assert (turn.text, turn.malformed) == ("I call.", ())


@given(codes=st.lists(TEXTS.filter(str.strip), min_size=1, max_size=3))
@example(codes=['x = """\n```\n"""'])
@example(codes=["```\n````\n`````"])
@example(codes=["`" * 12, f"`````\n{'`' * 31}"])
@example(codes=["</code>", "<code>", "</think>"])
@settings(max_examples=examples(100), deadline=None)
def test_code_is_found_again(codes: list[str]) -> None:
    calls = [ParsedCall("code_interpreter", json.dumps({"code": code})) for code in codes]
    syntax = syntax_of("code_block")
    try:
        written = syntax.write(calls)
    except ChatError:
        # Quotes in triple that one block opens and another closes: each block for itself can be written.
        assert len(codes) > 1
        assert any(quotes in code for code in codes for quotes in ('"""', "'''"))
        return
    assert [json.loads(call.arguments)["code"] for call in syntax.parse(f"So:\n\n{written}\n").calls] == codes


@pytest.mark.parametrize("name", SYNTAXES)
@given(parts=st.lists(st.one_of(st.sampled_from(TAGS), st.text(max_size=6)), max_size=25), closing=st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_any_text_is_read_and_what_is_found_can_be_called(name: str, parts: list[str], closing: bool) -> None:
    text = "".join(parts)
    syntax = syntax_of(name) if name == "harmony" else syntax_of(name, calls_end_thinking=closing)
    turn = syntax.parse(text)
    for call in turn.calls:
        assert call.name.strip()
        assert decode_arguments(call.arguments)[1] is None
    for bad in turn.malformed:
        assert bad.why
        bad.why.encode()
        assert bad.text in text
    with contextlib.suppress(ChatError):
        assert [call.name for call in syntax.parse(syntax.write(turn.calls)).calls] == [
            call.name for call in turn.calls
        ]


@given(st.binary(max_size=60))
@settings(max_examples=examples(50), deadline=None)
def test_bytes_that_are_no_text_are_read(noise: bytes) -> None:
    for name in SYNTAXES:
        for errors in ("surrogateescape", "replace"):
            syntax_of(name).parse(noise.decode(errors=errors))
        syntax_of(name).parse(f'<tool_call>{{"name": "{noise.decode("latin-1")}')


FLOODS = {
    "hermes": [
        "<tool_call>",
        '<tool_call>{"',
        '<tool_call>{"a":"',
        '<tool_call>{"\\q',
        '<tool_call>{"name":"f"}</tool_call>',
    ],
    "qwen3_coder": ["<tool_call>", "<function=a><parameter=b>", "</parameter> ", "<tool_call><function=a"],
    "llama3": [';{"', "<|python_tag|>", '{"name":"a"};'],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS][{"a":[1,', '},{"'],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{"'],
    "glm45": ["<tool_call>f<arg_key>a</arg_key><arg_value>", "<tool_call> ", "</arg_value>"],
    "kimi_k2": ["<|tool_call_begin|>", '<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{"a":"'],
    "minimax_m2": ['<minimax:tool_call><invoke name="a"><parameter name="b">', "</parameter> "],
    "harmony": ["<|message|>", "<|start|>", "<|channel|>analysis<|message|>", '<|channel|>a to=f<|message|>{"a":"'],
    "gemma4": ["<|tool_call>", "<|tool_call>call:f{a:", '<|tool_call>call:f{a:<|"|>', '<|"|>', "<tool_call|>"],
    "code_block": ["`", "```\n", "````text\n```\n", '```python\n"""\n', '\\"', "<code>\n"],
}
BEGINNINGS = {
    "llama3": '{"name":"a","parameters":',
    "mistral": "[TOOL_CALLS][",
    "deepseek_v3": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
    "kimi_k2": "<|tool_call_begin|>f:0<|tool_call_argument_begin|>",
    "harmony": "<|channel|>commentary to=f<|message|>",
    "code_block": "```python\n",
    "qwen3_coder": "<function=f><parameter=a>",
    "minimax_m2": '<invoke name="f"><parameter name="a">',
    "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "hermes": "<tool_call>",
}


@pytest.mark.parametrize(
    "name", [name if name in JSON_SYNTAXES else pytest.param(name, marks=pytest.mark.exhaustive) for name in SYNTAXES]
)
@pytest.mark.slow
def test_a_flood_takes_time_linear_in_its_length(name: str) -> None:
    """The bound is far above what it takes; several attempts, since processors may be much slower for a moment."""

    def seconds(text: str) -> float:
        began = time.process_time()
        syntax.parse(text)
        return time.process_time() - began

    syntax = syntax_of(name)
    written = syntax.write([ParsedCall("code_interpreter", '{"code": "1"}')])
    half = len(written) // 2
    floods = FLOODS.get(name, [syntax.sign, written, written[:half], written[half:], "'", "["])
    for flood in (*floods, '{"a":', "\\", "</think>"):
        text = BEGINNINGS.get(name, written[:half]) + flood * (150_000 // len(flood))
        assert any(seconds(text) < processor_time(3) for _ in range(3)), flood
