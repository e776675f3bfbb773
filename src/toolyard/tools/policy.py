"""How calls of a tool are made: time, number at once, repetition, and how much of an answer the model gets."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from toolyard.images import MOST_BYTES

Measure = Callable[[str], int]
"""The length of a text: its characters, or its tokens."""

_OLD_WORDS = {"left": "tail", "right": "head", "middle": "both"}
"""verl names the side that is cut (since 0.8)."""


class Keep(StrEnum):
    """What is left of a text that is too long."""

    HEAD = "head"
    TAIL = "tail"
    BOTH = "both"


def _in_new_words(value: Any) -> Any:
    return _OLD_WORDS.get(value, value) if isinstance(value, str) else value


KeepOrOldWord = Annotated[Keep, BeforeValidator(_in_new_words)]
"""For settings: also accepts left, right and middle."""


class CallPolicy(BaseModel):
    """The key `call` of a tool's config in YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_seconds: PositiveFloat | None = 300.0
    """Of one call, retries included, once it is its turn. The tool is cancelled then, and the model is told."""
    concurrency: PositiveInt | None = None
    """Calls of this tool at once in this process, of all trajectories; fair between them. None: no limit."""
    retries: int = Field(2, ge=0)
    """For failures of ours that may pass: a worker died, the service was busy. What a program did is never retried."""
    retry_pause_seconds: float = Field(0.1, ge=0)
    """Before the first retry; twice as long before each next one."""
    max_response_chars: PositiveInt | None = 32768
    max_response_tokens: PositiveInt | None = None
    """Counted by whoever runs the trajectory, with its model's tokenizer."""
    keep: KeepOrOldWord = Keep.BOTH
    max_images: NonNegativeInt = 8
    """Of one answer. The model is told how many more there were."""
    max_image_bytes: PositiveInt = MOST_BYTES
    """Of each. The model is told of larger ones, and of those that are broken or no images at all."""
    finish_seconds: PositiveFloat = 60.0
    """For `create`, `calc_reward` and `release`, each."""
    grace_seconds: PositiveFloat = 5.0
    """How long cancelled code of the tool may take to end. Then it is abandoned, named and counted."""


def truncate(text: str, limit: int, keep: Keep = Keep.BOTH, measure: Measure = len) -> tuple[str, bool]:
    """`text` cut to at most `limit`, and whether it was cut. The cut is marked, unless the mark alone is too long."""
    if measure(text) <= limit:
        return text, False
    for mark in (True, False):
        kept = _most_that_fits(text, limit, keep, measure, mark=mark)
        if kept is not None:
            return _cut(text, kept, keep, mark=mark), True
    return "", True


def _most_that_fits(text: str, limit: int, keep: Keep, measure: Measure, *, mark: bool) -> int | None:
    """How many characters can be kept; None if not even none can."""
    fewest, most = -1, len(text) - 1
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if measure(_cut(text, middle, keep, mark=mark)) <= limit:
            fewest = middle
        else:
            most = middle - 1
    return None if fewest < 0 else fewest


def _cut(text: str, kept: int, keep: Keep, *, mark: bool) -> str:
    head = {Keep.HEAD: kept, Keep.TAIL: 0, Keep.BOTH: (kept + 1) // 2}[keep]
    parts = [text[:head], f"[… {len(text) - kept} characters cut …]" if mark else "", text[len(text) - (kept - head) :]]
    return ("\n" if mark else "").join(part for part in parts if part)
