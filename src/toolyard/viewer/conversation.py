"""A trajectory as a conversation: messages, and calls with their results.

Lines that Toolyard did not write may have only an input and an output text: see `foreign`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from toolyard.messages import Message, ToolCall
from toolyard.records.jsonl import duration
from toolyard.records.lines import UNKNOWN
from toolyard.records.trajectory import CallRecord, Trajectory, Turn
from toolyard.viewer.foreign import ForeignCall, messages_in
from toolyard.viewer.protocol import Bubble, CallView, Picture, Piece, Role

_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^\n`]*)\n", re.MULTILINE)
_THOUGHT = re.compile(r"<think>\n?(?P<text>.*?)(?:</think>\n?|\Z)", re.DOTALL)
_PROGRAMS = {"code": None, "python": "python", "script": None, "command": "bash", "cmd": "bash", "sql": "sql"}
"""Names of arguments that are programs, and their language if the name implies one."""
_ROLES = {role.value: role for role in Role}


def conversation(trajectory: Trajectory) -> tuple[Bubble, ...]:
    """The messages in order. Tool messages that answer a call are part of the call."""
    if trajectory.messages:
        return tuple(_of_messages(trajectory))
    return tuple(_of_texts(trajectory.input, trajectory.output))


# Toolyard's lines -----------------------------------------------------------------------------------------------------


def _of_messages(trajectory: Trajectory) -> Iterator[Bubble]:
    messages, turns = trajectory.messages, trajectory.turns
    spoken = sum(message.role == Role.ASSISTANT for message in messages)
    at = -max(spoken - len(turns), 0)  # assistant messages in the prompt were not sampled
    shown: set[str] = set()
    answers = {message.tool_call_id: message for message in messages if message.tool_call_id}
    for message in messages:
        role = _role(message.role)
        if role is Role.ASSISTANT:
            turn = turns[at] if 0 <= at < len(turns) else None
            calls = _calls(message, turn, answers)
            shown |= {call.id for call in (*message.tool_calls, *(turn.tool_calls if turn else ()))}
            yield Bubble(
                role,
                message.name,
                _pieces(message.content, message.reasoning_content),
                calls,
                turn=at if turn else None,
                raw=turn.sampled.text if turn else None,
                timings=_seconds(turn.timings) if turn else {},
            )
            at += 1
        elif not (role is Role.TOOL and message.tool_call_id in shown):
            pieces = _pieces(message.content, message.reasoning_content)
            yield Bubble(role, message.name, pieces, images=_pictures(message))
    for index in range(max(at, 0), len(turns)):  # sampled, but the request ended before it became a message
        turn = turns[index]
        calls = tuple(_of_record(record, None) for record in turn.tool_calls)
        pieces = _pieces(turn.sampled.text, None)
        yield Bubble(Role.ASSISTANT, None, pieces, calls, index, turn.sampled.text, _seconds(turn.timings))


def _calls(message: Message, turn: Turn | None, answers: Mapping[str, Message]) -> tuple[CallView, ...]:
    if turn is not None:
        return tuple(_of_record(record, answers.get(record.id)) for record in turn.tool_calls)
    return tuple(_of_call(call, answers.get(call.id)) for call in message.tool_calls)


def _of_record(record: CallRecord, answer: Message | None) -> CallView:
    arguments, code, language = _arguments(record.arguments)
    metrics = dict(record.metrics)
    verdict, wait = metrics.get("verdict"), metrics.get("queue_seconds")
    return CallView(
        name=record.name,
        arguments=arguments,
        code=code,
        language=language,
        outcome=record.outcome,
        verdict=verdict if isinstance(verdict, str) else None,
        response=record.response,
        error=record.error,
        reward=record.reward,
        seconds=duration(record.seconds),
        wait_seconds=duration(wait),
        metrics=metrics,
        images=_pictures(answer),
    )


def _of_call(call: ToolCall, answer: Message | None) -> CallView:
    """A call that is part of the prompt, and was not made."""
    arguments, code, language = _arguments(call.arguments)
    response, outcome, images = answer.content if answer else "", "ok" if answer else "", _pictures(answer)
    return CallView(call.name, arguments, code, language, outcome, None, response, None, None, 0.0, 0.0, images=images)


def _pictures(message: Message | None) -> tuple[Picture, ...]:
    return tuple(Picture(str(image), image.url) for image in message.images) if message else ()


def _arguments(text: str) -> tuple[str, str | None, str | None]:
    """Readable arguments, and the program among them with its language."""
    try:
        decoded: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text, None, None
    if not isinstance(decoded, dict):
        return text, None, None
    rest = dict(cast("dict[str, Any]", decoded))
    for name, language in _PROGRAMS.items():
        code = rest.get(name)
        if isinstance(code, str):
            del rest[name]
            asked = rest.get("language")
            language = asked if isinstance(asked, str) else language or "python"
            return json.dumps(rest, indent=2, ensure_ascii=False) if rest else "", code, language
    return json.dumps(rest, indent=2, ensure_ascii=False), None, None


def _seconds(timings: Mapping[str, Any]) -> dict[str, float]:
    return {name: seconds for name, value in timings.items() if (seconds := duration(value))}


def _role(name: str) -> Role:
    return _ROLES.get(name, Role.OTHER)


# Texts ----------------------------------------------------------------------------------------------------------------


def _pieces(content: str, reasoning: str | None) -> tuple[Piece, ...]:
    pieces: list[Piece] = [Piece("reasoning", reasoning)] if reasoning else []
    at = 0
    for thought in _THOUGHT.finditer(content):
        pieces += _blocks(content[at : thought.start()])
        pieces.append(Piece("reasoning", thought["text"].strip("\n")))
        at = thought.end()
    pieces += _blocks(content[at:])
    return tuple(pieces)


def _blocks(text: str) -> list[Piece]:
    """Text and its fenced code blocks."""
    pieces: list[Piece] = []
    at = 0
    while opening := _FENCE.search(text, at):
        closing = re.compile(rf"^ {{0,3}}{opening['fence'][0]}{{{len(opening['fence'])},}}[ \t]*$", re.MULTILINE)
        end = closing.search(text, opening.end())
        pieces += _text(text[at : opening.start()])
        code = text[opening.end() : end.start() if end else len(text)]
        pieces.append(Piece("code", code.removesuffix("\n"), opening["info"].strip().partition(" ")[0].lower() or None))
        at = end.end() if end else len(text)
    return pieces + _text(text[at:])


def _text(text: str) -> list[Piece]:
    text = text.strip("\n")
    return [Piece("text", text)] if text.strip() else []


# Other lines ----------------------------------------------------------------------------------------------------------


def _of_texts(prompt: str, response: str) -> Iterator[Bubble]:
    turn = 0
    for message in messages_in(prompt, response):
        pieces = _pieces(message.prose, message.reasoning)
        calls = tuple(map(_of_foreign, message.calls))
        if pieces or calls:
            raw = message.text if message.sampled else None
            yield Bubble(message.role, None, pieces, calls, turn if message.sampled else None, raw)
            turn += message.sampled


def _of_foreign(call: ForeignCall) -> CallView:
    shown, code, language = _arguments(call.arguments)
    outcome = "not answered" if call.answered is False else UNKNOWN
    if call.problem is not None and not call.answered:
        outcome = "malformed"
    return CallView(call.name, shown, code, language, outcome, None, call.answer or "", call.problem, None, 0.0, 0.0)
