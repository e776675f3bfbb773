"""Calls in Python syntax: LFM2's `<|tool_call_start|>[name(key=value), …]<|tool_call_end|>`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from toolyard.chat.protocol import ParsedCall, Tools
from toolyard.chat.syntax.base import Found, ProseSyntax, Region, cut, make_call
from toolyard.chat.syntax.scanning import BrokenError, Finder, near, quote, skip_space
from toolyard.messages import decode_arguments

_OPENING, _CLOSING = "<|tool_call_start|>", "<|tool_call_end|>"
_TAG = re.compile(re.escape(_OPENING))
_ENDS = re.compile(rf"({re.escape(_CLOSING)})|{re.escape(_OPENING)}")
_HEAD = re.compile(r"\s*+([^\s()\[\]{}<>,=]++)\s*+\(\s*+")
_KEY = re.compile(r"([^\s()\[\]{}<>,=]++)\s*+=\s*+")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\"""", re.DOTALL)
_PART = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|[\[({]|[\])}]|[^'"\[\](){},]++|,""", re.DOTALL)
_NAMES = re.compile(r"\b(true|false|null)\b")
_PYTHON = {"true": "True", "false": "False", "null": "None"}
_LINES = re.compile(r"[\n\r]")


class Lfm2(ProseSyntax):
    """A list of calls with keyword arguments (LFM2). Strings have quotes of either kind and may contain line breaks.

    If a template does not escape strings, those with quotes or backslashes are ambiguous.
    """

    name = "lfm2"
    sign = _OPENING
    rewrites_arguments = True

    def regions(self, text: str, start: int, tools: Tools) -> list[Region]:
        finder, found, at = Finder(text), list[Region](), start
        while (tag := finder.find(_TAG, at)) is not None:
            region = _calls(finder, tag)
            found.append(region)
            at = region.end
        return found

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return f"{_OPENING}[{', '.join(map(_spelled, calls))}]{_CLOSING}"


def _calls(finder: Finder, tag: re.Match[str]) -> Region:
    text, found = finder.text, list[Found]()
    at = skip_space(text, tag.end())
    bracket = text.startswith("[", at)
    at += bracket
    try:
        while True:
            call, at = _call(text, at)
            found.append(call)
            at = skip_space(text, at)
            if not text.startswith(",", at):
                break
            at += 1
        if bracket and not text.startswith("]", at):
            raise BrokenError(f"the list of calls is not closed with ]{near(text, at)}", at)
        at = skip_space(text, at + bracket)
        if not text.startswith(_CLOSING, at):
            raise BrokenError(f"the calls are not closed: write {_CLOSING} after them", at)
    except BrokenError as error:
        broken = cut(finder, tag.start(), tag.end(), error, _ENDS)
        return broken._replace(found=(*found, *broken.found))
    return Region(tag.start(), at + len(_CLOSING), tuple(found))


def _call(text: str, at: int) -> tuple[ParsedCall, int]:
    head = _HEAD.match(text, at)
    if head is None:
        raise BrokenError(f"expected name(key=value){near(text, at)}", at)
    at, members = head.end(), list[str]()
    while not text.startswith(")", at):
        key = _KEY.match(text, at)
        if key is None:
            raise BrokenError(f"expected key=value{near(text, at)}", at)
        end = _value_end(text, key.end())
        members.append(f"{quote(key[1])}: {_json(text[key.end() : end], at)}")
        at = skip_space(text, end)
        if text.startswith(",", at):
            at = skip_space(text, at + 1)
        elif not text.startswith(")", at):
            raise BrokenError(f"expected a comma or ){near(text, at)}", at)
    return make_call(head[1], f"{{{', '.join(members)}}}", at + 1), at + 1


def _value_end(text: str, at: int) -> int:
    depth = 0
    while (part := _PART.match(text, at)) is not None:
        if not depth and part[0] in (",", ")"):
            return at
        depth += (part[0] in ("[", "(", "{")) - (part[0] in ("]", ")", "}"))
        at = part.end()
    raise BrokenError("a value is not complete: the text ends within it, or a quote in a text lacks its backslash", at)


def _json(written: str, at: int) -> str:
    """Convert a Python value to JSON; accept JSON too."""
    bare = written.strip()
    if _STRING.fullmatch(bare):
        bare = _LINES.sub(lambda line: "\\n" if line[0] == "\n" else "\\r", bare)
    else:
        bare = "".join(
            part[0] if part[0][0] in "'\"" else _NAMES.sub(lambda name: _PYTHON[name[0]], part[0])
            for part in _PART.finditer(bare)
        )
    try:
        value: Any = ast.literal_eval(bare)
        return json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BrokenError(f"{bare[:60]!r} is no value: write texts in quotes", at) from None


def _spelled(call: ParsedCall) -> str:
    values = decode_arguments(call.arguments)[0]
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
