"""A call that is not in its format's syntax is not silently lost."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_call_syntaxes import tool
from test_call_syntaxes_properties import FLOODS, TAGS

from chat_models import CODE_TOOL, tokenizer
from expensive import examples
from patience import processor_time
from toolyard.chat.formats import open_format
from toolyard.chat.near_misses import with_near_misses
from toolyard.chat.protocol import ChatFormat, MalformedCall, ParsedCall, ParsedTurn
from toolyard.chat.syntax import SYNTAXES, syntax_of
from toolyard.testing.engine.byte_tokenizer import ByteTokenizer

ADD = tool("add", numbers={"type": "array"})
CALL = '{"name": "add", "arguments": {"numbers": [1, 2]}}'
UNKNOWN = '{"name": "calculator", "arguments": {"x": 1}}'
BYTES = ByteTokenizer()
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"numbers": [1, 2]}}\n</tool_call>'


@cache
def opened(syntax: str) -> ChatFormat:
    return open_format(BYTES, format=syntax)


def read(text: str, syntax: str = "hermes", tools: Any = (ADD,)) -> ParsedTurn:
    return opened(syntax).parse(BYTES.encode(text), tools)


def misses(text: str, syntax: str = "hermes", tools: Any = (ADD,)) -> tuple[MalformedCall, ...]:
    return read(text, syntax, tools).near_misses


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"I add them.\n```json\n{CALL}\n```\nDone.",
        f"```\n{CALL}\n```",
        f"```json {CALL}```",
        f"<function_call>{CALL}</function_call>",
        f"<tool>\n{CALL}\n</tool>",
        f"<tool_code>{CALL}",
        f"[{CALL}]",
        f"So: {CALL}, and wait.",
        f'The set {{1, 2}} has "two" {{elements}}: {CALL}',
        '{"name": "add", "parameters": {"numbers": [1, 2]}}',
        '{"arguments": {"numbers": [1, 2]},\n "name": "add"}',
        '{"name": "add", "arguments": "{\\"numbers\\": [1, 2]}"}',
        '{"type": "function", "function": {"name": "add", "arguments": {"numbers": [1, 2]}}}',
        '{"tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{\\"numbers\\": [1, 2]}"}}]}',
        '<|python_tag|>{"name": "add", "parameters": {"numbers": [1, 2]}}',
    ],
)
def test_json_that_calls_a_tool_is_told_how_calls_are_written(text: str) -> None:
    turn = read(text)
    assert (turn.calls, turn.malformed) == ((), ())
    (miss,) = turn.near_misses
    assert miss.text in text
    assert miss.why == f'this looks like a call of "add", but calls are written like this:\n{WRITTEN}'


@pytest.mark.parametrize("other", [name for name in SYNTAXES if name != "code_block"])
@pytest.mark.parametrize("own", SYNTAXES)
def test_a_call_in_the_syntax_of_another_model_is_not_lost(own: str, other: str) -> None:
    call = ParsedCall("code_interpreter", '{"code": "print(1)"}')
    text = f"{'' if other == 'llama3' else 'I call it.'}{syntax_of(other).write([call])}"
    turn = read(text, own, [CODE_TOOL])
    if turn.calls or turn.malformed:
        assert not turn.near_misses
        return
    (miss,) = turn.near_misses
    assert miss.text in text
    example = miss.why.partition(":\n")[2]
    assert [(one.name, json.loads(one.arguments)) for one in syntax_of(own).parse(example, [CODE_TOOL]).calls] == [
        ("code_interpreter", {"code": "print(1)"})
    ]


def test_each_of_several_calls_is_told() -> None:
    sub = CALL.replace("add", "sub")
    found = misses(f"[{CALL},\n {sub}]", tools=[ADD, tool("sub")])
    assert [miss.text for miss in found] == [CALL, sub]
    written = syntax_of("qwen3_coder").write([ParsedCall("add", "{}"), ParsedCall("sub", "{}")])
    assert len(misses(written, "mistral", [ADD, tool("sub")])) == 2


def test_where_json_alone_is_a_call_it_is_told_to_stand_alone() -> None:
    (miss,) = misses(f"Sure!\n```json\n{CALL}\n```", "llama3")
    assert "but calls are written like this, as the whole message:\n{" in miss.why


@pytest.mark.parametrize(
    "text", [UNKNOWN, f"\n{UNKNOWN}\n", f"I use this:\n```json\n{UNKNOWN}\n```", f"```\n[{UNKNOWN}]\n```"]
)
def test_a_tool_that_is_not_offered_is_told_if_nothing_stands_around_the_json(text: str) -> None:
    (miss,) = misses(text)
    assert miss.why.startswith('this looks like a call of "calculator", but calls are written like this:')


@pytest.mark.parametrize(
    "text",
    [
        "They add up to 6.",
        '{"name": "Ann", "age": 3}',
        '```json\n{"name": "add", "age": 3}\n```',
        '{"name": "Ann of Cleves", "parameters": {"age": 24}}',
        f"Such as {UNKNOWN}, which is not here.",
        '{"name": "add", "arguments": [1, 2]}',
        '{"name": "add", "arguments": {"numbers": [1, 2]}',
        '{"name": 1, "arguments": {}}',
        '{"people": [{"name": "add", "arguments": {}}]}',
        "```python\nadd(numbers=[1, 2])\n```",
        '```python\nprint("name")\n```',
        json.dumps(ADD.model_dump()),
        f"The tool is {json.dumps(ADD.model_dump()['function'])}.",
        f"<think>Maybe {CALL}?</think>No.",
        f"<think>Maybe {CALL}",
        f"Maybe {CALL}?</think>No.",
    ],
)
def test_what_is_not_meant_as_a_call_is_left_alone(text: str) -> None:
    assert misses(text) == ()


def test_code_in_a_fence_is_prose_though_the_code_tool_is_offered() -> None:
    assert misses('```python\nprint("name")\n```', tools=[CODE_TOOL]) == ()
    assert misses("<code>print(1)</code>", tools=[CODE_TOOL]) == ()


def test_without_tools_there_is_nothing_to_miss() -> None:
    assert misses(CALL, tools=()) == ()


@pytest.mark.parametrize("beside", [WRITTEN, "<tool_call>{</tool_call>"])
def test_beside_a_call_or_a_malformed_one_nothing_is_a_near_miss(beside: str) -> None:
    turn = read(f"{CALL}\n{beside}")
    assert turn.calls or turn.malformed
    assert turn.near_misses == ()


def test_an_ordinary_turn_is_not_touched() -> None:
    turn = ParsedTurn('They add up to 6, and "name" is a word.')
    assert with_near_misses(turn, [ADD], str) is turn


def test_long_texts_and_values_are_cut() -> None:
    long = json.dumps({"name": "code_interpreter", "arguments": {"code": "x = 1\n" * 1000, "language": "python"}})
    (miss,) = misses(long, tools=[CODE_TOOL])
    assert long.startswith(miss.text)
    assert len(miss.text) == 400
    assert '{"code": "…", "language": "python"}' in miss.why
    (miss,) = misses(
        json.dumps({"name": "code_interpreter", "arguments": {"code": "x = 1\n" * 50}}), "code_block", [CODE_TOOL]
    )
    assert miss.why.endswith(":\n```python\n…\n```")


def test_a_call_that_the_format_cannot_write_is_told_without_an_example() -> None:
    (miss,) = misses(CALL, "code_block")
    assert miss.why == 'this looks like a call of "add", but calls are not written like this'


@pytest.mark.parametrize(
    ("family", "example"),
    [
        ("qwen3", WRITTEN),
        ("llama-3", '{"name": "add", "parameters": {"numbers": [1, 2]}}'),
        ("glm-4.5", "<tool_call>add\n<arg_key>numbers</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>"),
        (
            "qwen3.5",
            "<tool_call>\n<function=add>\n<parameter=numbers>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_renderers_tell_it_in_the_words_of_their_family(family: str, example: str) -> None:
    pytest.importorskip("renderers", reason="needs 'renderers', of the extra 'chat'")
    made = tokenizer("qwen")
    chat = open_format(made, format=f"renderers:{family}")
    turn = chat.parse(made.encode(f"<think>\n\n</think>\n\nI add.\n```json\n{CALL}\n```<|im_end|>"), [ADD])
    assert [miss.why.partition(":\n")[2] for miss in turn.near_misses] == [example]
    if family != "llama-3":  # which has no reasoning
        assert chat.parse(made.encode(f"<think>\n{CALL}\n</think>\n\n3<|im_end|>"), [ADD]).near_misses == ()


@given(parts=st.lists(st.one_of(st.sampled_from([*TAGS, CALL, UNKNOWN, '"name"']), st.text(max_size=6)), max_size=15))
@settings(max_examples=examples(200), deadline=None)
def test_any_text_is_looked_through(parts: list[str]) -> None:
    text = "".join(parts)
    tools = [ADD, tool("f"), CODE_TOOL]
    for name in ("hermes", "qwen3_coder", "code_block"):
        syntax = syntax_of(name)
        turn = with_near_misses(ParsedTurn(text), tools, lambda call, syntax=syntax: syntax.write([call]))
        for miss in turn.near_misses:
            assert miss.text in text
            miss.why.encode()


DEEP = '{"name": "add", "arguments": {"a": ' + '{"a": ' * 20_000 + "1" + "}" * 20_002


@pytest.mark.parametrize(
    "text",
    [
        *(flood * (150_000 // len(flood)) for flood in sorted({one for floods in FLOODS.values() for one in floods})),
        *(
            flood * (150_000 // len(flood))
            for flood in ('{"', '{"a":', '{"function":', "[", "```\n[", CALL, UNKNOWN, "``` ")
        ),
        DEEP,
        '{"function": ' * 900 + "1" + "}" * 900,
        '{"name": "add", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}",
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.slow
def test_a_flood_takes_little_time(text: str) -> None:
    """The bound is far above what it takes."""
    began = time.process_time()
    with_near_misses(ParsedTurn(f'"name"{text}'), [ADD], lambda call: syntax_of("hermes").write([call]))
    with_near_misses(ParsedTurn(text), [ADD], lambda call: syntax_of("hermes").write([call]))
    assert time.process_time() - began < processor_time(3)


def test_a_near_miss_at_the_end_of_a_long_turn_is_found() -> None:
    assert [miss.text for miss in misses("It is so. " * 10_000 + CALL)] == [CALL]
