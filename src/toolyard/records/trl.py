"""Rows of the completions that TRL logs (`log_completions`), as lines with verl's fields.

A row has `step`, `prompt`, `completion`, a column of numbers per reward function, whatever the user logged, and
`advantage`. Prompt and completion are text, or messages; messages are written in ChatML.
"""

from __future__ import annotations

from typing import Any, cast

from toolyard.errors import RecordError
from toolyard.messages import JSON
from toolyard.records.jsonl import encode, finite

ADVANTAGE = "advantage"
_TOTAL = "reward"
"""Early versions logged only the sum."""


def is_completion(said: Any) -> bool:
    """Whether a decoded line is such a row."""
    return type(said) is dict and "completion" in said and "output" not in said


def as_verl(row: JSON) -> JSON:
    """The row with verl's fields. `score` is the sum of the reward columns, as TRL adds them with its default weights:
    the weights are not logged.

    Raises:
        RecordError: the prompt or the completion is neither text nor a list of messages.
    """
    rewards = rewards_of(row)
    score = row[_TOTAL] if _TOTAL in row else sum(rewards.values()) if rewards else None
    used = {"prompt", "completion", "format_version", *rewards}
    kept = {name: value for name, value in row.items() if name not in used}
    prompt = row.get("prompt", "")
    begun = "" if isinstance(prompt, str) else "<|im_start|>assistant\n"
    return {**kept, "input": _text("prompt", prompt) + begun, "output": _completion(row["completion"]), "score": score}


def rewards_of(row: JSON) -> dict[str, float]:
    """The rewards by function. A function that does not apply to a row has none."""
    numbers = {name: value for name, value in row.items() if type(value) is float and finite(value) is not None}
    return {name: value for name, value in numbers.items() if name not in ("step", ADVANTAGE, _TOTAL)}


def _completion(said: Any) -> str:
    return _text("completion", said).removeprefix("<|im_start|>assistant\n")


def _text(name: str, said: Any) -> str:
    if isinstance(said, str):
        return said
    if not isinstance(said, list):
        raise RecordError(f"{name} is neither text nor a list of messages")
    return "".join(map(_message, cast("list[Any]", said)))


def _message(said: Any) -> str:
    if not isinstance(said, dict):
        raise RecordError(f"a message is not an object: {str(said)[:80]}")
    fields = cast("JSON", said)
    reasoning, calls = fields.get("reasoning_content"), cast("list[Any]", fields.get("tool_calls") or ())
    parts = [f"<think>\n{reasoning}\n</think>\n" if reasoning else "", _content(fields.get("content"))]
    parts += [f"\n<tool_call>\n{_call(call)}\n</tool_call>" for call in calls]
    return f"<|im_start|>{fields.get('role')}\n{''.join(parts).lstrip()}<|im_end|>\n"


def _content(said: Any) -> str:
    if not isinstance(said, list):
        return "" if said is None else str(said)
    parts = [cast("JSON", part) for part in cast("list[Any]", said) if isinstance(part, dict)]
    return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)


def _call(said: Any) -> str:
    call = cast("JSON", said) if isinstance(said, dict) else {}
    function: JSON = call.get("function") or call
    arguments: Any = function.get("arguments") or {}
    if isinstance(arguments, dict):  # a column of parquet has the arguments of all rows: those of others are null
        arguments = {name: value for name, value in cast("JSON", arguments).items() if value is not None}
    return encode({"name": function.get("name"), "arguments": arguments}).decode()
