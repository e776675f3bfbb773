"""Every call syntax: what real models write is parsed, and problems with a call are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolyard.chat.protocol import CallSyntax, ParsedCall, ParsedTurn
from toolyard.chat.syntax import SYNTAXES, syntax_of
from toolyard.chat.syntax.base import ProseSyntax, TextSyntax
from toolyard.errors import ConfigError
from toolyard.messages import OpenAIFunctionToolSchema


def tool(name: str = "f", **properties: Any) -> OpenAIFunctionToolSchema:
    parameters = {"type": "object", "properties": properties}
    return OpenAIFunctionToolSchema.model_validate({"function": {"name": name, "parameters": parameters}})


def called(turn: ParsedTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


PARIS = ("get_weather", {"city": "Paris"})
GOLDEN = {
    "hermes": (
        (
            '<think>\nThe user wants the weather.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": '
            '{"city": "Paris"}}\n</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
        ),
        ParsedTurn("", "The user wants the weather."),
        [PARIS, ("get_time", {})],
    ),
    "hermes, reasoning opened by the prompt": (
        (
            'Let me see.\n</think>\n\nI look it up.\n<tool_call>\n{"name": "get_weather", "arguments": '
            '{"city": "Paris"}}\n</tool_call>'
        ),
        ParsedTurn("I look it up.", "Let me see."),
        [PARIS],
    ),
    "qwen3_coder": (
        (
            "I'll look it up.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n<parameter=parts>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
        ),
        ParsedTurn("I'll look it up."),
        [("get_weather", {"city": "Paris", "days": 3, "parts": [1, 2]})],
    ),
    "qwen3_coder, without the opening tag": (
        "I'll look it up.\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        ParsedTurn("I'll look it up."),
        [PARIS],
    ),
    "llama3": ('{"name": "get_weather", "parameters": {"city": "Paris"}}', ParsedTurn(""), [PARIS]),
    "llama3, tagged": (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}};{"name": "get_time", "parameters": {}}',
        ParsedTurn(""),
        [PARIS, ("get_time", {})],
    ),
    "llama3, with a type": (
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        ParsedTurn(""),
        [PARIS],
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}]',
        ParsedTurn(""),
        [PARIS],
    ),
    "mistral, names first": (
        'I look it up.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[CALL_ID]VvvODy9mT[ARGS]{}',
        ParsedTurn("I look it up."),
        [PARIS, ("get_time", {})],
    ),
    "mistral, names before braces": (
        '[THINK]Weather.[/THINK][TOOL_CALLS]get_weather{"city": "Paris"}',
        ParsedTurn("", "Weather."),
        [PARIS],
    ),
    "deepseek_v3": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n'
            "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        ParsedTurn(""),
        [PARIS, ("get_time", {})],
    ),
    "deepseek_v3, as of 3.1": (
        (
            "I look it up.</think>Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>"
        ),
        ParsedTurn("Now.", "I look it up."),
        [PARIS, ("get_time", {})],
    ),
    "glm45": (
        (
            "\n<think>Weather.</think>\nI look it up.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        ),
        ParsedTurn("I look it up.", "Weather."),
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    "glm45, on one line": (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call><tool_call>get_time</tool_call>",
        ParsedTurn(""),
        [PARIS, ("get_time", {})],
    ),
    "kimi_k2": (
        (
            "I look it up.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1'
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        ParsedTurn("I look it up."),
        [PARIS, ("get_time", {})],
    ),
    "minimax_m2": (
        (
            'Weather.\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n'
            '<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
            '</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>'
        ),
        ParsedTurn("", "Weather."),
        [("get_weather", {"city": "Paris", "days": 3}), ("get_time", {})],
    ),
    "harmony": (
        (
            "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris"}<|call|>'
        ),
        ParsedTurn("", "Need to use function get_weather."),
        [PARIS],
    ),
    "harmony, recipient first, stop token away": (
        (
            "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant to=functions.get_weather<|channel|>"
            'commentary json<|message|>{"city":"Paris"}'
        ),
        ParsedTurn("I look it up."),
        [PARIS],
    ),
    "harmony, final": (
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.",
        ParsedTurn("2 + 2 = 4.", "Easy."),
        [],
    ),
    "code_block": (
        "Let me compute it.\n\n```python\nprint(2 * 3)\n```\n",
        ParsedTurn("Let me compute it."),
        [("code_interpreter", {"code": "print(2 * 3)"})],
    ),
    "code_block, ReTool": (
        "Let me compute it.\n<code>\n```python\nprint(2 * 3)\n```\n</code>",
        ParsedTurn("Let me compute it."),
        [("code_interpreter", {"code": "print(2 * 3)"})],
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_what_models_write_is_read(case: str) -> None:
    text, expected, calls = GOLDEN[case]
    turn = syntax_of(case.split(",")[0]).parse(text)
    assert called(turn) == calls
    assert (turn.text, turn.reasoning, turn.malformed) == (expected.text, expected.reasoning, ())


def test_ids_of_the_model_are_kept() -> None:
    assert [call.id for call in syntax_of("kimi_k2").parse(GOLDEN["kimi_k2"][0]).calls] == [
        "functions.get_weather:0",
        "functions.get_time:1",
    ]
    mistral = syntax_of("mistral")
    assert mistral.parse(GOLDEN["mistral"][0]).calls[0].id == "VvvODy9mT"
    assert [call.id for call in mistral.parse(GOLDEN["mistral, names first"][0]).calls] == [None, "VvvODy9mT"]


# The table ------------------------------------------------------------------------------------------------------------


def test_an_unknown_syntax_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown tool-call syntax 'xml'; expected one of hermes, .*code_block"):
        syntax_of("xml")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'hermes'.*tool"):
        syntax_of("hermes", tool="f")


@pytest.mark.parametrize("name", SYNTAXES)
def test_each_syntax_keeps_the_protocol(name: str) -> None:
    syntax: CallSyntax = syntax_of(name)
    assert syntax.name == name
    assert syntax.parse("just text\n") == ParsedTurn("just text\n")
    assert syntax.parse("") == ParsedTurn("")
    assert syntax.write([]) == ""
    assert syntax.introduce([]) == ""
    assert bool(syntax.stop) == (name == "code_block")


@pytest.mark.parametrize("name", [name for name in SYNTAXES if name != "code_block"])
def test_the_introduction_names_each_tool_and_shows_a_call(name: str) -> None:
    told = syntax_of(name).introduce([tool("add", a={"type": "integer"}), tool("sub")])
    assert '"add"' in told
    assert '"sub"' in told
    if name != "hermes":
        assert [call.name for call in syntax_of(name).parse(told[told.index("exactly this form") + 19 :]).calls] == [
            "function_name"
        ]


def test_hermes_introduces_tools_in_the_seeds_words() -> None:
    code = {"type": "string", "description": "The code to execute.", "enum": None}
    function = {
        "name": "code_interpreter",
        "description": "A tool for executing code.",
        "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
        "strict": False,
    }
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    assert syntax_of("hermes").introduce([schema]) == (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        'function signatures within <tools></tools> XML tags:\n<tools>\n{"type": "function", "function": {"name": '
        '"code_interpreter", "description": "A tool for executing code.", "parameters": {"type": "object", '
        '"properties": {"code": {"type": "string", "description": "The code to execute.", "enum": null}}, '
        '"required": ["code"]}, "strict": false}}\n</tools>\n\nFor each function call, return a json object '
        "with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


# Reasoning ------------------------------------------------------------------------------------------------------------

THINKERS = [name for name in SYNTAXES if name != "harmony"]
CALL = [ParsedCall("code_interpreter", '{"code": "1"}')]


def thinking(syntax: TextSyntax) -> tuple[str, str]:
    assert isinstance(syntax, ProseSyntax)
    return syntax.thinking[0]


@pytest.mark.parametrize("name", THINKERS)
def test_a_call_within_reasoning_is_no_call(name: str) -> None:
    syntax = syntax_of(name)
    opening, closing = thinking(syntax)
    drafted = f"\nmaybe\n{syntax.write(CALL)}\nno\n"
    assert syntax.parse(f"{opening}{drafted}{closing}\n4") == ParsedTurn("4", drafted.strip())


@pytest.mark.parametrize("name", [name for name in THINKERS if name not in ("llama3", "mistral", "apertus")])
def test_a_call_within_reasoning_that_the_prompt_opened_is_no_call(name: str) -> None:
    syntax = syntax_of(name)
    turn = syntax.parse(f"maybe\n{syntax.write(CALL)}\nno{thinking(syntax)[1]}\n{syntax.write(CALL)}")
    assert [call.name for call in turn.calls] == ["code_interpreter"]
    assert turn.text == ""
    assert turn.reasoning is not None
    assert turn.reasoning.startswith("maybe")


@pytest.mark.parametrize("name", THINKERS)
def test_reasoning_that_does_not_end_makes_no_call_if_it_is_to_be_closed_first(name: str) -> None:
    syntax = syntax_of(name, calls_end_thinking=False)
    turn = syntax.parse(f"{thinking(syntax)[0]}so\n{syntax.write(CALL)}")
    assert (turn.text, turn.calls, turn.malformed) == ("", (), ())
    assert turn.reasoning is not None
    assert turn.reasoning.startswith("so")


@pytest.mark.parametrize("name", THINKERS)
def test_calls_may_end_reasoning_if_the_turn_ends_with_them(name: str) -> None:
    syntax = syntax_of(name)
    written, opening = syntax.write(CALL), thinking(syntax)[0]
    if name != "llama3":  # whose calls are a whole turn, or tagged
        assert syntax.parse(f"{opening}so\n{written}\n").reasoning == "so"
        assert len(syntax.parse(f"{opening}so\n{written}\n{written}").calls) == 2
    assert syntax.parse(f"{opening}so\n{written}\nor not?").calls == ()


def test_the_seeds_model_calls_without_closing_its_reasoning() -> None:
    said = (
        "<think>\nOkay, let's see. Let me compute it using the code interpreter to ensure accuracy.\n\n\n"
        '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "t = 200000\\nprint(t * 1.1)", '
        '"executes": "True"}}\n</tool_call>\n'
    )
    turn = syntax_of("hermes").parse(said)
    assert called(turn) == [("code_interpreter", {"code": "t = 200000\nprint(t * 1.1)", "executes": "True"})]
    assert turn.reasoning is not None
    assert turn.reasoning.endswith("accuracy.")


def test_empty_reasoning_is_not_the_same_as_none() -> None:
    assert syntax_of("hermes").parse("<think>\n\n</think>\n\n4") == ParsedTurn("4", "")
    assert syntax_of("hermes").parse("4") == ParsedTurn("4", None)
