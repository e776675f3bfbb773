"""The records of a turn's calls, and the text that the model gets for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolyard.chat.protocol import ParsedTurn
from toolyard.errors import RecordError, summarize
from toolyard.images import Image, image_of
from toolyard.messages import JSON, ToolCall
from toolyard.records.jsonl import decode, encode
from toolyard.records.trajectory import CallRecord
from toolyard.rollout.budget import RolloutLimits
from toolyard.tools.base import ToolResponse
from toolyard.tools.instance import ToolResult
from toolyard.tools.policy import truncate

_MAX_CHARS_PER_TOKEN = 16
"""More than the average token has in any program output."""


def tool_calls(parsed: ParsedTurn, turn: int) -> tuple[ToolCall, ...]:
    """The calls of a turn, for the assistant's message."""
    return tuple(ToolCall(_id_of(turn, i, call.id), call.name, call.arguments) for i, call in enumerate(parsed.calls))


def call_records(
    parsed: ParsedTurn, results: Sequence[ToolResult], turn: int, limits: RolloutLimits, count: Callable[[str], int]
) -> list[CallRecord]:
    """Records of the calls that were made, in order of `results`, then of calls over the limit or malformed."""
    records: list[CallRecord] = []
    for call, result in zip(parsed.calls, results, strict=False):
        text, cut = _shortened(_told(result), limits, count)
        record = CallRecord(
            id=_id_of(turn, len(records), call.id),
            name=call.name,
            arguments=call.arguments,
            outcome=result.outcome.value,
            response=text,
            reward=result.reward,
            metrics=result.metrics,
            seconds=result.seconds,
            attempts=result.attempts,
            truncated=result.truncated or cut,
            error=result.error,
            started=result.started,
            queue_seconds=result.queue_seconds,
        )
        records.append(record)
    for call in parsed.calls[len(results) :]:
        said = f"Error: at most {limits.max_parallel_calls} calls at once; this one was not made"
        number = _id_of(turn, len(records), call.id)
        records.append(CallRecord(number, call.name, call.arguments, "too_many_calls", said))
    for bad in parsed.malformed:
        text, _ = _shortened(f"Error: this call could not be read: {bad.why}", limits, count)
        number = _id_of(turn, len(records), None)
        records.append(CallRecord(number, "", bad.text, "malformed", text, error=bad.why))
    return records


def _shortened(text: str, limits: RolloutLimits, count: Callable[[str], int]) -> tuple[str, bool]:
    limit = limits.max_tool_response_length
    if len(text) <= limit and text.isascii():  # a token is at least one byte
        return text, False

    def measure(part: str) -> int:
        # Tokenizing a megabyte takes seconds, and the result is certain.
        return limit + 1 if len(part) > _MAX_CHARS_PER_TOKEN * limit else count(part)

    return truncate(text, limit, limits.tool_response_truncate_side, measure)


def _id_of(turn: int, index: int, given: str | None) -> str:
    """The model's own id, or one that is unique in the request."""
    return given or f"call_{turn}_{index}"


def plain(result: ToolResult, started: float) -> ToolResult:
    """The result with JSON metrics and the time when the call began."""
    return replace(result, metrics=plain_metrics(result.metrics) if result.metrics else {}, started=started)


def plain_metrics(metrics: Mapping[str, Any]) -> JSON:
    """Convert to plain JSON values: numpy numbers, sets and dates would come back from a tape as something else."""
    try:
        return decode(encode(metrics))
    except (RecordError, RecursionError, ValueError) as error:
        return {"unreadable": summarize(error)}


def _told(result: ToolResult) -> str:
    response = result.response
    return response.text or ("[a video, which is not shown]" if response.video else "")


# Images ---------------------------------------------------------------------------------------------------------------


def told_at_creation(response: ToolResponse) -> str:
    """The text for the model from a tool's `create`."""
    images = len(response.image or ())
    note = f"[{images} {'image' if images == 1 else 'images'}, not shown]" if images else ""
    return "\n".join(filter(None, (response.text, note)))


def images_of(result: ToolResult) -> tuple[Image, ...]:
    return tuple(image_of(one, sys.maxsize) for one in result.response.image or ())


def with_placeholders(results: Sequence[ToolResult], room: int, why_hidden: str) -> tuple[list[ToolResult], int]:
    """Replace hidden images by text: all of them if `why_hidden` is set, otherwise those that exceed `room`, in bytes.
    Returns the results and the number of hidden images."""
    told: list[ToolResult] = []
    hidden = 0
    for result in results:
        shown: list[JSON] = []
        texts = [_told(result)]
        for image in images_of(result):
            fits = len(image.data) <= room
            if fits and not why_hidden:
                room -= len(image.data)
                shown.append(image.as_json())
            else:
                hidden += 1
                texts.append(f"[image: {image}; not shown{'' if why_hidden else ': too much for this conversation'}]")
        if len(shown) < len(result.response.image or ()):
            fields = {"text": "\n".join(filter(None, texts)), "image": shown or None}
            result = replace(result, response=result.response.model_copy(update=fields))
        told.append(result)
    return told, hidden
