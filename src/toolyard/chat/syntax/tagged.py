"""Calls in tags, with JSON inside: Hermes and Qwen, DeepSeek V3 and V3.1, Kimi K2, Gemma 4 and others."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from toolyard.chat.protocol import ParsedCall, Tools
from toolyard.chat.syntax.base import ProseSyntax, Region, cut, list_tools, make_call, read_call, spell_object
from toolyard.chat.syntax.scanning import BrokenError, Finder, near, quote, scan_object, skip_space
from toolyard.chat.syntax.values import PYTHON_WORDS
from toolyard.messages import decode_arguments


class Tagged(ProseSyntax):
    """A call between two tags. Its body is parsed from its start, so that tags in JSON strings do not count.

    Strict: a call without its closing tag is malformed even if its JSON is complete, since it may have been truncated.
    The tags of a section around the calls, if the format has them, are optional.
    """

    call: tuple[str, str]
    section: tuple[str, ...] = ()
    """Opening and closing tags, alternating."""
    frame: tuple[str, ...] = ()
    """Tags around the text, which are not part of it."""

    def __init__(self, *, calls_end_thinking: bool = True) -> None:
        super().__init__(calls_end_thinking=calls_end_thinking)
        self.sign = self.call[0]
        opening, closing = map(re.escape, self.call)
        section = "".join(f"|{re.escape(tag)}" for tag in (*self.section, *self.frame))
        self._tags = re.compile(f"({opening}){section}")
        self._ends = re.compile(f"({closing})|{opening}{section}")

    @abstractmethod
    def body(self, finder: Finder, at: int, tools: Tools) -> tuple[ParsedCall, int]:
        """Return the call after the opening tag, and where it ends.

        Raises:
            BrokenError: it is not a call.
        """

    def regions(self, text: str, start: int, tools: Tools) -> list[Region]:
        finder, found, at = Finder(text), list[Region](), start
        while (tag := finder.find(self._tags, at)) is not None:
            try:
                region = self._call(finder, tag, tools) if tag[1] else self._section(text, tag)
            except BrokenError as error:
                region = cut(finder, tag.start(), tag.end(), error, self._ends)
            found.append(region)
            at = region.end
        return found

    def _call(self, finder: Finder, tag: re.Match[str], tools: Tools) -> Region:
        text, (opening, closing) = finder.text, self.call
        call, end = self.body(finder, tag.end(), tools)
        close = skip_space(text, end)
        if text.startswith(closing, close):
            return Region(tag.start(), close + len(closing), (call,))
        if close == len(text) or text.startswith((opening, *self.section), close):
            raise BrokenError(f"the call is not closed: write {closing} after the JSON object", end)
        raise BrokenError(f"there is something between the JSON object and {closing}{near(text, close)}", end)

    def _section(self, text: str, tag: re.Match[str]) -> Region:
        if tag[0] in self.section[::2] and not text.startswith(self.call[0], skip_space(text, tag.end())):
            raise BrokenError(f"there is no {self.call[0]} after {tag[0]}", tag.end())
        return Region(tag.start(), tag.end())


class Hermes(Tagged):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen2.5 and Qwen3)."""

    name = "hermes"
    call = ("<tool_call>", "</tool_call>")

    def body(self, finder: Finder, at: int, tools: Tools) -> tuple[ParsedCall, int]:
        scanned = scan_object(finder.text, at)
        return read_call(finder.text, scanned), scanned.end

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return "\n".join(f"<tool_call>\n{spell_object(call, 'arguments')}\n</tool_call>" for call in calls)

    def introduce(self, tools: Tools) -> str:
        if not tools:
            return ""
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{list_tools(tools)}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )


class DeepSeekV3(Tagged):
    """V3: `function`, a separator, the name, and the arguments in a fence. V3.1: the name, a separator, the arguments.

    Both are parsed; V3 is written. Names cannot contain line breaks, `<`, backticks or braces, or padding.
    """

    name = "deepseek_v3"
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    _head = re.compile(r"([^<\n]*+)<｜tool▁sep｜>\s*+")
    _named = re.compile(r"([^<\n`{}]*+)\s*+(```(?:json)?)?")
    _fence = re.compile(r"\s*+```")

    def body(self, finder: Finder, at: int, tools: Tools) -> tuple[ParsedCall, int]:
        text = finder.text
        head = self._head.match(text, at)
        if head is None:
            raise BrokenError("there is no <｜tool▁sep｜> after <｜tool▁call▁begin｜>", at)
        name, inside, fenced = head[1].strip(), head.end(), False
        if not text.startswith("{", inside):
            named = self._named.match(text, inside)
            assert named is not None
            name, inside, fenced = named[1].strip(), named.end(), bool(named[2])
        scanned = scan_object(text, inside)
        end = scanned.end
        if fenced and (fence := self._fence.match(text, end)):
            end = fence.end()
        return make_call(name, text[scanned.start : scanned.end], end), end

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        (begin, end), (opening, closing) = self.section, self.call
        return (
            begin
            + "\n".join(
                f"{opening}function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments.strip()}\n```{closing}"
                for call in calls
            )
            + end
        )


class KimiK2(Tagged):
    """The call's id, `functions.NAME:INDEX`, then the arguments. Names cannot contain line breaks or `<`, have white
    space at the ends, or end in a colon and a number."""

    name = "kimi_k2"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    _head = re.compile(r"([^<\n]*+)\s*+<\|tool_call_argument_begin\|>")
    _identity = re.compile(r"(?:functions\.)?(.*?)(?::[0-9]+)?")

    def body(self, finder: Finder, at: int, tools: Tools) -> tuple[ParsedCall, int]:
        text = finder.text
        head = self._head.match(text, at)
        if head is None:
            raise BrokenError("there is no functions.NAME:INDEX<|tool_call_argument_begin|> after the opening tag", at)
        scanned = scan_object(text, head.end())
        identity = head[1].strip()
        call = make_call(self._name(identity), text[scanned.start : scanned.end], scanned.end, identity)
        return call, scanned.end

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        (begin, end), (opening, closing) = self.section, self.call
        written: list[str] = []
        for index, call in enumerate(calls):
            fits = call.id is not None and self._name(call.id) == call.name
            identity = call.id if fits else f"functions.{call.name}:{index}"
            written.append(f"{opening}{identity}<|tool_call_argument_begin|>{call.arguments.strip()}{closing}")
        return begin + "".join(written) + end

    def _name(self, identity: str) -> str:
        found = self._identity.fullmatch(identity)
        return "" if found is None else found[1]


class Functionary31(Tagged):
    """`<function=NAME>{…}</function>` (Functionary 3.1 and Llama 3.1's custom tools)."""

    name = "functionary31"
    call = ("<function=", "</function>")
    _head = re.compile(r"([^<>\n]*+)>")

    def body(self, finder: Finder, at: int, tools: Tools) -> tuple[ParsedCall, int]:
        head = self._head.match(finder.text, at)
        if head is None:
            raise BrokenError("a call begins with <function=NAME>", at)
        scanned = scan_object(finder.text, head.end())
        return make_call(head[1].strip(), finder.text[scanned.start : scanned.end], scanned.end), scanned.end

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return "".join(f"<function={call.name}>{call.arguments.strip()}</function>" for call in calls)


class SolarOpen(Tagged):
    """The call's id, its name and its arguments, with a tag between them. `<|calls|>` ends the turn."""

    name = "solar_open"
    section = ("<|tool_calls|>", "<|calls|>")
    turn_end = "<|calls|>"
    call = ("<|tool_call:begin|>", "<|tool_call:end|>")
    _head = re.compile(r"([^<\n]*+)<\|tool_call:name\|>([^<\n]*+)<\|tool_call:args\|>")

    def body(self, finder: Finder, at: int, tools: Tools) -> tuple[ParsedCall, int]:
        head = self._head.match(finder.text, at)
        if head is None:
            raise BrokenError("a call begins with <|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>", at)
        scanned = scan_object(finder.text, head.end())
        given = finder.text[scanned.start : scanned.end]
        return make_call(head[2].strip(), given, scanned.end, head[1].strip()), scanned.end

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return "<|tool_calls|>" + "".join(
            f"<|tool_call:begin|>{call.id or f'call_{index}'}<|tool_call:name|>{call.name}<|tool_call:args|>"
            f"{call.arguments.strip()}<|tool_call:end|>"
            for index, call in enumerate(calls)
        )


class Gemma4(Tagged):
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:5}<tool_call|>`: JSON with a token as its quotes, and bare keys.

    Nothing is escaped, so a string cannot contain the token.
    """

    name = "gemma4"
    rewrites_arguments = True
    thinking = (("<|channel>thought", "<channel|>"),)
    call = ("<|tool_call>", "<tool_call|>")
    _head = re.compile(r"\s*+call:([^{<\n]*+)(?=\{)")
    _quote = '<|"|>'
    _close = re.compile(r'<\|"\|>|<tool_call\|>|<\|tool_call>')
    _word = re.compile(r"([A-Za-z_][\w.-]*+)(\s*+:)?")
    _known = MappingProxyType({"true": "true", "false": "false", "null": "null"} | PYTHON_WORDS)

    def body(self, finder: Finder, at: int, tools: Tools) -> tuple[ParsedCall, int]:
        text = finder.text
        head = self._head.match(text, at)
        if head is None:
            raise BrokenError("a call begins with <|tool_call>call:NAME{", at)
        end, quoted = head.end(), False
        while (mark := finder.find(self._close, end)) is not None and (quoted or mark[0] == self._quote):
            quoted ^= mark[0] == self._quote
            end = mark.end()
        end = len(text) if mark is None else mark.start()
        parts = text[head.end() : end].split(self._quote)
        written = "".join(quote(part) if index % 2 else self._bare(part) for index, part in enumerate(parts))
        try:
            scanned = scan_object(written, 0)
        except BrokenError as error:
            raise BrokenError(str(error), head.end()) from None
        if written[scanned.end :].strip():
            raise BrokenError(f"there is something between the arguments and {self.call[1]}", head.end())
        return make_call(head[1].strip(), written[: scanned.end], end), end

    def _bare(self, text: str) -> str:
        return self._word.sub(lambda word: f"{quote(word[1])}:" if word[2] else self._known.get(word[1], word[1]), text)

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return "".join(
            f"<|tool_call>call:{call.name}{self._spelled(decode_arguments(call.arguments)[0], top=True)}<tool_call|>"
            for call in calls
        )

    def _spelled(self, value: Any, *, top: bool = False) -> str:
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, dict):
            items: list[tuple[str, Any]] = sorted(value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
            return (
                "{" + ",".join(f"{key if top else self._spelled(key)}:{self._spelled(one)}" for key, one in items) + "}"
            )
        if isinstance(value, list):
            return "[" + ",".join(map(self._spelled, value)) + "]"  # pyright: ignore[reportUnknownArgumentType]
        return json.dumps(value)
