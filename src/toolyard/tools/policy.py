"""How calls of a tool are made: time limit, concurrency, retries, and how much of an answer the model sees."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from toolyard.images import MAX_IMAGE_BYTES

Measure = Callable[[str], int]
"""Measures a text in characters or tokens."""

_VERL_NAMES = {"left": "tail", "right": "head", "middle": "both"}
"""verl (since 0.8) names the side that is cut."""


class Keep(StrEnum):
    """Which part of a text that is too long is kept."""

    HEAD = "head"
    TAIL = "tail"
    BOTH = "both"


class Recovery(StrEnum):
    """How a trajectory whose machine was lost gets its tool back, on another machine."""

    REPLAY = "replay"
    """Calls leave nothing behind in the instance: the results of finished calls are taken from the journal."""
    RERUN = "rerun"
    """Calls build up state: finished calls run again in a new instance. If one answers differently, start over."""
    RESTART = "restart"
    """The state cannot be built up again: the trajectory starts over with a new instance."""


def _from_verl_name(value: Any) -> Any:
    return _VERL_NAMES.get(value, value) if isinstance(value, str) else value


KeepOrVerlName = Annotated[Keep, BeforeValidator(_from_verl_name)]
"""For settings: also accepts left, right and middle."""


class CallPolicy(BaseModel):
    """The key `call` of a tool's config in YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_seconds: PositiveFloat | None = 300.0
    """Time limit of one call, including retries but not the wait for a slot. Then the tool is cancelled and the model
    gets an error message."""
    concurrency: PositiveInt | None = None
    """Maximum concurrent calls of this tool in this process, shared fairly between trajectories. None: no limit."""
    retries: int = Field(2, ge=0)
    """Retries of transient failures of ours: a worker died, the service was busy. A program's failure is never
    retried."""
    retry_pause_seconds: float = Field(0.1, ge=0)
    """Pause before the first retry; it doubles with each retry."""
    max_response_chars: PositiveInt | None = 32768
    max_response_tokens: PositiveInt | None = None
    """Counted with the tokenizer of the trajectory's model."""
    keep: KeepOrVerlName = Keep.BOTH
    max_images: NonNegativeInt = 8
    """Maximum images per answer. The text says how many were omitted."""
    max_image_bytes: PositiveInt = MAX_IMAGE_BYTES
    """Maximum size of each image. The text names larger, broken and invalid ones."""
    recovery: Recovery = Recovery.RESTART
    """On a cluster: what to do about finished calls if the machine is lost."""
    repeatable: bool = False
    """On a cluster: whether a call may run again if its machine was lost while it ran, so that nobody knows whether it
    took effect. If not, the trajectory ends as failed."""
    finish_seconds: PositiveFloat = 60.0
    """Time limit for each of `create`, `calc_reward` and `release`."""
    grace_seconds: PositiveFloat = 5.0
    """How long a cancelled tool may take to end. Then it is abandoned, reported by name and counted."""


def truncate(text: str, limit: int, keep: Keep = Keep.BOTH, measure: Measure = len) -> tuple[str, bool]:
    """Cut `text` to at most `limit`; also return whether it was cut. The cut is marked unless the mark does not fit."""
    if measure(text) <= limit:
        return text, False
    for mark in (True, False):
        kept = _most_that_fits(text, limit, keep, measure, mark=mark)
        if kept is not None:
            return _cut(text, kept, keep, mark=mark), True
    return "", True


def _most_that_fits(text: str, limit: int, keep: Keep, measure: Measure, *, mark: bool) -> int | None:
    """Return how many characters can be kept; None if not even 0 fit."""
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
