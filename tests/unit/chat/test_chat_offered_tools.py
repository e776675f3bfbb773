"""Which tools a format cannot offer to the model."""

from __future__ import annotations

import pytest
from test_call_syntaxes import tool

from chat_models import CODE_TOOL, TEMPLATES, tokenizer
from toolyard.chat.formats import open_format
from toolyard.chat.protocol import ChatFormat
from toolyard.chat.syntax import SYNTAXES
from toolyard.messages import Message, OpenAIFunctionToolSchema

ADD = tool("add", a={"type": "integer"})
HELLO = Message("user", "Hello")


def opened(syntax: str, family: str = "qwen", **options: str) -> ChatFormat:
    return open_format(tokenizer(family), format=syntax, syntax_options=options)


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("syntax", [name for name in SYNTAXES if name != "code_block"])
def test_every_tool_is_shown_whatever_the_template_knows_of_tools(family: str, syntax: str) -> None:
    chat = opened(syntax, family)
    tools = [ADD, CODE_TOOL, tool("sub")]
    assert chat.unoffered(tools) == {}
    shown = chat.decode(chat.render([HELLO], tools))
    assert all(f'"{one.function.name}"' in shown for one in tools)


def test_without_tools_nothing_is_missing() -> None:
    assert opened("hermes").unoffered([]) == {}
    assert opened("code_block").unoffered([]) == {}


def test_code_block_offers_the_code_tool_and_no_other() -> None:
    assert opened("code_block").unoffered([CODE_TOOL]) == {}
    assert opened("code_block").unoffered([CODE_TOOL, ADD]) == {
        "add": "code_block can call only 'code_interpreter': leave this tool out, or use another format, such as hermes"
    }
    assert opened("code_block", tool="add", argument="a").unoffered([CODE_TOOL, ADD]).keys() == {"code_interpreter"}


def test_code_block_misses_the_code_tool_if_it_is_not_there() -> None:
    found = opened("code_block").unoffered([ADD])
    assert found.keys() == {"add", "code_interpreter"}
    assert found["code_interpreter"].startswith("code_block calls it, but it is not among the tools (add): name")


def requiring(*names: str) -> OpenAIFunctionToolSchema:
    made = tool("code_interpreter", code={"type": "string"}, language={"type": "string"})
    made.function.parameters.required = list(names)
    return made


def test_code_block_needs_a_tool_that_takes_the_code_alone() -> None:
    renamed = opened("code_block", argument="program")
    assert renamed.unoffered([CODE_TOOL]) == {
        "code_interpreter": "code_block gives it the code as 'program', but it takes code: name the right one with "
        "syntax_options: {argument: NAME}"
    }
    assert renamed.unoffered([tool("code_interpreter")]) == {}
    assert opened("code_block").unoffered([requiring("code")]) == {}
    assert opened("code_block").unoffered([requiring("code", "language")]) == {
        "code_interpreter": "code_block gives it 'code' alone, but it requires language"
    }


@pytest.mark.parametrize(("family", "offers"), [("qwen3", True), ("llama-3", True), ("deepseek-v3", False)])
def test_a_renderer_that_does_not_show_tools_says_so(family: str, offers: bool) -> None:
    pytest.importorskip("renderers", reason="needs 'renderers', of the extra 'chat'")
    chat = open_format(tokenizer("qwen"), format=f"renderers:{family}")
    found = chat.unoffered([ADD, CODE_TOOL])
    assert found.keys() == (set() if offers else {"add", "code_interpreter"})
    assert ("code_interpreter" in chat.decode(chat.render([HELLO], [CODE_TOOL]))) == offers
    assert all(f"renderers:{family} does not show tools" in why for why in found.values())
