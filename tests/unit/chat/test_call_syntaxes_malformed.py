"""Problems with a call are reported in words that a model can act on, and valid calls beside it are kept."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from toolyard.chat.protocol import ParsedCall, ParsedTurn
from toolyard.chat.syntax import syntax_of


def called(turn: ParsedTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


BROKEN = {
    "hermes": [
        ('<tool_call>{"name": "f", "arguments": {}}', "not closed: write </tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "between the JSON object and </tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {"a": "say("x")"}}</tool_call>', 'a double quote .* is written \\\\"'),
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', r"a line break .* is written \\n"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\d"}}</tool_call>', r"a backslash .* is written \\\\"),
        ('<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>', "True is written true"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not a number of JSON"),
        ("<tool_call>{'name': 'f'}</tool_call>", "double quotes"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "expected a key"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not a JSON object, but an array"),
        ('<tool_call>{"name": "f", "arguments": "hello"}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "f", "arguments": "[]"}</tool_call>', "not a JSON object, but an array"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "no name"),
        ('<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', '"name" is not a string'),
        ("<tool_call>f(1)</tool_call>", "expected a JSON object"),
        ("<tool_call></tool_call>", "expected a JSON object"),
        ("<tool_call>", "expected a JSON object, but the text ends"),
        ('<tool_call>{"name": "f", "argu', "not closed|not complete"),
        ('<tool_call>{"name": "f", "arguments": ' + '{"a":' * 99_999 + "1" + "}" * 100_000 + "</tool_call>", "nested"),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>", "digits"),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", "'a' is not closed"),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n", "'a' is not closed"),
        ("<tool_call>\n<function=f>\n", "not closed: write </function>"),
        ("<tool_call>\n<function=f>\nhello\n</function>\n</tool_call>", "come arguments"),
        ("<tool_call>\n<function=>\n</function>\n</tool_call>", "no name"),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', "no <function= after <tool_call>"),
    ],
    "llama3": [
        ('{"name": "f", "parameters": {"a": 1}', "not complete"),
        ("<|python_tag|>print(1)", "expected a JSON object"),
        ('<|python_tag|>{"parameters": {}}', 'no "name"'),
    ],
    "mistral": [
        ("[TOOL_CALLS]", "no name"),
        ("[TOOL_CALLS][]", "no call in the list"),
        ("[TOOL_CALLS]f", "expected a JSON object"),
        ('[TOOL_CALLS]f[ARGS]{"a"', "not complete"),
        ('[TOOL_CALLS][{"arguments": {}}]', 'no "name"'),
    ],
    "deepseek_v3": [
        ("<｜tool▁calls▁begin｜>hello<｜tool▁calls▁end｜>", "no <｜tool▁call▁begin｜>"),
        ("<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "no <｜tool▁sep｜>"),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "not closed: write <｜tool▁call▁end｜>"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n{}\n```<｜tool▁call▁end｜>", "no name"),
    ],
    "glm45": [
        ("<tool_call></tool_call>", "no name"),
        ("<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>", "come arguments"),
        ("<tool_call>f\n<arg_key>a</arg_key><arg_value>1</tool_call>", "'a' is not closed"),
        ("<tool_call>f", "not closed: write </tool_call>"),
    ],
    "kimi_k2": [
        ("<|tool_call_begin|>functions.f:0{}<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        ("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}", "not closed"),
        ("<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "no name"),
    ],
    "minimax_m2": [
        ("<minimax:tool_call>f</minimax:tool_call>", "no <invoke"),
        ("<minimax:tool_call><invoke>\n</invoke></minimax:tool_call>", '<invoke name="NAME">'),
        ('<minimax:tool_call><invoke name="f"><parameter name="a">1</invoke>', "'a' is not closed"),
    ],
    "harmony": [
        ("<|channel|>commentary to=functions.f", "ends before its arguments"),
        ('<|channel|>commentary to=functions.f<|message|>{"a": 1', "not complete"),
        ("<|channel|>commentary to=functions.f<|message|>{} and<|call|>", "between the JSON object and"),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "no name"),
        ("<|channel|>commentary to=python<|message|>print(1)<|call|>", "expected a JSON object"),
    ],
    "code_block": [
        ("```python\nprint(1)", "not closed: end the code with a line that contains only ```"),
        ("```python", "not closed"),
        ("<code>\nprint(1)\n", "not closed: end the code with </code>"),
        ("```python\n\n```\n", "no code"),
        ("<code></code>", "no code"),
    ],
}


@pytest.mark.parametrize(("name", "text", "why"), [(name, *case) for name, cases in BROKEN.items() for case in cases])
def test_a_malformed_call_says_why(name: str, text: str, why: str) -> None:
    turn = syntax_of(name).parse(text)
    assert turn.calls == ()
    assert len(turn.malformed) == 1
    assert re.search(why, turn.malformed[0].why), turn.malformed[0].why
    assert len(turn.malformed[0].why) < 300


SIBLINGS = {
    "hermes": ('<tool_call>{"name": "bad", "arguments": {"x": "oops}}</tool_call>', "\n"),
    "qwen3_coder": ("<tool_call>\n<function=bad>\n<parameter=x>\noops\n</function>\n</tool_call>", "\n"),
    "llama3": ('{"name": "bad", "parameters": {"x": "oops}}', "; "),
    "mistral": ('[TOOL_CALLS]bad[ARGS]{"x": "oops}', ""),
    "deepseek_v3": ('<｜tool▁call▁begin｜>bad<｜tool▁sep｜>{"x": "oops}<｜tool▁call▁end｜>', "\n"),
    "glm45": ("<tool_call>bad\n<arg_key>x</arg_key>\n<arg_value>oops</tool_call>", "\n"),
    "kimi_k2": ('<|tool_call_begin|>bad:0<|tool_call_argument_begin|>{"x": "oops}<|tool_call_end|>', ""),
    "minimax_m2": ('<invoke name="bad">\n<parameter name="x">oops\n</invoke>', "\n"),
    "harmony": ('<|start|>assistant<|channel|>commentary to=functions.bad<|message|>{"x": "oops}<|call|>', ""),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_good_siblings_of_a_malformed_call_are_kept_in_order(name: str) -> None:
    syntax, (bad, between) = syntax_of(name), SIBLINGS[name]
    first = syntax.write([ParsedCall("first", '{"x": "1 a"}')])
    second = syntax.write([ParsedCall("second", '{"x": "2 b"}')])
    third = syntax.write([ParsedCall("third", '{"x": "3 c"}')])
    turn = syntax.parse(between.join([first, bad, second, bad, third]))
    assert called(turn) == [("first", {"x": "1 a"}), ("second", {"x": "2 b"}), ("third", {"x": "3 c"})]
    assert len(turn.malformed) == 2
    assert all("bad" in call.text for call in turn.malformed)
    assert turn.text == ""


def test_good_elements_of_a_broken_list_are_kept() -> None:
    text = (
        '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "bad", "arguments": {"x": "oops}}, '
        '{"name": "b", "arguments": {}}, {"name": "c", "arguments": {}'
    )
    turn = syntax_of("mistral").parse(text)
    assert called(turn) == [("a", {}), ("b", {})]
    assert len(turn.malformed) == 2


def test_a_broken_call_with_a_tag_in_a_string_is_one_malformed_call() -> None:
    turn = syntax_of("hermes").parse('<tool_call>{"name": "f", "a": "</tool_call><tool_call>", oops}</tool_call> text')
    assert len(turn.malformed) == 1
    assert turn.text == "text"


def test_text_around_calls_is_text() -> None:
    turn = syntax_of("hermes").parse(
        '  One.\n<tool_call>{"name": "f"}</tool_call>\nTwo.\n<tool_call>oops</tool_call> Three.\n'
    )
    assert turn.text == "One.\nTwo.\nThree."


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}', '{"a": "b"}'),
        ('{"n\\u0061me": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        (
            '{"arguments": { "a":1.50,\n "a":2 , "b": "\\u00e9\\ud83d\\ude00 é" }, "name": "f"}',
            '{ "a":1.50,\n "a":2 , "b": "\\u00e9\\ud83d\\ude00 é" }',
        ),
    ],
)
def test_arguments_are_an_object_in_the_models_own_text(written: str, arguments: str) -> None:
    assert syntax_of("hermes").parse(f"<tool_call>{written}</tool_call>").calls == (ParsedCall("f", arguments),)


def test_an_answer_in_json_is_no_call_of_llama() -> None:
    for answer in ('{"answer": 5}', '{"name": "Ann", "age": 5}', '{"a": 1', "{1, 2}"):
        assert syntax_of("llama3").parse(answer) == ParsedTurn(answer)


def test_recipients_that_are_no_functions_keep_their_name() -> None:
    turn = syntax_of("harmony").parse('<|channel|>commentary to=browser.search<|message|>{"query": "x"}<|call|>')
    assert called(turn) == [("browser.search", {"query": "x"})]
