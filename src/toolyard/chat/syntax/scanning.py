"""Parse JSON and tags in text that a model wrote, in one pass and without trusting any of it.

The standard decoder parses what is well-formed. Everything else is left to our own scanner, which does not recurse and
explains what is wrong. Each error of the decoder counts the lines of the whole text, so a long text full of broken
calls would take quadratic time: there the decoder is not used.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_TOKEN = re.compile(
    r"[ \t\n\r]*+(?:"
    r'("[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*")'
    r"|(-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?|true|false|null)"
    r"|([][{}:,]))"
)
_STRING, _SCALAR = 1, 2
_INSIDE = re.compile(r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*')
"""A string up to its first error."""
_SPACE = re.compile(r"[ \t\n\r]*+")
_PLAIN_KEY = re.compile(r'[ \t\n\r]*+"([^"\\\x00-\x1f]*+)"[ \t\n\r]*+:[ \t\n\r]*+')
"""A key without escapes, up to its value."""
_AFTER_VALUE = re.compile(r"[ \t\n\r]*+([,}])")
_SHORT = 50_000
"""Longer texts are not given to the standard decoder. A turn that long takes far longer to sample and decode."""
_WORD = re.compile(r"[A-Za-z]{1,20}")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NEAR = 20

_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _COLON, _NEXT = range(6)
_EXPECTED = {
    _VALUE: "a value",
    _FIRST_VALUE: "a value or ]",
    _KEY: "a key in double quotes",
    _FIRST_KEY: "a key in double quotes or }",
    _COLON: "a colon",
}


class BrokenError(ValueError):
    """A model's text cannot be parsed. Internal to `toolyard.chat`: syntaxes turn it into a malformed call."""

    def __init__(self, why: str, resume: int) -> None:
        super().__init__(why)
        self.resume = resume
        """Where to look for the end of the broken call: tags before it are in strings. It is the start of the last
        token, since a string without its closing quote extends to the next quote, across any tags."""


class JsonObject(NamedTuple):
    """The positions of an object and its members in a text."""

    start: int
    end: int
    members: dict[str, tuple[int, int]]
    """Positions of the values by key; for a repeated key the last, as in decoders."""
    decoded: dict[str, Any]
    """The values, if the standard decoder parsed them; else empty."""


def scan_object(text: str, start: int) -> JsonObject:
    """Scan the object that starts at `start`, after white space. Takes time linear in its length, at any nesting.

    Raises:
        BrokenError: there is none, or it is not JSON; the message is for the model.
    """
    start = skip_space(text, start)
    if not text.startswith("{", start):
        raise BrokenError(f"expected a JSON object{near(text, start)}", start)
    return (_decode_object(text, start) if len(text) <= _SHORT else None) or _scan_object(text, start)


def _decode_object(text: str, start: int) -> JsonObject | None:
    """Like `_scan_object`, but several times as fast; None if the decoder rejects it, or it is empty."""
    members: dict[str, tuple[int, int]] = {}
    decoded: dict[str, Any] = {}
    at = start + 1
    while (key := _PLAIN_KEY.match(text, at)) is not None:
        begin = key.end()
        try:
            decoded[key[1]], end = _STRICT.raw_decode(text, begin)
        except (ValueError, RecursionError):  # not JSON, NaN, thousands of digits, or nested too deeply
            return None
        members[key[1]] = begin, end
        after = _AFTER_VALUE.match(text, end)
        if after is None:
            return None
        at = after.end()
        if after[1] == "}":
            return JsonObject(start, at, members, decoded)
    return None


def _scan_object(text: str, start: int) -> JsonObject:
    closers, state = ["}"], _FIRST_KEY
    members: dict[str, tuple[int, int]] = {}
    key, value = "", start
    last, at = start, start + 1
    while True:
        token = _TOKEN.match(text, at)
        if token is None:
            raise _fault(text, at, last, state, closers)
        kind = token.lastindex or 0
        begin = token.start(kind)
        mark = text[begin] if kind > _SCALAR else ""
        opening = mark in ("{", "[")
        if state in (_VALUE, _FIRST_VALUE) and (opening or kind <= _SCALAR):
            if len(closers) == 1:
                value = begin
            if opening:
                closers.append("}" if mark == "{" else "]")
            state = _NEXT if not opening else _FIRST_KEY if mark == "{" else _FIRST_VALUE
        elif state in (_NEXT, _FIRST_KEY, _FIRST_VALUE) and mark == closers[-1]:
            closers.pop()
            state = _NEXT
        elif state == _NEXT and mark == ",":
            state = _KEY if closers[-1] == "}" else _VALUE
        elif state == _COLON and mark == ":":
            state = _VALUE
        elif state in (_KEY, _FIRST_KEY) and kind == _STRING:
            if len(closers) == 1:
                key = json.loads(token[kind])
            state = _COLON
        else:
            raise _fault(text, at, last, state, closers)
        last, at = begin, token.end()
        if not closers:
            return JsonObject(start, at, members, {})
        if state == _NEXT and len(closers) == 1 and mark != ",":
            members[key] = (value, at)


def skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def quote(text: str) -> str:
    """Return `text` as a JSON string in ASCII."""
    return json.dumps(text, ensure_ascii=not _is_unicode(text))


def near(text: str, at: int) -> str:
    """Quote the surrounding text, for messages."""
    if at >= len(text):
        return ", but the text ends"
    return f" (near {text[max(0, at - _NEAR) : at + _NEAR]!r})"


def decode_value(text: str) -> tuple[Any, bool]:
    """Decode a whole JSON value, and return whether `text` is one. NaN and Infinity are not."""
    try:
        return _STRICT.decode(text), True
    except (ValueError, RecursionError):
        return None, False


class Finder:
    """Searches one text from left to right; a search that found nothing, or a distant match, is not repeated."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._seen: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = {}

    def find(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        """Return the first match that starts at `at` or later."""
        since, found = self._seen.get(pattern, (-1, None))
        if 0 <= since <= at and (found is None or found.start() >= at):
            return found
        found = pattern.search(self.text, at)
        self._seen[pattern] = (at, found)
        return found

    def start(self, pattern: re.Pattern[str], at: int) -> int:
        """Return where the first match starts; the end of the text if there is none."""
        found = self.find(pattern, at)
        return len(self.text) if found is None else found.start()


def _fault(text: str, at: int, last: int, state: int, closers: list[str]) -> BrokenError:
    """Explain what is wrong with the token at `at`; the one before it starts at `last`."""
    at = skip_space(text, at)
    if at >= len(text):
        return BrokenError("the JSON is not complete: the text ends within it", last)
    token = _TOKEN.match(text, at)
    if token is None and text[at] == '"':
        inside = _INSIDE.match(text, at + 1)
        assert inside is not None
        return BrokenError(f"the JSON is not valid: {_string_fault(text, inside.end())}", at)
    word = _WORD.match(text, at)
    written = "" if word is None else word[0]
    if written in _WORDS:
        why = f"{written} is written {_WORDS[written]}"
    elif written in ("NaN", "Infinity"):
        why = f"{written} is not a number of JSON"
    elif text[at] == "'":
        why = "strings are written in double quotes"
    else:
        why = f"expected {_EXPECTED.get(state) or f'a comma or {closers[-1]}'}"
        if state in (_NEXT, _COLON) and text[last] == '"':
            why += ' after the string; a double quote within a string is written \\"'
    return BrokenError(f"the JSON is not valid: {why}{near(text, at)}", last)


def _string_fault(text: str, at: int) -> str:
    if at >= len(text):
        return "a string in it is not closed"
    here = text[at]
    if here == "\\":
        return f"a backslash within a string is written \\\\{near(text, at)}"
    name = {"\n": "line break", "\t": "tab", "\r": "line break"}.get(here, "control character")
    return f"a {name} within a string is written {json.dumps(here)[1:-1]}{near(text, at)}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse)
