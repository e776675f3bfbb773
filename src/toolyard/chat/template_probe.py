"""What a chat template can say, found out by asking it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolyard.chat.jinja2 import ChatTemplate
from toolyard.errors import ChatError, ConfigError
from toolyard.messages import JSON

SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Mistral's templates refuse ids of calls that are not like this."""

PROBE_ID = "abcDEF123"
_WORD = "Xylograph"
_USER: JSON = {"role": "user", "content": "Quokka"}
_TOOL: JSON = {
    "type": "function",
    "function": {
        "name": _WORD,
        "description": "Cuts wood.",
        "parameters": {"type": "object", "properties": {"depth": {"type": "string", "description": "How deep."}}},
    },
}


@dataclass(frozen=True, slots=True)
class Traits:
    """How a template differs from one that takes every conversation."""

    tools: bool
    """It tells the model about tools."""
    calls: bool
    """It writes the calls of an assistant's message."""
    text_arguments: bool
    """It wants the arguments of calls as text, where most want objects."""
    tool_role: bool
    """It shows the results of tools."""
    tool_needs_calls: bool
    """It shows them only after a message with calls."""
    short_ids: bool
    """Ids of calls have to be like `SHORT_ID`."""
    system: bool
    """It takes a system message."""
    alternates: bool
    """It refuses two messages of the user in a row."""


def probe(template: ChatTemplate, *, name: str) -> Traits:
    """Raises ConfigError if the template does not even take one message of a user."""
    try:
        plain = template.render([_USER], prompt=True)
    except ChatError as error:
        raise ConfigError(f"{error}; give another with chat_template") from None
    if str(_USER["content"]) not in plain:
        raise ConfigError(f"the chat template of {name} leaves out what the user says; give another with chat_template")
    system = {"role": "system", "content": _WORD}
    tool_role, tool_needs_calls, short_ids = _tool_role(template)
    calls, text_arguments = _calls(template)
    return Traits(
        tools=_says(template, [_USER], tools=[_TOOL]),
        calls=calls,
        text_arguments=text_arguments,
        tool_role=tool_role,
        tool_needs_calls=tool_needs_calls,
        short_ids=short_ids,
        system=_says(template, [system, _USER]),
        alternates=not _says(template, [_USER, {"role": "user", "content": _WORD}]),
    )


def called(*ids: str, name: str = "probe", content: str = "", as_text: bool = False) -> JSON:
    """An assistant's message with a call for each id."""
    arguments: Any = '{"depth": "1"}' if as_text else {"depth": "1"}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}} for one in ids
        ],
    }


def result(number: str, content: str, name: str = "probe") -> JSON:
    return {"role": "tool", "content": content, "tool_call_id": number, "name": name}


def _calls(template: ChatTemplate) -> tuple[bool, bool]:
    for as_text in (False, True):
        for number in ("call_0", PROBE_ID):
            said = called(number, name=_WORD, as_text=as_text)
            if _says(template, [_USER, said, result(number, "Quoll")]) or _says(template, [_USER, said], prompt=False):
                return True, as_text
    return False, False


def _tool_role(template: ChatTemplate) -> tuple[bool, bool, bool]:
    for number in ("call_0", PROBE_ID):
        plain: JSON = {"role": "assistant", "content": "Wombat"}
        for said in (plain, called(number), called(number, as_text=True)):
            if _says(template, [_USER, said, result(number, _WORD)]):
                return True, said is not plain, number == PROBE_ID
    return False, False, False


def _says(
    template: ChatTemplate, messages: Sequence[JSON], *, tools: Sequence[JSON] | None = None, prompt: bool = True
) -> bool:
    """Whether it renders that, and `_WORD` comes out."""
    try:
        return _WORD in template.render(messages, tools=tools, prompt=prompt)
    except ChatError:
        return False
