"""Calls in JSON without a closing tag, since they end the turn: Llama 3, Mistral."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolyard.chat.protocol import ParsedCall, Tools
from toolyard.chat.syntax.base import ProseSyntax, Region, cut, make_call, read_call, spell_object
from toolyard.chat.syntax.listed import read_array
from toolyard.chat.syntax.scanning import BrokenError, Finder, JsonObject, scan_object, skip_space


class Llama3(ProseSyntax):
    """`{"name": …, "parameters": {…}}`(Llama 3): the whole turn, or whatever follows `<|python_tag|>`.

    Several are separated by semicolons. Without the tag, an object that names no function is an answer, so it is text.
    """

    name = "llama3"
    sign = "<|python_tag|>"
    opened_by_prompt = False
    _tag = re.compile(r"<\|python_tag\|>")
    _looks = re.compile(r'\s*+\{\s*+"(?:name|type)"\s*+:')
    _next = re.compile(r'(?:;\s*+)?(?:<\|python_tag\|>\s*+)?(?=\{\s*+")')
    _ends = re.compile(r';\s*+(?=\{\s*+")|<\|python_tag\|>')

    def regions(self, text: str, start: int, tools: Tools) -> list[Region]:
        finder, found, at = Finder(text), list[Region](), start
        if self._looks.match(text, start):
            found = self._run(finder, skip_space(text, start), tagged=False)
            at = found[-1].end if found else start
        while (tag := finder.find(self._tag, at)) is not None:
            found += self._run(finder, tag.start(), tagged=True)
            at = found[-1].end
        return found

    def _run(self, finder: Finder, start: int, *, tagged: bool) -> list[Region]:
        """Return the consecutive calls from `start` on; at least one if they are tagged."""
        text, regions, at = finder.text, list[Region](), start
        if tagged:
            at = start + len("<|python_tag|>")
        while True:
            try:
                scanned = scan_object(text, at)
                if not tagged and not _names_a_function(scanned):
                    return regions
                region = Region(start, scanned.end, (read_call(text, scanned),))
            except BrokenError as error:
                region = cut(finder, start, at, error, self._ends)
            regions.append(region)
            start = skip_space(text, region.end)
            following = self._next.match(text, start)
            if following is None:
                return regions
            at = following.end()

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return "; ".join(spell_object(call, "parameters") for call in calls)


class Mistral(ProseSyntax):
    """`[TOOL_CALLS]` and then either a JSON array of objects, or `name[ARGS]{…}`, or `name[CALL_ID]id[ARGS]{…}`.

    The end of the turn closes the array. Calls are written as an array, which can express every name.
    """

    name = "mistral"
    sign = "[TOOL_CALLS]"
    thinking = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    opened_by_prompt = False
    _tag = re.compile(r"\[TOOL_CALLS\]")
    _named = re.compile(r"([^\[\]{}\n]*+)(?:\[CALL_ID\]([^\[\]{}\s]*+))?(?:\[ARGS\])?")
    _sibling = re.compile(r'(?<=\})\s*+,\s*+(?=\{\s*+")|\[TOOL_CALLS\]')

    def regions(self, text: str, start: int, tools: Tools) -> list[Region]:
        finder, found, at = Finder(text), list[Region](), start
        while (tag := finder.find(self._tag, at)) is not None:
            inside = skip_space(text, tag.end())
            array = text.startswith("[", inside) and not self._tag.match(text, inside)
            if array:
                region = read_array(finder, tag.start(), inside, self._sibling, read_call)
            else:
                region = self._single(finder, tag.start(), inside)
            found.append(region)
            at = region.end
        return found

    def _single(self, finder: Finder, start: int, inside: int) -> Region:
        text = finder.text
        named = self._named.match(text, inside)
        assert named is not None
        name = named[1].strip()
        try:
            if not name and not text.startswith("{", inside):
                raise BrokenError("there is no name after [TOOL_CALLS]: write [TOOL_CALLS]name[ARGS]{…}", inside)
            scanned = scan_object(text, named.end())
            end = scanned.end
            call = make_call(name, text[scanned.start : end], end, named[2]) if name else read_call(text, scanned)
        except BrokenError as error:
            return cut(finder, start, inside, error, self._tag)
        return Region(start, end, (call,))

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        return f"[TOOL_CALLS][{', '.join(spell_object(call, 'arguments', with_id=True) for call in calls)}]"


def _names_a_function(scanned: JsonObject) -> bool:
    """Whether it is an object with a name and arguments, or only a name."""
    keys = scanned.members.keys()
    return "name" in keys and (bool(keys & {"parameters", "arguments"}) or keys <= {"name", "type", "id"})
