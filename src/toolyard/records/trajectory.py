"""A trajectory: the immutable record of one request, and its line in a dump.

The line begins with verl's fields (`input`, `output`, `gts`, `score`, `step`), so that verl's viewer opens our dumps;
Toolyard's own fields follow. Readers also accept lines that have only verl's fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolyard.messages import JSON, Message

FORMAT_VERSION = 1
BRANCH = "-branch-"
"""In the request id of a branch that is not the main one of its session: after the session's id, before a number."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The whole conversation: `prompt_ids`, then `response_ids`. The lists of the response have the same length."""

    prompt_ids: list[int] = field(default_factory=list[int])
    response_ids: list[int] = field(default_factory=list[int])
    response_mask: list[int] = field(default_factory=list[int])
    """1 if the model sampled the token, 0 if it was given to the model."""
    response_logprobs: list[float] | None = None
    """0.0 where the mask is 0; None if the engine returned no logprobs."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of a turn: `response_ids[start:end]`."""

    start: int
    end: int
    text: str
    finish: str
    """The engine's finish: stop, length or abort."""
    prompt_crc: int
    """CRC of the engine's prompt: `ids_crc(prompt_ids + response_ids[:start])`."""
    weight_versions: tuple[str, ...] = ()
    """More than one if the weights changed during sampling."""
    cached_tokens: int | None = None
    attempts: int = 1
    """Number of calls to the engine: more than one after failures, or aborts that Toolyard did not request."""
    stopped_by: int | str | None = ""
    """If `finish` is stop: the stop token, which is the last token, or the stop text; empty if unknown."""
    queue_seconds: float = 0.0
    """Wait for the engine, as far as it is known: failed attempts, pauses, and the embedded engine's own queue."""
    version_starts: tuple[int, ...] = ()
    """Where each of several `weight_versions` begins, counted from `start`; the first is 0."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A tool call and its outcome; calls that could not be parsed have the outcome "malformed"."""

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
    started: float = 0.0
    """Offset from the start of the turn's tool calls."""
    queue_seconds: float = 0.0
    """Wait for one of the tool's slots (`call.concurrency`), as part of `seconds`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled message and what it caused."""

    sampled: Sampled
    tool_calls: tuple[CallRecord, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by stage: generating, tool_calling, interacting; `started` is the offset from the request's start."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no reward."""

    whose: str
    """task or ours: see `toolyard.errors`."""
    stage: str
    error: str
    """The error message, with a traceback if there is one."""
    source: str = ""
    """What failed: the URL of a server, a tool, a reward."""
    cause: str = ""
    """The last cause, in one line."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one request that has ended."""

    request_id: str
    batch_data_id: str
    """The id of its task."""
    rollout_offset: int
    """The index of this sample among the task's samples."""
    state: str
    """COMPLETED or FAILED."""
    finish_reason: str
    input: str
    """The prompt, decoded."""
    output: str
    """Everything after the prompt, decoded."""
    ground_truth: Any
    score: float | None
    """None if it could not be computed: an infrastructure failure is never scored as 0."""
    step: int
    messages: tuple[Message, ...]
    tokens: Tokens
    turns: tuple[Turn, ...]
    rewards: Mapping[str, float | None]
    """The parts of `score`, by name."""
    metrics: Mapping[str, Any]
    data_source: str = "unknown"
    token_exact: bool = True
    """Whether `tokens` are exactly the tokens that the model sampled and saw."""
    failure: Failure | None = None
    reward_details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`{name: {weight, reason, extracted, expected}}`: the weight of each of `rewards` in the score, and its scorer's
    explanation, as far as they are known. Empty in lines that do not say."""
    started_at: float | None = None
    """When the request began, in Unix seconds; None if the line does not say."""
    branches: tuple[Trajectory, ...] = ()
    """Other branches of the same session, if an agent played it: each is a line of its own in a dump, before this one.
    Empty in what is read from a dump."""
    extra: JSON = field(default_factory=dict[str, Any])
    """Unknown fields of the line, unchanged."""


def session_of(trajectory: Trajectory) -> str:
    """The session whose branch it is; empty if it is not one."""
    branch: JSON = trajectory.metrics.get("branch") or {}
    return str(branch.get("session", ""))
