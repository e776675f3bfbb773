"""The channels of gpt-oss: analysis is reasoning, final is text, and a message to a function is a call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolyard.chat.protocol import MalformedCall, ParsedCall, ParsedTurn, Tools
from toolyard.chat.syntax.base import Region, TextSyntax, cut, make_call, turn_of
from toolyard.chat.syntax.scanning import BrokenError, Finder, near, scan_object, skip_space

_MESSAGE = re.compile(r"<\|message\|>")
_HEADER = re.compile(r"<\|(?:start|channel|constrain)\|>")
_LEAD = re.compile(r"\s*+(?:assistant)?\s*+(?:to=[^\s<]*+\s*+)?")
"""The role and the recipient. The first message's role, and possibly more, is in the prompt."""
_END = re.compile(r"(<\|(?:end|call|return)\|>)|<\|(?:start|channel)\|>")
_ANALYSIS = re.compile(r"<\|channel\|>\s*+analysis")
_RECIPIENT = re.compile(r"(?<!\S)to=([^\s<]*+)")


class Harmony(TextSyntax):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`.

    `<|call|>` is a stop token, so the last call may lack it. Names cannot contain white space or `<`. Recipients that
    are not functions keep their full name, such as `browser.search`.
    """

    name = "harmony"
    sign = "<|message|>"
    turn_end = "<|call|>"

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        regions, thoughts = _messages(text, 0)
        return turn_of(text, 0, regions, "\n".join(thoughts) if thoughts else None)

    def regions(self, text: str, start: int, tools: Tools) -> list[Region]:
        return _messages(text, start)[0]

    def spell(self, calls: Sequence[ParsedCall]) -> str:
        head = "<|channel|>commentary to=functions."
        return "<|start|>assistant".join(
            f"{head}{call.name} <|constrain|>json<|message|>{call.arguments.strip()}<|call|>" for call in calls
        )


def _messages(text: str, at: int) -> tuple[list[Region], list[str]]:
    """Return what is not prose, and the reasoning in it."""
    finder = Finder(text)
    thoughts: list[str] = []
    regions: list[Region] = []
    while (message := finder.find(_MESSAGE, at)) is not None:
        header = _header(text, at, message.start())
        head = text[header : message.start()]
        recipient = _RECIPIENT.search(head)
        if recipient is not None:
            region = _call(finder, header, message.end(), recipient[1])
            regions.append(region)
            at = region.end
            continue
        end = finder.find(_END, message.end())
        until = len(text) if end is None else end.start()
        at = until if end is None or not end[1] else end.end()
        if _ANALYSIS.search(head):
            thoughts.append(text[message.end() : until].strip())
            regions.append(Region(header, at))
        else:
            regions += [Region(header, message.end()), Region(until, at)]
    if _HEADER.search(text, at):
        header = _header(text, at, len(text))
        cut_off = MalformedCall(text[header:], "the call is not complete: it ends before its arguments")
        regions.append(Region(header, len(text), (cut_off,) if _RECIPIENT.search(text, header) else ()))
    return regions, thoughts


def _header(text: str, start: int, end: int) -> int:
    """Return where a message's header starts; what is before it is prose."""
    tag = _HEADER.search(text, start, end)
    lead = text[start : end if tag is None else tag.start()]
    return start if _LEAD.fullmatch(lead) else start + len(lead)


def _call(finder: Finder, start: int, body: int, recipient: str) -> Region:
    text, end = finder.text, skip_space(finder.text, body)
    try:
        arguments = "{}"
        if not text.startswith("<|call|>", end):
            scanned = scan_object(text, end)
            arguments, end = text[scanned.start : scanned.end], scanned.end
        call = make_call(recipient.removeprefix("functions."), arguments, end)
        close = skip_space(text, end)
        closing = _END.match(text, close)
        if closing is None and close < len(text):
            raise BrokenError(f"there is something between the JSON object and <|call|>{near(text, close)}", end)
    except BrokenError as error:
        return cut(finder, start, body, error, _END)
    end = close if closing is None or not closing[1] else closing.end()
    return Region(start, end, (call,))
