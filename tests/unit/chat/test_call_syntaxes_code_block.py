"""A closed block of python is a call of the code tool, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolyard.chat.protocol import ParsedTurn
from toolyard.chat.syntax import syntax_of
from toolyard.messages import OpenAIFunctionToolSchema


def tool(name: str = "f", **properties: Any) -> OpenAIFunctionToolSchema:
    parameters = {"type": "object", "properties": properties}
    return OpenAIFunctionToolSchema.model_validate({"function": {"name": name, "parameters": parameters}})


def called(turn: ParsedTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


def codes(text: str, **options: Any) -> list[str]:
    return [json.loads(call.arguments)["code"] for call in syntax_of("code_block", **options).parse(text).calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```py\nprint(1)\n```", ["print(1)"]),
        ("```Python3\nprint(1)\n```  \nso", ["print(1)"]),
        ("```python title=x\r\nprint(1)\r\n```\r\n", ["print(1)\r"]),
        ("So: ```python\nprint(1)\n```\n", ["print(1)"]),
        ("1. Do:\n   ```python\n   if 1:\n       print(1)\n   ```\n", ["if 1:\n    print(1)"]),
        ("````python\nprint(1)\n```\nprint(2)\n````\n", ["print(1)\n```\nprint(2)"]),
        ("```python\nprint('```')\n```\n", ["print('```')"]),
        ("```python\nx = 1  # ```\nprint(x)\n```\n", ["x = 1  # ```\nprint(x)"]),
        ('```python\nx = """\n```\n"""\nprint(x)\n```\n', ['x = """\n```\n"""\nprint(x)']),
        ('```python\nprint("""a\n```\n', ['print("""a']),
        ("```python\na = 1\n```\nand\n```python\nprint(2)\n```\n", ["a = 1", "print(2)"]),
        ("<code>\nprint(1)\n</code>", ["print(1)"]),
        ("<code>print(1)</code>", ["print(1)"]),
        ("<code>\n```py\nprint(1)\n```\n", ["print(1)"]),
        ("```\nstray\n```python\nprint(1)\n```\n", ["print(1)"]),
        ("```markdown\n```python\nprint(1)\n```\n", []),
        ("```\nprint(1)\n```\n", []),
        ("```json\n{}\n```\n```text\na\n```\n```output\n1\n```\n", []),
        ("```text\n<code>\n```\n", []),
        ("Use the <code>print</code> function, or `print`.", []),
        ("Write ```python and then code", []),
        ("```pythonic\nprint(1)\n```\n", []),
    ],
)
def test_blocks_of_python_are_calls_and_nothing_else_is(text: str, expected: list[str]) -> None:
    turn = syntax_of("code_block").parse(text)
    assert [json.loads(call.arguments)["code"] for call in turn.calls] == expected
    assert turn.malformed == ()
    if not expected:
        assert turn.text == text


def test_the_code_tool_and_its_argument_can_be_named() -> None:
    syntax = syntax_of("code_block", tool="python", argument="source")
    assert called(syntax.parse("```python\n1\n```\n")) == [("python", {"source": "1"})]
    assert syntax.introduce([tool("code_interpreter")]) == ""
    assert "```python\n" in syntax.introduce([tool("python")])


def test_a_turn_stops_where_a_block_closes_and_not_where_it_opens() -> None:
    written = "Let me see.\n```python\nprint(1)\nprint('```')\n```\n and more"
    stop = syntax_of("code_block").stop
    ends = [written.find(text) + len(text) for text in stop if text in written]
    assert written[: min(ends)].endswith("print('```')\n```\n")
    assert codes(written[: min(ends)]) == ["print(1)\nprint('```')"]
    assert not any(text in "Let me see.\n```python\nprint(" for text in stop)
