"""Recognizes lines that are certainly trajectories by the types of their fields.

Constructing the trajectory instead would take longer than everything else that the index does with a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from toolyard.messages import JSON

_Shape = tuple[tuple[str, Any, frozenset[type]], ...]
"""Fields: name, default if it is missing, and allowed types."""


def is_plain(said: Any) -> bool:
    """Whether all fields have the types that Toolyard or verl writes. If so, the line is a trajectory; if not, it may
    still be one."""
    if not _fits(said, _VERL):
        return False
    line = cast("JSON", said)
    score = line.get("score")
    if type(score) is int and abs(score) >= 1 << 63:
        return False
    if type(line.get("format_version")) is not int:
        return True
    return (
        _fits(line, _OURS)
        and _fits(line.get("tokens", {}), _TOKENS)
        and _fits(line.get("failure") or {}, _FAILURE)
        and _all_fit(messages := line.get("messages", []), _MESSAGE)
        and all(map(_is_message, messages))
        and _all_fit(turns := line.get("turns", []), _TURN)
        and all(map(_is_turn, turns))
    )


def _is_message(said: JSON) -> bool:
    calls: list[Any] = said.get("tool_calls", [])
    return bool(said["role"]) and all(
        _fits(call, _MESSAGE_CALL) and _fits(call["function"], _FUNCTION) for call in calls
    )


def _is_turn(said: JSON) -> bool:
    return _fits(said["sampled"], _SAMPLED) and _all_fit(said.get("tool_calls", []), _CALL)


def _all_fit(said: Iterable[Any], shape: _Shape) -> bool:
    return all(_fits(one, shape) for one in said)


def _fits(said: Any, shape: _Shape) -> bool:
    if type(said) is not dict:
        return False
    get = cast("JSON", said).get
    for name, default, types in shape:  # noqa: SIM110 - a generator takes half as long again
        if type(get(name, default)) not in types:
            return False
    return True


_DEFAULTS: dict[type, Any] = {str: "", int: 0, float: 0.0, bool: False, list: [], dict: {}}
_NONE = type(None)


def _needed(*names: str, types: tuple[type, ...]) -> _Shape:
    return tuple((name, None, frozenset(types)) for name in names)


def _optional(*names: str, types: tuple[type, ...]) -> _Shape:
    return tuple((name, _DEFAULTS[types[0]], frozenset(types)) for name in names)


_VERL = (
    *_needed("input", "output", types=(str,)),
    *_optional("request_id", types=(str,)),
    *_optional("step", types=(int,)),
    *_needed("score", types=(float, int, _NONE)),
)
_OURS = (
    *_needed("request_id", "state", types=(str,)),
    *_optional("batch_data_id", "finish_reason", "data_source", types=(str,)),
    *_optional("rollout_offset", types=(int,)),
    *_optional("token_exact", types=(bool,)),
    *_optional("tokens", "rewards", "reward_details", "metrics", "extra", types=(dict,)),
    *_optional("messages", "turns", types=(list,)),
    *_optional("failure", types=(dict, _NONE)),
    ("started_at", None, frozenset((float, _NONE))),
)
_TOKENS = (
    *_optional("prompt_ids", "response_ids", "response_mask", types=(list,)),
    *_optional("response_logprobs", types=(list, _NONE)),
)
_FAILURE = _optional("whose", "stage", "error", "source", "cause", types=(str,))
_MESSAGE = (*_needed("role", "content", types=(str,)), *_optional("tool_calls", types=(list,)))
_MESSAGE_CALL = _needed("function", types=(dict,))
_FUNCTION = _needed("name", "arguments", types=(str,))
_TURN = (
    *_needed("sampled", types=(dict,)),
    *_optional("tool_calls", types=(list,)),
    *_optional("timings", types=(dict,)),
)
_SAMPLED = (
    *_needed("start", "end", "prompt_crc", types=(int,)),
    *_optional("attempts", types=(int,)),
    *_optional("cached_tokens", types=(int, _NONE)),
    *_optional("text", "finish", types=(str,)),
    *_optional("weight_versions", types=(list,)),
    *_optional("queue_seconds", types=(float,)),
)
_CALL = (
    *_needed("id", "name", types=(str,)),
    *_optional("arguments", "outcome", "response", types=(str,)),
    *_optional("seconds", "started", "queue_seconds", types=(float,)),
    *_optional("reward", types=(float, _NONE)),
    *_optional("error", types=(str, _NONE)),
    *_optional("metrics", types=(dict,)),
    *_optional("attempts", types=(int,)),
    *_optional("truncated", types=(bool,)),
)
