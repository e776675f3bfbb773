"""Normalize what a tool returned: older tools return fewer values, or plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from toolyard.images import image_of
from toolyard.tools.base import ToolResponse
from toolyard.tools.policy import CallPolicy, Measure, truncate


def normalize(returned: Any) -> tuple[ToolResponse, float | None, dict[str, Any]]:
    """Complete what `execute` returned to response, reward and metrics.

    Raises:
        ValueError: the reward is not a finite number, or the response is invalid.
    """
    parts: list[Any] = [*returned] if isinstance(returned, tuple) else [returned]
    response, reward, metrics = [*parts, None, None, None][:3]
    # verl's own code interpreter returns its text again in place of the reward.
    reward = None if reward is None or isinstance(reward, str) else as_reward(reward)
    return as_response(response), reward, {**metrics} if isinstance(metrics, Mapping) else {}


def as_response(given: Any) -> ToolResponse:
    """Accept text, a response (also another framework's), a dictionary of its fields, or anything JSON can express."""
    if isinstance(given, ToolResponse):
        return given
    if isinstance(given, BaseModel):
        given = given.model_dump()
    fields: Any = given
    if isinstance(given, Mapping) and given and given.keys() <= {"text", "image", "video"}:
        return ToolResponse.model_validate(fields)
    if given is None or isinstance(given, str):
        return ToolResponse(text=given)
    try:
        return ToolResponse(text=json.dumps(fields, default=str, ensure_ascii=False))
    except (TypeError, ValueError):  # keys that are not strings, or a circular reference
        return ToolResponse(text=str(fields))


def as_reward(given: Any) -> float:
    """Convert a number, including numpy's and torch's, to float.

    Raises:
        ValueError: it is not a finite number and would spoil every average.
    """
    try:
        reward = float(given)
    except (TypeError, ValueError):
        reward = float("nan")
    if reward - reward != 0 or isinstance(given, str):  # also true of infinity
        raise ValueError(f"the reward {str(given)[:100]!r} is not a finite number")
    return reward


def created_id(returned: Any, request_id: str) -> str:
    """Return the id that `create` chose; older tools return only the id, or nothing."""
    parts: list[Any] = [*returned, None] if isinstance(returned, tuple) else [returned]
    return str(parts[0] or request_id)


def created_response(returned: Any) -> ToolResponse:
    parts: list[Any] = [*returned, None, None] if isinstance(returned, tuple) else [None, None]
    return as_response(parts[1])


def shorten(response: ToolResponse, policy: CallPolicy, measure: Measure | None) -> tuple[ToolResponse, bool]:
    """Cut `response` to what the policy allows; also return whether it was cut. `measure` counts tokens.

    Images become `{"mime_type": …, "data": base64}`; the text names those left out.
    """
    images, notes = _images(response.image or [], policy) if response.image else ([], [])
    text, cut, more = response.text or "", False, False
    if policy.max_response_chars is not None:
        text, cut = truncate(text, policy.max_response_chars, policy.keep)
    if policy.max_response_tokens is not None and measure is not None:
        text, more = truncate(text, policy.max_response_tokens, policy.keep, measure)
    cut = cut or more or bool(notes)
    if not cut and not images:
        return response, False
    text = "\n".join(filter(None, (text, *notes)))
    return response.model_copy(update={"text": text or None, "image": images or None}), cut


def _images(given: Sequence[Any], policy: CallPolicy) -> tuple[list[dict[str, str]], list[str]]:
    """Return the images to show, and a note for each one left out."""
    images: list[dict[str, str]] = []
    notes: list[str] = []
    for number, one in enumerate(given[: policy.max_images], 1):
        try:
            images.append(image_of(one, policy.max_image_bytes).as_json())
        except ValueError as error:
            notes.append(f"[image {number} omitted: {error}]")
    if len(given) > policy.max_images:
        left = len(given) - policy.max_images
        notes.append(f"[{left} more {'image is' if left == 1 else 'images are'} left out: at most {policy.max_images}]")
    return images, notes
