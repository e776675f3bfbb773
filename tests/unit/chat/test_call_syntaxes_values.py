"""Values that are plain text: the schema says what they are, and what cannot be expressed is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolyard.chat.protocol import ParsedCall
from toolyard.chat.syntax import syntax_of
from toolyard.chat.syntax.base import TextSyntax
from toolyard.errors import ChatError
from toolyard.messages import OpenAIFunctionToolSchema


def tool(name: str = "f", **properties: Any) -> OpenAIFunctionToolSchema:
    parameters = {"type": "object", "properties": properties}
    return OpenAIFunctionToolSchema.model_validate({"function": {"name": name, "parameters": parameters}})


XML = ("qwen3_coder", "glm45", "minimax_m2")


def value(syntax: TextSyntax, text: str, schema: dict[str, Any] | None = None, **more: Any) -> Any:
    written = syntax.write([ParsedCall("f", json.dumps({"a": text}))])
    tools = [tool("g", a={"type": "integer"}), tool("f", a=schema)] if schema is not None else []
    if more:
        tools[1] = OpenAIFunctionToolSchema.model_validate(
            {"function": {"name": "f", "parameters": {"properties": {"a": schema}, **more}}}
        )
    return json.loads(syntax.parse(written, tools).calls[0].arguments)["a"]


@pytest.mark.parametrize("name", XML)
def test_without_a_schema_what_is_json_is_json_and_the_rest_is_text(name: str) -> None:
    syntax = syntax_of(name)
    texts = {"5": 5, " 1.5e3 ": 1500, "true": True, "null": None, "[1, 2]": [1, 2], '{"a": {}}': {"a": {}}}
    for text, meant in texts.items():
        assert value(syntax, text) == meant
    for text in ("", " ", "five", "True", "None", '"quoted"', "NaN", "[1,", "1 2", "1" * 5000, "[" * 100_000):
        assert value(syntax, text) == text


@pytest.mark.parametrize("name", XML)
def test_a_string_of_the_schema_stays_as_it_was_written(name: str) -> None:
    syntax = syntax_of(name)
    for text in ("5", "true", "null", "[1]", '{"a": 1}', " indented\n\n", "\n", "", '"quoted"', "a\\nb"):
        assert value(syntax, text, {"type": "string"}) == text


@pytest.mark.parametrize("name", XML)
def test_the_schemas_type_decides(name: str) -> None:
    syntax = syntax_of(name)
    assert value(syntax, "5", {"type": "integer"}) == 5
    assert value(syntax, "five", {"type": "integer"}) == "five"
    assert value(syntax, "True", {"type": "boolean"}) is True
    assert value(syntax, "True", {"type": ["string", "boolean"]}) is True
    assert value(syntax, "5", {"type": ["string", "null"]}) == "5"
    assert value(syntax, "None", {"anyOf": [{"type": "string"}, {"type": "null"}]}) is None
    assert value(syntax, "5", {"oneOf": [{"type": "string"}, {"type": "number"}]}) == 5
    assert value(syntax, "5", {"enum": ["5", "6"]}) == "5"
    assert value(syntax, "5", {"enum": [5, 6]}) == 5
    assert value(syntax, "5", {}) == 5
    assert value(syntax, "5", {"$ref": "#/$defs/Word"}, **{"$defs": {"Word": {"type": "string"}}}) == "5"
    assert value(syntax, "5", {"$ref": "#/$defs/Loop"}, **{"$defs": {"Loop": {"$ref": "#/$defs/Loop"}}}) == 5
    assert value(syntax, "5", {"$ref": "https://example.org/word.json"}) == 5


@pytest.mark.parametrize("name", XML)
def test_a_closing_tag_within_a_value_is_part_of_it(name: str) -> None:
    text = "a</parameter>b</arg_value> </function></tool_call></invoke> c </parameter>"
    assert value(syntax_of(name), text) == text


def test_what_a_syntax_cannot_express_is_refused() -> None:
    cannot = {
        "qwen3_coder": [ParsedCall("f>", "{}"), ParsedCall("f", '{"a": "</parameter></function>"}')],
        "glm45": [ParsedCall("f\ng", "{}"), ParsedCall("f", '{"a": "</arg_value></tool_call>"}')],
        "minimax_m2": [ParsedCall('f"', "{}"), ParsedCall("f", '{"a\\"": 1}')],
        "deepseek_v3": [ParsedCall("f\ng", "{}")],
        "kimi_k2": [ParsedCall("f<", "{}"), ParsedCall("f", "[1]")],
        "harmony": [ParsedCall("f g", "{}")],
        "hermes": [ParsedCall("f", "not JSON"), ParsedCall("", "{}")],
        "code_block": [
            ParsedCall("f", '{"code": "1"}'),
            ParsedCall("code_interpreter", '{"code": " "}'),
            ParsedCall("code_interpreter", '{"code": "1", "timeout": 3}'),
        ],
    }
    for name, calls in cannot.items():
        for call in calls:
            with pytest.raises(ChatError, match=r"cannot (express|be written)"):
                syntax_of(name).write([call])
