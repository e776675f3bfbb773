"""Writes and reads a trajectory's line in a dump; reads lines of verl, TRL and other Toolyard versions too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from toolyard.errors import RecordError
from toolyard.messages import JSON, Message
from toolyard.records.jsonl import decode, encode, finite
from toolyard.records.trajectory import (
    FORMAT_VERSION,
    CallRecord,
    Failure,
    Sampled,
    Tokens,
    Trajectory,
    Turn,
)
from toolyard.records.trl import as_verl, is_completion, rewards_of

UNKNOWN = "unknown"
"""The value of a field that a line does not have."""

_VERL = ("input", "output", "gts", "score", "step", "request_id")
_OURS = frozenset(
    {*_VERL, "finish_reason", "messages", "tokens", "turns", "rewards", "metrics", "format_version"}
    | {"state", "batch_data_id", "rollout_offset", "data_source", "token_exact", "failure", "started_at", "extra"}
    | {"reward_details"}
)

_LATER = frozenset({"started", "queue_seconds", "version_starts"})
"""Fields that earlier versions did not write. Left out if 0 or empty, so that earlier tapes give the same bytes."""

_MOST_IMAGE_BYTES = 1 << 30
"""Practically unlimited: the run's own limits applied when the line was written."""

T = TypeVar("T")


# Writing --------------------------------------------------------------------------------------------------------------


def to_line(trajectory: Trajectory) -> bytes:
    """Encode a trajectory as a line with its newline. Equal trajectories have equal lines: keys are sorted.

    Raises:
        RecordError: a value cannot be written as JSON.
    """
    try:
        return encode(_line(trajectory)) + b"\n"
    except (RecordError, RecursionError) as error:
        raise RecordError(f"the trajectory {trajectory.request_id!r} cannot be written: {error}") from None


def _line(it: Trajectory) -> JSON:
    line: JSON = {
        "input": it.input,
        "output": it.output,
        "gts": _ordered(it.ground_truth),
        "score": finite(it.score),
        "step": it.step,
        "request_id": it.request_id,
        "finish_reason": it.finish_reason,
        "messages": [message.as_openai() for message in it.messages],
        "tokens": _fields(it.tokens),
        "turns": [_turn_fields(turn) for turn in it.turns],
        "rewards": {name: finite(value) for name, value in sorted(it.rewards.items())},
        "metrics": _ordered(it.metrics),
        "format_version": FORMAT_VERSION,
        "state": it.state,
        "batch_data_id": it.batch_data_id,
        "rollout_offset": it.rollout_offset,
        "data_source": it.data_source,
        "token_exact": it.token_exact,
        "failure": None if it.failure is None else _fields(it.failure),
    }
    if it.reward_details:
        line["reward_details"] = _ordered(it.reward_details)
    if it.started_at is not None:
        line["started_at"] = it.started_at
    extra: JSON = _ordered(it.extra)
    line |= {key: value for key, value in extra.items() if key not in _OURS}
    if homonyms := {key: value for key, value in extra.items() if key in _OURS}:
        line["extra"] = homonyms  # foreign fields with the same names as ours
    return line


def _turn_fields(turn: Turn) -> JSON:
    return {
        "sampled": _fields(turn.sampled),
        "tool_calls": [_fields(call) | {"metrics": _ordered(call.metrics)} for call in turn.tool_calls],
        "timings": _ordered(turn.timings),
    }


def _fields(part: Any) -> JSON:
    said = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: value for name, value in said.items() if value or name not in _LATER}


def _ordered(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = sorted(cast("Mapping[Any, Any]", value).items(), key=lambda item: str(item[0]))
        return {key: _ordered(inner) for key, inner in items}
    if isinstance(value, list | tuple):
        return [_ordered(inner) for inner in cast("list[Any]", value)]
    return value


# Reading --------------------------------------------------------------------------------------------------------------


def trajectory_of(line: bytes | str) -> Trajectory:
    """Parse a line of Toolyard, one with only verl's fields, or a row of TRL's completions; the last two have no tokens
    and are not token-exact.

    Of a line written by a newer version, the known fields are read. Unknown fields go to `extra`.

    Raises:
        RecordError: it is not a trajectory; the message says why, not where.
    """
    said = decode(line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass"))
    if not isinstance(said, dict):
        raise RecordError(f"not a trajectory, but {_kind(said)}")
    if is_completion(said):
        row = cast("JSON", said)
        return dataclasses.replace(_of_verl(_Fields(as_verl(row))), rewards=rewards_of(row))
    fields = _Fields(cast("JSON", said))
    version = fields.said.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool):
        return _of_verl(fields)
    try:
        return _of_ours(fields)
    except RecordError as error:
        if version <= FORMAT_VERSION:
            raise
        raise RecordError(
            f"{error}; it was written by a newer Toolyard (format_version {version}; this one reads {FORMAT_VERSION})"
        ) from None


def _of_verl(fields: _Fields) -> Trajectory:
    request_id = fields.said.get("request_id")
    return Trajectory(
        request_id="" if request_id is None else str(request_id),
        batch_data_id="",
        rollout_offset=0,
        state="COMPLETED",
        finish_reason=UNKNOWN,
        input=fields.text("input"),
        output=fields.text("output"),
        ground_truth=fields.said.get("gts"),
        score=fields.score(),
        step=fields.integer("step", 0),
        messages=(),
        tokens=Tokens(),
        turns=(),
        rewards={},
        metrics={},
        token_exact=False,
        extra={key: value for key, value in fields.said.items() if key not in _VERL},
    )


def _of_ours(fields: _Fields) -> Trajectory:
    tokens = fields.object("tokens")
    extra = {key: value for key, value in fields.said.items() if key not in _OURS}
    return Trajectory(
        request_id=fields.text("request_id"),
        batch_data_id=fields.text("batch_data_id", ""),
        rollout_offset=fields.integer("rollout_offset", 0),
        state=fields.text("state"),
        finish_reason=fields.text("finish_reason", UNKNOWN),
        input=fields.text("input"),
        output=fields.text("output"),
        ground_truth=fields.said.get("gts"),
        score=fields.score(),
        step=fields.integer("step", 0),
        messages=fields.each("messages", _message),
        tokens=Tokens(
            prompt_ids=tokens.array("prompt_ids"),
            response_ids=tokens.array("response_ids"),
            response_mask=tokens.array("response_mask"),
            response_logprobs=tokens.optional("response_logprobs", tokens.array),
        ),
        turns=fields.each("turns", _turn),
        rewards=fields.object("rewards").said,
        metrics=fields.object("metrics").said,
        data_source=fields.text("data_source", UNKNOWN),
        token_exact=fields.flag("token_exact"),
        failure=fields.optional("failure", lambda name: _failure(fields.object(name))),
        reward_details=fields.object("reward_details").said,
        started_at=fields.optional("started_at", fields.number),
        extra=extra | fields.object("extra").said,
    )


def _message(fields: _Fields) -> Message:
    try:
        return Message.from_openai(fields.said, max_image_bytes=_MOST_IMAGE_BYTES)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{fields.where.removesuffix('.')}: {error}") from None


def _turn(fields: _Fields) -> Turn:
    sampled = fields.object("sampled")
    return Turn(
        sampled=Sampled(
            start=sampled.integer("start"),
            end=sampled.integer("end"),
            text=sampled.text("text", ""),
            finish=sampled.text("finish", UNKNOWN),
            prompt_crc=sampled.integer("prompt_crc"),
            weight_versions=tuple(map(str, sampled.array("weight_versions"))),
            version_starts=tuple(map(int, sampled.array("version_starts"))),
            cached_tokens=sampled.optional("cached_tokens", sampled.integer),
            attempts=sampled.integer("attempts", 1),
            stopped_by=sampled.said.get("stopped_by", ""),
            queue_seconds=sampled.number("queue_seconds", 0.0),
        ),
        tool_calls=fields.each("tool_calls", _call),
        timings=fields.object("timings").said,
    )


def _call(fields: _Fields) -> CallRecord:
    return CallRecord(
        id=fields.text("id"),
        name=fields.text("name"),
        arguments=fields.text("arguments", ""),
        outcome=fields.text("outcome", UNKNOWN),
        response=fields.text("response", ""),
        reward=fields.optional("reward", fields.number),
        metrics=fields.object("metrics").said,
        seconds=fields.number("seconds", 0.0),
        attempts=fields.integer("attempts", 0),
        truncated=fields.flag("truncated"),
        error=fields.optional("error", fields.text),
        started=fields.number("started", 0.0),
        queue_seconds=fields.number("queue_seconds", 0.0),
    )


def _failure(fields: _Fields) -> Failure:
    return Failure(
        whose=fields.text("whose", UNKNOWN),
        stage=fields.text("stage", UNKNOWN),
        error=fields.text("error", ""),
        source=fields.text("source", ""),
        cause=fields.text("cause", ""),
    )


class _Fields:
    """A JSON object whose fields are read with type checks; errors name the field.

    A field without a default is required; missing containers are empty.
    """

    def __init__(self, said: JSON, where: str = "") -> None:
        self.said = said
        self.where = where

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        return value if isinstance(value, str) else self._refuse(name, "text")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        return cast("int", value) if whole else self._refuse(name, "an integer")

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            return float(value) if good else self._refuse(name, "a number")
        except OverflowError:
            return self._refuse(name, "a number that fits into 64 bits")

    def score(self) -> float | None:
        """The score; NaN and null are read as None."""
        value = self.said.get("score")
        if value is not None and not isinstance(value, int | float):
            self._refuse("score", "a number")
        try:
            return finite(value)
        except OverflowError:
            return self._refuse("score", "a number that fits into 64 bits")

    def flag(self, name: str) -> bool:
        value = self.said.get(name, False)
        return value if isinstance(value, bool) else self._refuse(name, "true or false")

    def array(self, name: str) -> list[Any]:
        value = self.said.get(name, [])
        return cast("list[Any]", value) if isinstance(value, list) else self._refuse(name, "an array")

    def object(self, name: str) -> _Fields:
        value = self.said.get(name, {})
        if not isinstance(value, dict):
            self._refuse(name, "an object")
        return _Fields(cast("JSON", value), f"{self.where}{name}.")

    def each(self, name: str, read: Callable[[_Fields], T]) -> tuple[T, ...]:
        return tuple(read(self._element(name, at, value)) for at, value in enumerate(self.array(name)))

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        return None if self.said.get(name) is None else read(name)

    def _element(self, name: str, at: int, value: Any) -> _Fields:
        if not isinstance(value, dict):
            raise RecordError(f"{self.where}{name}[{at}] is {_kind(value)}, not an object")
        return _Fields(cast("JSON", value), f"{self.where}{name}[{at}].")

    def _value(self, name: str, default: Any) -> Any:
        if name in self.said:
            return self.said[name]
        if default is None:
            raise RecordError(f"not a trajectory: {self.where}{name} is missing")
        return default

    def _refuse(self, name: str, expected: str) -> Any:
        raise RecordError(f"{self.where}{name} is {_kind(self.said.get(name))}, not {expected}")


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, str):
        return "text"
    return "an object" if isinstance(value, dict) else "an array" if isinstance(value, list) else f"{value}"[:40]
