"""What the syntaxes share: where reasoning ends, how text and calls are separated, and how a call in JSON is parsed."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from toolyard.chat.protocol import MalformedCall, ParsedCall, ParsedTurn, Tools
from toolyard.chat.syntax.scanning import BrokenError, Finder, JsonObject, quote
from toolyard.errors import ChatError
from toolyard.messages import decode_arguments

Found = ParsedCall | MalformedCall


class Region(NamedTuple):
    """A part of the text that is not prose."""

    start: int
    end: int
    found: tuple[Found, ...] = ()

    @property
    def good(self) -> bool:
        return bool(self.found) and all(isinstance(call, ParsedCall) for call in self.found)


class TextSyntax(ABC):
    """A `CallSyntax`. Immutable, so it can be shared."""

    name: str
    stop: tuple[str, ...] = ()
    sign: str = ""
    """A string that occurs only in calls, to recognize one in a turn of another format; "" if there is none."""
    turn_end: str = ""
    """The end of the last call, if it also ends the turn."""
    rewrites_arguments: bool = False
    """Arguments are not written as their JSON: the values survive a round trip, the spelling does not."""

    @abstractmethod
    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        """Parse a whole turn, without its stop token. Never raises; takes time linear in the text.

        `tools` tell which values are strings if a syntax does not: `5` can be a number or a string.
        """

    @abstractmethod
    def regions(self, text: str, start: int, tools: Tools) -> list[Region]:
        """Return the calls from `start` on, and everything else that is not prose; in order."""

    @abstractmethod
    def spell(self, calls: Sequence[ParsedCall]) -> str:
        """Write calls as the model would, or as close to that as the syntax allows."""

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Write calls as the model would, so that `parse` finds them again.

        Raises:
            ChatError: the syntax cannot express them.
        """
        written = self.spell(calls) if calls else ""
        if calls and not self.roundtrips(written, calls):
            names = ", ".join(repr(call.name) for call in calls)
            raise ChatError(
                f"{self.name} cannot express these calls of {names}: arguments must be a JSON object, "
                "and neither names nor strings may look like the tags of the syntax"
            )
        return written

    def roundtrips(self, written: str, calls: Sequence[ParsedCall]) -> bool:
        """Whether `written` is parsed as `calls` and nothing else."""
        turn = self.parse(written)
        read = [(call.name, self._meaning(call.arguments)) for call in turn.calls]
        meant = [(call.name, self._meaning(call.arguments)) for call in calls]
        return read == meant and not turn.malformed and not turn.text

    def _meaning(self, arguments: str) -> object:
        return decode_arguments(arguments)[0] if self.rewrites_arguments else arguments.strip()

    def introduce(self, tools: Tools) -> str:
        """Describe the tools for the system message, if the template does not; "" if there are none."""
        if not tools:
            return ""
        example = self.spell([ParsedCall("function_name", '{"argument_name": "value"}')])
        return (
            f"# Tools\n\nYou may call these functions:\n\n{list_tools(tools)}\n\n"
            f"To call one, write its name and its arguments in exactly this form:\n\n{example}\n\n"
            "Then stop: the result is shown to you, and you go on from there."
        )

    def unoffered(self, tools: Tools) -> dict[str, str]:
        """See `ChatFormat.unoffered`."""
        return {}


class ProseSyntax(TextSyntax):
    """Calls are surrounded by prose, and reasoning comes before it.

    Reasoning is `<think>…</think>` at the start of the turn; tags of calls within it do not count. If prompts usually
    open the reasoning, a turn with only `</think>` started in it. Unclosed reasoning is the whole turn, except for
    complete calls that end the turn: see `calls_end_thinking`.
    """

    thinking: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    """Pairs of tags."""
    opened_by_prompt: bool = True
    """Whether the closing tag of the first pair may occur alone."""

    def __init__(self, *, calls_end_thinking: bool = True) -> None:
        """`calls_end_thinking`: complete calls at the end of a turn count even within unclosed reasoning; some models,
        such as those of verl's examples, call without closing it first. Otherwise they do not count."""
        self.calls_end_thinking = calls_end_thinking

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        begin = len(text) - len(text.lstrip())
        for opening, closing in self.thinking:
            if text.startswith(opening, begin):
                inside = begin + len(opening)
                end = text.find(closing, inside)
                if end < 0:
                    return self._unfinished(text, inside, tools)
                after = end + len(closing)
                return turn_of(text, after, self.regions(text, after, tools), text[inside:end])
        regions = self.regions(text, 0, tools)
        closing = self.thinking[0][1]
        end = _outside(text, closing, regions) if self.opened_by_prompt else -1
        if end < 0:
            return turn_of(text, 0, regions, None)
        after = end + len(closing)
        return turn_of(text, after, self.regions(text, after, tools), text[:end])

    def _unfinished(self, text: str, inside: int, tools: Tools) -> ParsedTurn:
        last: list[Region] = []
        end = len(text.rstrip())
        if self.calls_end_thinking:
            for region in reversed(self.regions(text, inside, tools)):
                if (region.found and not region.good) or text[region.end : end].strip():
                    break
                last.append(region)
                end = region.start
        return ParsedTurn("", text[inside:end].strip(), _calls(reversed(last)))


def list_tools(tools: Tools) -> str:
    """Return their schemas, one per line."""
    return "\n".join(json.dumps(tool.model_dump(), ensure_ascii=False) for tool in tools)


def read_call(text: str, found: JsonObject, name_key: str = "name", id_key: str = "id") -> ParsedCall:
    """Return the call described by an object with `name` and `arguments` (or `parameters`).

    Raises:
        BrokenError: it does not describe a call.
    """
    if name_key not in found.members:
        raise BrokenError(f'the JSON object has no "{name_key}"', found.end)
    name = _string(text, found, name_key)
    if name is None:
        raise BrokenError(f'"{name_key}" is not a string', found.end)
    key = "arguments" if "arguments" in found.members else "parameters"
    start, end = found.members.get(key, (0, 0))
    given = text[start:end] or "{}"
    if given[0] == '"':  # JSON within JSON, as in OpenAI's API
        given = json.loads(given).strip() or "{}"
    known = isinstance(found.decoded.get(key), dict)
    identity = _string(text, found, id_key)
    return make_call(name, "{}" if given == "null" else given, found.end, identity, is_object=known)


def make_call(
    name: str, arguments: str, end: int, identity: str | None = None, *, is_object: bool = False
) -> ParsedCall:
    """Return the call that ends at `end`. `is_object`: the arguments are known to be a JSON object.

    Raises:
        BrokenError: it has no name, or its arguments are not a JSON object.
    """
    if not name.strip():
        raise BrokenError("the call has no name", end)
    problem = None if is_object else decode_arguments(arguments)[1]
    if problem is not None:
        raise BrokenError(problem, end)
    return ParsedCall(name, arguments, identity or None)


def spell_object(call: ParsedCall, arguments: str, *, with_id: bool = False) -> str:
    """Write the object that `read_call` reads; `arguments` is the key of the arguments."""
    identity = f', "id": {quote(call.id)}' if with_id and call.id else ""
    return f'{{"name": {quote(call.name)}, "{arguments}": {call.arguments.strip()}{identity}}}'


def cut(finder: Finder, start: int, inside: int, error: BrokenError, ends: re.Pattern[str]) -> Region:
    """Return the malformed call that starts at `start`. It ends where `ends` matches, after `inside` and the error's
    position: after the match if a group matched (the closing tag), else before it (something new starts)."""
    found = finder.find(ends, max(inside, error.resume))
    end = len(finder.text) if found is None else found.end() if found.lastindex else found.start()
    return Region(start, end, (MalformedCall(finder.text[start:end].strip(), str(error)),))


def _string(text: str, found: JsonObject, key: str) -> str | None:
    if found.decoded:
        value = found.decoded.get(key)
        return value if isinstance(value, str) else None
    start, end = found.members.get(key, (0, 0))
    return json.loads(text[start:end]) if text[start:end].startswith('"') else None


def _outside(text: str, tag: str, regions: Iterable[Region]) -> int:
    """Return where `tag` first occurs outside of well-formed calls: within a string it is not a tag. -1 if nowhere."""
    at = text.find(tag)
    for region in regions:
        if at < 0 or at < region.start:
            break
        if region.good and at < region.end:
            at = text.find(tag, region.end)
    return at


def turn_of(text: str, start: int, regions: Sequence[Region], reasoning: str | None) -> ParsedTurn:
    if reasoning is None and not regions:
        return ParsedTurn(text)
    prose: list[str] = []
    malformed: list[MalformedCall] = []
    at = start
    for region in regions:
        prose.append(text[at : region.start].strip())
        malformed += [call for call in region.found if isinstance(call, MalformedCall)]
        at = region.end
    prose.append(text[at:].strip())
    content = "\n".join(filter(None, prose))
    return ParsedTurn(content, None if reasoning is None else reasoning.strip(), _calls(regions), tuple(malformed))


def _calls(regions: Iterable[Region]) -> tuple[ParsedCall, ...]:
    return tuple(call for region in regions for call in region.found if isinstance(call, ParsedCall))
