"""Find out what a chat template supports, by rendering probes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolyard.chat.protocol import ParsedCall
from toolyard.chat.syntax import SYNTAXES, syntax_of
from toolyard.chat.syntax.base import TextSyntax
from toolyard.chat.template.jinja2 import ChatTemplate
from toolyard.errors import ChatError, ConfigError
from toolyard.messages import JSON, OpenAIFunctionToolSchema, decode_arguments

SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Mistral's templates refuse other ids of calls."""

PROBE_ID = "abcDEF123"
_WORD = "Xylograph"
_USER: JSON = {"role": "user", "content": "Quokka"}
_BEFORE: tuple[list[JSON], ...] = ([], [{"role": "system", "content": "Potoroo"}])
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
    """Shows tools to the model."""
    calls: bool
    """Writes the calls of assistant messages."""
    text_arguments: bool
    """Expects the arguments of calls as text, where most expect objects."""
    tool_role: bool
    """Shows tool results."""
    tool_needs_calls: bool
    """Shows them only after a message with calls."""
    short_ids: bool
    """Ids of calls must match `SHORT_ID`."""
    system: bool
    """Accepts a system message."""
    developer: bool
    """Accepts a developer message, even after a system message."""
    alternates: bool
    """Refuses two user messages in a row."""
    reasoning: str | None
    """The message key for an assistant's reasoning; None if it shows none."""


def probe(template: ChatTemplate, *, name: str) -> Traits:
    """Raise ConfigError if the template does not even accept a single user message."""
    try:
        plain = template.render([_USER], prompt=True)
    except ChatError as error:
        raise ConfigError(f"{error}; give another with chat_template") from None
    if str(_USER["content"]) not in plain:
        raise ConfigError(f"the chat template of {name} omits the user's message; give another with chat_template")
    tool_role, tool_needs_calls, short_ids = _tool_role(template)
    calls, text_arguments = _calls(template)
    return Traits(
        tools=_renders(template, [_USER], tools=[_TOOL]),
        calls=calls,
        text_arguments=text_arguments,
        tool_role=tool_role,
        tool_needs_calls=tool_needs_calls,
        short_ids=short_ids,
        system=_renders(template, [{"role": "system", "content": _WORD}, _USER]),
        developer=all(
            _renders(template, [*before, {"role": "developer", "content": _WORD}, _USER]) for before in _BEFORE
        ),
        alternates=not _renders(template, [_USER, {"role": "user", "content": _WORD}]),
        reasoning=_reasoning(template, text_arguments),
    )


def syntax_of_calls(template: ChatTemplate, traits: Traits) -> str | None:
    """Return the syntax that parses the calls which the template writes, by trying them. If it writes none, the syntax
    whose sign occurs in its instructions; None if there is none."""
    if not traits.calls:
        source = template.source
        return next((name for name, signs in _SIGNS.items() if all(sign in source for sign in signs)), None)
    meant = {"depth": "1 < 2"}
    written = _written_call(template, traits, meant)
    tool = OpenAIFunctionToolSchema.model_validate(_TOOL)
    readers: list[TextSyntax] = []
    for name in SYNTAXES:
        syntax = syntax_of(name)
        first = next((found for region in syntax.regions(written, 0, [tool]) for found in region.found), None)
        if isinstance(first, ParsedCall) and (first.name, decode_arguments(first.arguments)[0]) == (_WORD, meant):
            readers.append(syntax)
    # Several syntaxes match if they only differ in what surrounds a call.
    packed = "".join(written.split())
    readers.sort(key=lambda syntax: _head(syntax) not in packed)
    return readers[0].name if readers else None


_SIGNS = {
    "harmony": ("<|channel|>", "<|message|>"),
    "minimax_m2": ("<minimax:tool_call>",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>",),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "glm45": ("<arg_key>",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "granite3": ("<|tool_call|>",),
    "lfm2": ("List of tools: ", "<|im_start|>"),
    "llama3": ("<|start_header_id|>", "tool_calls"),
}
"""Strings that reveal the call syntax of a template that writes no calls; the first entry with all of them wins."""


def _head(syntax: TextSyntax) -> str:
    """Return a call up to its name, without white space."""
    before, name, _ = syntax.spell([ParsedCall(_WORD, '{"depth": "1"}')]).partition(_WORD)
    return "".join((before + name).split())


def _written_call(template: ChatTemplate, traits: Traits, arguments: JSON) -> str:
    """Return what the template writes for a turn with only a call, and whatever follows."""
    number = PROBE_ID if traits.short_ids else "call_0"
    message = called(number, name=_WORD, arguments=arguments, as_text=traits.text_arguments)
    for tools in ([_TOOL], None):
        for more in ([], [result(number, "Quoll", _WORD)]):
            try:
                prompt = template.render([_USER], tools=tools, prompt=True)
                begun = template.render([_USER], tools=tools, prompt=False)
                text = template.render([_USER, message, *more], tools=tools, prompt=bool(more))
            except ChatError:
                continue
            # A turn may start differently than the prompt does, for example without reasoning.
            turn = text[len(prompt if text.startswith(prompt) else shared(begun, text)) :]
            if _WORD in turn:
                return turn
    return ""


def _reasoning(template: ChatTemplate, text_arguments: bool) -> str | None:
    """Templates may show reasoning only before calls, or only in the last turn."""
    for key in ("reasoning_content", "thinking", "reasoning"):
        for message in ({"role": "assistant", "content": "Wombat"}, called("call_0", as_text=text_arguments)):
            if _renders(template, [_USER, {**message, key: _WORD}], prompt=False):
                return key
    return None


def called(
    *ids: str,
    name: str = "probe",
    names: Sequence[str] = (),
    arguments: JSON | None = None,
    as_text: bool = False,
) -> JSON:
    """Return an assistant message with a call for each id, to `names` or all to `name`."""
    given: Any = {"depth": "1"} if arguments is None else arguments
    given = json.dumps(given) if as_text else given
    calls = [
        {"id": one, "type": "function", "function": {"name": tool, "arguments": given}}
        for one, tool in zip(ids, names or [name] * len(ids), strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def shared(one: str, other: str) -> str:
    """Return the common prefix."""
    length = min(len(one), len(other))
    return one[: next((at for at in range(length) if one[at] != other[at]), length)]


def result(number: str, content: str, name: str = "probe") -> JSON:
    return {"role": "tool", "content": content, "tool_call_id": number, "name": name}


def _calls(template: ChatTemplate) -> tuple[bool, bool]:
    for as_text in (False, True):
        for number in ("call_0", PROBE_ID):
            message = called(number, name=_WORD, as_text=as_text)
            if _renders(template, [_USER, message, result(number, "Quoll")]) or _renders(
                template, [_USER, message], prompt=False
            ):
                return True, as_text
    return False, False


def _tool_role(template: ChatTemplate) -> tuple[bool, bool, bool]:
    for number in ("call_0", PROBE_ID):
        plain: JSON = {"role": "assistant", "content": "Wombat"}
        for message in (plain, called(number), called(number, as_text=True)):
            if _renders(template, [_USER, message, result(number, _WORD)]):
                return True, message is not plain, number == PROBE_ID
    return False, False, False


def _renders(
    template: ChatTemplate, messages: Sequence[JSON], *, tools: Sequence[JSON] | None = None, prompt: bool = True
) -> bool:
    """Whether it renders the messages and `_WORD` is in the result."""
    try:
        return _WORD in template.render(messages, tools=tools, prompt=prompt)
    except ChatError:
        return False
