"""A trajectory as a conversation: messages, and calls with their results.

Lines that Toolyard did not write have only an input and an output text. Speakers are then found by the markers of chat
templates, and calls by their tags; text without markers stays one message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from toolyard.messages import Message, ToolCall
from toolyard.records.jsonl import duration
from toolyard.records.trajectory import CallRecord, Trajectory, Turn
from toolyard.viewer.protocol import Bubble, CallView, Picture, Piece, Role

_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^\n`]*)\n", re.MULTILINE)
_THOUGHT = re.compile(r"<think>\n?(?P<text>.*?)(?:</think>\n?|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>\s*(?P<text>.*?)\s*(?:</tool_call>\s*|\Z)", re.DOTALL)
_SPEAKER = re.compile(
    r"<\|im_start\|>(?P<marked>[a-z]+)[^\n]*\n"
    r"|<\|start_header_id\|>(?P<headed>[a-z]+)<\|end_header_id\|>\n*"
    r"|^[ \t]*(?P<plain>system|user|assistant|tool)\n",
    re.MULTILINE,
)
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>")
_PROGRAMS = {"code": None, "python": "python", "script": None, "command": "bash", "cmd": "bash", "sql": "sql"}
"""Names of arguments that are programs, and their language if the name implies one."""
_ROLES = {role.value: role for role in Role}
_MOST_BUBBLES = 10_000
"""A text with more markers is shown as one message."""


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
    said = [*_speeches(prompt, Role.OTHER), *_speeches(response, Role.ASSISTANT)]
    turn = 0
    sampled_from = len(_speeches(prompt, Role.OTHER))
    at = 0
    while at < len(said):
        role, text = said[at]
        sampled = role is Role.ASSISTANT and at >= sampled_from
        at += 1
        if role is not Role.ASSISTANT:
            if text.strip():
                yield Bubble(role, None, _pieces(text, None))
            continue
        calls: list[CallView] = []
        for call in _CALL.finditer(text):
            answer = None
            if at < len(said) and said[at][0] is Role.TOOL:
                answer = said[at][1]
                at += 1
            calls.append(_of_tag(call["text"], answer))
        pieces = _pieces(_CALL.sub("", text), None)
        if pieces or calls:
            yield Bubble(role, None, pieces, tuple(calls), turn if sampled else None, text if sampled else None)
            turn += sampled


def _of_tag(text: str, answer: str | None) -> CallView:
    name, arguments = "", text
    try:
        decoded: Any = json.loads(text)
        if isinstance(decoded, dict):
            call = cast("dict[str, Any]", decoded)
            name = str(call.get("name", ""))
            given = call.get("arguments", {})
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    shown, code, language = _arguments(arguments)
    outcome = "unknown" if answer is not None else "not answered"
    return CallView(name, shown, code, language, outcome, None, (answer or "").strip("\n"), None, None, 0.0, 0.0)


def _speeches(text: str, begins: Role) -> list[tuple[Role, str]]:
    """The speeches in a text, with their speakers; `begins` is the speaker before the first marker."""
    said: list[tuple[Role, str]] = []
    role, at = begins, 0
    for mark in _SPEAKER.finditer(text):
        said.append((role, _without_end(text[at : mark.start()])))
        role, at = _role(mark["marked"] or mark["headed"] or mark["plain"]), mark.end()
        if len(said) > _MOST_BUBBLES:
            return [(begins, text)]
    said.append((role, _without_end(text[at:])))
    return [(role, speech) for role, speech in said if speech.strip()]


def _without_end(speech: str) -> str:
    """The speech without its end marker, if it has one."""
    bare = speech.rstrip()
    return next((bare.removesuffix(end).rstrip() for end in _ENDS if bare.endswith(end)), speech)
