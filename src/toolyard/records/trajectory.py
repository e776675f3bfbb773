"""A trajectory: the immutable record of one request, and its line in a dump.

The line begins with verl's fields (`input`, `output`, `gts`, `score`, `step`), so that its viewer opens our dumps; what
follows is ours. Readers take lines that have only verl's fields as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolyard.messages import JSON, Message

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """All of a conversation: `prompt_ids`, then `response_ids`. The lists of the response have one length."""

    prompt_ids: list[int] = field(default_factory=list[int])
    response_ids: list[int] = field(default_factory=list[int])
    response_mask: list[int] = field(default_factory=list[int])
    """1 where the model sampled the token, 0 where we put it."""
    response_logprobs: list[float] | None = None
    """0.0 where the mask is 0; None if the engine gave none."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the model said in a turn: `response_ids[start:end]`."""

    start: int
    end: int
    text: str
    finish: str
    """Of the engine: stop, length, abort."""
    prompt_crc: int
    """Of the ids that the engine was given: `ids_crc(prompt_ids + response_ids[:start])`."""
    weight_versions: tuple[str, ...] = ()
    """More than one if the weights changed while it was sampled."""
    cached_tokens: int | None = None
    attempts: int = 1
    """Times the engine was asked: more than one after its failures, or aborts that were not ours."""
    stopped_by: int | str | None = ""
    """If `finish` is stop: the stop token, which is the last, or the stop text; empty where nobody knows."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call of a tool, as it ended; also of one that could not be read (`outcome` is then "malformed")."""

    id: str
    name: str
    arguments: str
    outcome: str
    response: str
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 0.0
    attempts: int = 0
    truncated: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled message and what it caused."""

    sampled: Sampled
    tool_calls: tuple[CallRecord, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by stage: generating, tool_calling, interacting; `started` counts from the request's begin."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no reward."""

    whose: str
    """task or ours: see `toolyard.errors`."""
    stage: str
    error: str
    """With the traceback, if there is one."""
    source: str = ""
    """What failed: the URL of a server, a tool, a reward."""
    cause: str = ""
    """The last cause, in a line."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One request, ended."""

    request_id: str
    batch_data_id: str
    """Of its task."""
    rollout_offset: int
    """Which of the task's samples it is."""
    state: str
    """COMPLETED or FAILED."""
    finish_reason: str
    input: str
    """The prompt, decoded."""
    output: str
    """Everything after it, decoded."""
    ground_truth: Any
    score: float | None
    """None where it could not be computed: never 0 for a failure of ours."""
    step: int
    messages: tuple[Message, ...]
    tokens: Tokens
    turns: tuple[Turn, ...]
    rewards: Mapping[str, float | None]
    """Everything that `score` was made of, by name."""
    metrics: Mapping[str, Any]
    data_source: str = "unknown"
    token_exact: bool = True
    """Whether `tokens` is what was sampled and seen, to the token."""
    failure: Failure | None = None
    extra: JSON = field(default_factory=dict[str, Any])
    """Fields of a line that are not ours, as they were."""
