"""Calls in a list of JSON objects after a tag: Mistral, Cohere, Apriel, Nemotron, Granite and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from toolyard.chat.protocol import MalformedCall, ParsedCall, Tools
from toolyard.chat.syntax.base import Found, ProseSyntax, Region, cut, make_call, read_call, spell_object
from toolyard.chat.syntax.scanning import BrokenError, Finder, JsonObject, quote, scan_object, skip_space

Read = Callable[[str, JsonObject], ParsedCall]


class Listed(ProseSyntax):
    """An opening tag, a JSON array of objects (or one object after the other), and a closing tag.

    The array closes itself, so its closing tag may be missing.
    """

    tags: tuple[str, str]
    """The closing tag is empty if there is none."""
    keys = ("name", "arguments", "id")
    """The keys of the name, the arguments and the id in an object."""
    lines = False
    """Whether calls are written without an array around them."""

    def __init__(self, *, calls_end_thinking: bool = True) -> None:
        super().__init__(calls_end_thinking=calls_end_thinking)
        self.sign = self.tags[0]
        self._tag = re.compile(r"\s*+".join(map(re.escape, self.tags[0].split("\n"))))
        self._sibling = re.compile(rf"(?<=\}})\s*+,\s*+(?=\{{\s*+\")|{self._tag.pattern}")

    def regions(self, text: str, start: int, tools: Tools) -> list[Region]:
        finder, found, at = Finder(text), list[Region](), start
        while (tag := finder.find(self._tag, at)) is not None:
            inside = skip_space(text, tag.end())
            if text.startswith("[", inside):
                region = read_array(finder, tag.start(), inside, self._sibling, self.read)
            else:
                region = self._run(finder, tag.start(), inside)
            close = skip_space(text, region.end)
            if self.tags[1] and text.startswith(self.tags[1], close):
                region = region._replace(end=close + len(self.tags[1]))
            found.append(region)
            at = region.end
        return found

    def _run(self, finder: Finder, start: int, at: int) -> Region:
        text, found = finder.text, list[Found]()
        try:
            while not found or text.startswith("{", skip_space(text, at)):
                scanned = scan_object(text, at)
                found.append(self.read(text, scanned))
                at = scanned.end
        except BrokenError as error:
            broken = cut(finder, at, at, error, self._sibling)
            found += broken.found
            at = broken.end
        return Region(start, at, tuple(found))

    def read(self, text: str, found: JsonObject) -> ParsedCall:
        """Return the call in one object."""
        return read_call(text, found, self.keys[0], self.keys[2])

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        objects = [self.spell_one(index, call) for index, call in enumerate(calls)]
        inside = "\n" + "\n".join(objects) + "\n" if self.lines else f"[{', '.join(objects)}]"
        return f"{self.tags[0]}{inside}{self.tags[1]}"

    def spell_one(self, index: int, call: ParsedCall) -> str:
        written = spell_object(call, self.keys[1])
        return written.replace('"name"', quote(self.keys[0]), 1)


def read_array(finder: Finder, start: int, bracket: int, sibling: re.Pattern[str], read: Read) -> Region:
    """Return the calls of an array that starts at `bracket`. `sibling`: where the next one starts if one is broken."""
    text, found, at = finder.text, list[Found](), bracket
    while True:
        at = skip_space(text, at + 1)
        if at >= len(text) or text[at] == "]":
            break
        try:
            scanned = scan_object(text, at)
            found.append(read(text, scanned))
            at = scanned.end
        except BrokenError as error:
            broken = cut(finder, at, at, error, sibling)
            found += broken.found
            at = broken.end
        at = skip_space(text, at)
        if not text.startswith(",", at):
            break
    end = at + text.startswith("]", at)
    if not found:
        found.append(MalformedCall(text[start:end], "there is no call in the list"))
    return Region(start, end, tuple(found))


class Apriel(Listed):
    """`<tool_calls>[{"name": …, "arguments": {…}, "id": …}]</tool_calls>`(Apriel)."""

    name = "apriel"
    tags = ("<tool_calls>", "</tool_calls>")


class MiniMaxM1(Listed):
    """`<tool_calls>` and an object on each line (MiniMax M1)."""

    name = "minimax_m1"
    tags = ("<tool_calls>", "</tool_calls>")
    lines = True


class NemotronNano2(Listed):
    """`<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>` (Nemotron Nano v2)."""

    name = "nemotron_nano2"
    tags = ("<TOOLCALL>", "</TOOLCALL>")


class Granite3(Listed):
    """`<|tool_call|>[{"name": …, "arguments": {…}}]` (Granite 3)."""

    name = "granite3"
    tags = ("<|tool_call|>", "")


class GigaChat(Listed):
    """`<|function_call|>{"name": …, "arguments": {…}}` (GigaChat 3.1): one call per turn."""

    name = "gigachat"
    tags = ("<|function_call|>", "")
    lines = True

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return "".join(f"{self.tags[0]}{spell_object(call, 'arguments')}" for call in calls)


class CommandR(Listed):
    """`Action:` and a fence with a list of `tool_name` and `parameters` (Command R and R+)."""

    name = "command_r"
    tags = ("Action:\n```json\n", "```")
    keys = ("tool_name", "parameters", "tool_call_id")


class Command7B(Listed):
    """`<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}]<|END_ACTION|>` (Command R7B)."""

    name = "command_r7b"
    thinking = (("<|START_THINKING|>", "<|END_THINKING|>"),)
    tags = ("<|START_ACTION|>", "<|END_ACTION|>")
    keys = ("tool_name", "parameters", "tool_call_id")

    def spell_one(self, index: int, call: ParsedCall) -> str:
        return f'{{"tool_call_id": {quote(call.id or str(index))}, {super().spell_one(index, call)[1:]}'


class Apertus(Listed):
    """`<|tools_prefix|>[{"NAME": {…}}]<|tools_suffix|>`: the only key of an object is the name."""

    name = "apertus"
    thinking = (("<|inner_prefix|>", "<|inner_suffix|>"),)
    opened_by_prompt = False
    tags = ("<|tools_prefix|>", "<|tools_suffix|>")
    turn_end = "<|tools_suffix|>"

    def read(self, text: str, found: JsonObject) -> ParsedCall:
        if len(found.members) != 1:
            raise BrokenError('a call is an object with one key: {"NAME": {…}}', found.end)
        [(name, (begin, end))] = found.members.items()
        return make_call(name, text[begin:end], found.end)

    def spell_one(self, index: int, call: ParsedCall) -> str:
        return f"{{{quote(call.name)}: {call.arguments.strip()}}}"
