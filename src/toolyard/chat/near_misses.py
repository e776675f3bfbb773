"""Recognize calls that are not written in the model's format.

Small models know several ways to call a tool: JSON in a code fence, or another model's tags. To the format such a turn
is prose: no call, and no malformed call. It is recognized here, so that the model can be told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from toolyard.chat.protocol import MalformedCall, ParsedCall, ParsedTurn, Tools
from toolyard.chat.syntax import CALL_NAME, SIGNED_SYNTAXES
from toolyard.chat.syntax.scanning import BrokenError, decode_value, quote, scan_object
from toolyard.errors import ChatError
from toolyard.messages import JSON, decode_arguments

_SIGNS = tuple(dict.fromkeys(['"name"', *(syntax.sign for syntax in SIGNED_SYNTAXES)]))
_OBJECT = re.compile(r'\{\s*+"')
_FENCE = re.compile(r"```\w*+\s(.*?)(?:```|\Z)", re.DOTALL)
_WRAPPERS = ("function", "function_call", "tool_call", "tool_calls")
_DEPTH = 4
"""How many wrappers and lists are unwrapped: OpenAI's tool_calls, a list of functions, take three."""
_FAR = 30_000
"""How many characters at the end of a turn are searched: a model stops after its call. A long, repetitive turn would
take seconds."""
_MOST = 8
"""Maximum number of near misses reported per turn."""
_LONG_TEXT = 400
_LONG_VALUE = 60

_Call = tuple[str, JSON]
"""A name and arguments."""


def with_near_misses(turn: ParsedTurn, tools: Tools, write: Callable[[ParsedCall], str]) -> ParsedTurn:
    """Add near misses to `turn` if it has neither calls nor malformed calls. Never raises; takes time linear in the
    text, and almost none if the text has no sign of a call.

    A near miss is a call of one of `tools`, as a JSON object with a name and arguments or in any of the `SYNTAXES` that
    has a sign; or such an object with any name, if it is the whole text or a whole fence.

    `write`: writes a call in the model's format; may raise ChatError.
    """
    if not tools or turn.calls or turn.malformed or not any(sign in turn.text for sign in _SIGNS):
        return turn
    text = turn.text[-_FAR:]
    offered = {tool.function.name for tool in tools}
    found = list(islice(_tagged(text, tools, offered), _MOST))
    if not found:
        found = islice(chain(_named(text, offered), _alone(text, offered)), _MOST)
    misses = tuple(MalformedCall(part[:_LONG_TEXT], _why(name, given, write)) for part, (name, given) in found)
    return replace(turn, near_misses=misses) if misses else turn


def _tagged(text: str, tools: Tools, offered: set[str]) -> Iterator[tuple[str, _Call]]:
    """Find calls in any syntax, with their text."""
    last = 0
    for syntax in SIGNED_SYNTAXES:
        if syntax.sign not in text:
            continue
        for region in syntax.regions(text, 0, tools):
            if region.end <= last:
                continue  # syntaxes with the same tags find the same calls
            for call in region.found:
                if isinstance(call, ParsedCall) and call.name in offered:
                    last = region.end
                    yield text[region.start : region.end], (call.name, decode_arguments(call.arguments)[0])


def _named(text: str, offered: set[str]) -> Iterator[tuple[str, _Call]]:
    """Find JSON objects anywhere that call an offered tool."""
    at = 0
    while (begin := _OBJECT.search(text, at)) is not None:
        try:
            at = scan_object(text, begin.start()).end
        except BrokenError as error:
            at = max(error.resume, begin.end())
            continue
        written = text[begin.start() : at]
        for name, given in _calls_of(written):
            if name in offered:
                yield written, (name, given)


def _alone(text: str, offered: set[str]) -> Iterator[tuple[str, _Call]]:
    """Find JSON that is the whole text, or a whole fence, and calls a tool that is not offered."""
    for part in chain([text], (fence[1] for fence in _FENCE.finditer(text))):
        for name, given in _calls_of(part.strip()):
            if name not in offered and CALL_NAME.fullmatch(name):
                yield part.strip(), (name, given)


def _calls_of(written: str) -> Iterator[_Call]:
    value = decode_value(written)[0] if written.startswith(("{", "[")) else None
    return _calls_in(value, _DEPTH)


def _calls_in(value: Any, depth: int) -> Iterator[_Call]:
    if isinstance(value, list) and depth:
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _calls_in(item, depth - 1)
    elif isinstance(value, dict):
        known: JSON = value  # pyright: ignore[reportUnknownVariableType]
        arguments = _arguments_of(known)
        if isinstance(known.get("name"), str) and arguments is not None:
            yield known["name"], arguments
        else:
            for key in _WRAPPERS if depth else ():
                yield from _calls_in(known.get(key), depth - 1)


def _arguments_of(value: JSON) -> JSON | None:
    given = value.get("arguments", value.get("parameters"))
    if isinstance(given, str):
        given, problem = decode_arguments(given)
        given = None if problem else given
    # A description of a tool, not a call: its parameters are a JSON Schema.
    described = isinstance(given, dict) and "type" in given and "properties" in given
    return given if isinstance(given, dict) and not described else None  # pyright: ignore[reportUnknownVariableType]


def _why(name: str, given: JSON, write: Callable[[ParsedCall], str]) -> str:
    """Explain it to the model, with its own call as it should have been written."""
    seems = f"this looks like a call of {quote(name)}, but"
    try:
        short = {key: value if len(json.dumps(value)) <= _LONG_VALUE else "…" for key, value in given.items()}
        example = write(ParsedCall(name, json.dumps(short, ensure_ascii=False)))
    except (ChatError, RecursionError):
        return f"{seems} calls are not written like this"
    # Without a tag, JSON is a call only if it is the whole message.
    place = ", as the whole message" if example.startswith("{") else ""
    return f"{seems} calls are written like this{place}:\n{example}".encode(errors="replace").decode()
