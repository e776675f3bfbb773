"""Lines that Toolyard did not write: their messages, and the calls with their results, found in input and output.

Index and viewers share this module, so that they agree about what a line contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import orjson

from toolyard.chat.protocol import ParsedCall, ParsedTurn
from toolyard.chat.syntax import CALL_NAME, SIGNED_SYNTAXES, SYNTAXES
from toolyard.chat.syntax.base import TextSyntax
from toolyard.viewer.protocol import Role
from toolyard.viewer.speakers import PLAIN, Speech, Template, speeches_in, template_of

_HERMES = SYNTAXES["hermes"]()
_WRAPPERS = tuple(
    (re.compile(rf"\s*+{re.escape(begin)}"), re.compile(rf"{re.escape(end)}\s*+{re.escape(begin)}"), end)
    for begin, end in (
        ("<tool_response>", "</tool_response>"),
        ("<tool_result>", "</tool_result>"),
        ("<response>", "</response>"),
        ("<result>", "</result>"),
        ("<|tool_response_start|>", "<|tool_response_end|>"),
        ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    )
)
"""How templates wrap a result that they write as a message of somebody else: opening, next one, closing."""
_CONTENTS = (
    re.compile(r".{0,200}?\[TOOL_CONTENT\](.*)", re.DOTALL),
    re.compile(r'\{"content": (.*), "call_id": "[^"]{0,99}"\}', re.DOTALL),
    re.compile(r"response:[^{\n]{0,200}\{(?:value:)?(.*)\}", re.DOTALL),
)
"""How Mistral and Gemma write results, which have their own role."""
_SIGNS = tuple({syntax.sign for syntax in SIGNED_SYNTAXES})
_OTHER_SIGNS = tuple(sign for sign in _SIGNS if "<" not in sign)


class ForeignCall(NamedTuple):
    name: str
    """Empty if the call is malformed."""
    arguments: str
    answer: str | None
    """Its result, if it was found."""
    answered: bool | None
    """None: there may be a result that was not found, because the template does not mark it."""
    problem: str | None
    """Why it is malformed."""


class ForeignMessage(NamedTuple):
    role: Role
    text: str
    """All of it, as written."""
    prose: str
    """Without reasoning and calls."""
    reasoning: str | None
    calls: tuple[ForeignCall, ...]
    sampled: bool


class ForeignFacts(NamedTuple):
    turns: int | None
    """Number of sampled messages. None: the template is not known."""
    calls: tuple[ForeignCall, ...] | None
    """Those of the sampled messages. None: not known."""


def messages_in(prompt: str, response: str) -> list[ForeignMessage]:
    """The messages of a line in order. Results that answer a call are part of the call. Takes linear time."""
    template, response = template_of(prompt, response)
    said = _messages(speeches_in(prompt, template, Role.OTHER), template, sampled=False)
    return said + _messages(speeches_in(response, template, Role.ASSISTANT), template, sampled=True)


def facts_in(prompt: str, response: str) -> ForeignFacts:
    """The turns and calls of a line. Takes linear time."""
    template, response = template_of(prompt, response)
    said = _messages(speeches_in(response, template, Role.ASSISTANT), template, sampled=True)
    turns = [message for message in said if message.role is Role.ASSISTANT]
    calls = tuple(call for message in turns for call in message.calls)
    if template is None:  # whatever looks like a call may be only a part of them
        return ForeignFacts(None, None)
    known = template.complete or any(call.answered for call in calls)
    return ForeignFacts(max(len(turns), 1) if known else None, calls if known or calls else None)


def _messages(said: Sequence[Speech], template: Template | None, *, sampled: bool) -> list[ForeignMessage]:
    messages: list[ForeignMessage] = []
    at = 0
    while at < len(said):
        role, text = said[at]
        at += 1
        if role is not Role.ASSISTANT:
            results = _results(said[at - 1], template) if role is Role.TOOL else None
            messages += [ForeignMessage(role, one, one, None, (), False) for one in results or (text,)]
            continue
        answers: list[str] = []
        while at < len(said) and (results := _results(said[at], template)) is not None:
            answers += results
            at += 1
        turn = _parsed(text, answered=bool(answers))
        if sampled and turn.calls and not answers:
            # SmolLM3 and others write results as messages of the user; after a call there is nothing else.
            while at < len(said) and said[at].role is Role.USER and len(answers) < len(turn.calls):
                parts = said[at].text.strip("\n").split("\nuser\n")
                answers += parts if len(parts) == len(turn.calls) else ["\nuser\n".join(parts)]
                at += 1
        calls = _answered(turn, answers, None if template is None or not template.complete else False)
        messages.append(ForeignMessage(role, text, turn.text, turn.reasoning, calls, sampled))
        messages += [ForeignMessage(Role.TOOL, one, one, None, (), False) for one in answers[len(calls) :]]
    return messages


def _answered(turn: ParsedTurn, answers: Sequence[str], otherwise: bool | None) -> tuple[ForeignCall, ...]:
    """The calls with their results, in order. Malformed calls come last; most trainers do not answer them."""
    made = [(call.name, call.arguments, None) for call in turn.calls]
    made += [("", call.text, call.why) for call in turn.malformed]
    return tuple(
        ForeignCall(name, arguments, answer, otherwise if answer is None else True, problem)
        for (name, arguments, problem), answer in zip_longest(made, answers[: len(made)])
    )


def _parsed(text: str, *, answered: bool) -> ParsedTurn:
    """Parse a turn in the syntax that fits best. `answered`: results follow, so there must have been calls."""
    best: ParsedTurn | None = None
    for syntax in SIGNED_SYNTAXES:
        if syntax.sign not in text and not (syntax.name == "llama3" and text.lstrip().startswith("{")):
            continue
        turn = syntax.parse(text)
        if answered and not turn.calls:
            turn = replace(turn, calls=_calls_anywhere(syntax, text))
        fits = all(map(CALL_NAME.fullmatch, (call.name for call in turn.calls)))
        if fits and turn.calls and not turn.malformed:
            return turn
        if best is None or (fits and len(turn.calls) > len(best.calls)):
            best = turn
    return best or _HERMES.parse(text)


def _calls_anywhere(syntax: TextSyntax, text: str) -> tuple[ParsedCall, ...]:
    """All well-formed calls, even those within reasoning: some trainers make these, too."""
    found = (call for region in syntax.regions(text, 0, ()) for call in region.found)
    return tuple(call for call in found if isinstance(call, ParsedCall))


def _results(speech: Speech, template: Template | None) -> list[str] | None:
    """The results of tools in a message; None if it is not one of a tool."""
    role, text = speech
    if role is Role.ASSISTANT:
        return None
    bare = text.strip()
    for begin, between, end in _WRAPPERS:
        opening = begin.match(bare)
        if opening and bare.endswith(end):
            return [part.strip("\n") for part in between.split(bare[opening.end() : -len(end)])]
    if role is not Role.TOOL:
        return None
    written = next((found[1] for form in _CONTENTS if (found := form.fullmatch(bare))), None)
    if written is None and not (template and template.quotes):
        return [text.strip("\n")]
    return [_unquoted((written or bare).replace('<|"|>', ""))]


def _unquoted(text: str) -> str:
    """The text that a JSON string contains; any other text as it is."""
    try:
        said: Any = json.loads(text) if text.startswith('"') else text
    except (ValueError, RecursionError):
        return text
    return said if isinstance(said, str) else text


# Counting -------------------------------------------------------------------------------------------------------------


class ForeignCounts(NamedTuple):
    turns: int | None
    tools: int | None


def counts_in(prompt: str, response: str) -> ForeignCounts:
    """How many turns and calls `facts_in` finds, in a tenth of the time for what most models write."""
    template, restored = template_of(prompt, response)
    if template in PLAIN and (quick := _quick_counts(template, restored)) is not None:
        return quick
    turns, calls = facts_in(prompt, response)
    return ForeignCounts(turns, None if calls is None else len(calls))


def _quick_counts(template: Template, response: str) -> ForeignCounts | None:
    """None: the response needs a closer look."""
    parts = ["assistant", *template.marks.split(f"\n{response}")]
    turns, tools, before = 0, 0, ""
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        if name == "assistant":
            calls = _plain_calls(text)
            if before == name or calls is None:
                return None
            turns += bool(text.strip())
            tools += calls
        else:
            torn = "<tool_response>" in text and not text.rstrip().endswith("</tool_response>")
            if torn or name not in ("user", "tool") or before == "user" == name:
                return None
        before = name
    return ForeignCounts(turns or 1, tools)


def _plain_calls(text: str) -> int | None:
    """The number of calls, all of them well-formed and after the reasoning; None: there may be others."""
    before, *parts = text.split("<tool_call>")
    if not parts:
        # Counting tags first takes a tenth of the time.
        tags = text.count("<") - text.count("<think>") - text.count("</think>")
        signs = _SIGNS if tags > 0 else _OTHER_SIGNS
        return None if text.lstrip().startswith("{") or any(sign in text for sign in signs) else 0
    if "<think>" in before and "</think>" not in before:
        return None
    for part in parts:
        call, closed, after = part.partition("</tool_call>")
        if not closed or "think>" in after or not _is_plain_call(call):
            return None
    return len(parts)


def _is_plain_call(text: str) -> bool:
    try:
        said: Any = orjson.loads(text)
        return type(said["arguments"]) is dict and CALL_NAME.fullmatch(said["name"]) is not None
    except (ValueError, TypeError, KeyError):
        return False
