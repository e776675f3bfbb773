"""The types that both viewers show. They do not depend on a user interface, and their fields are JSON values.

library = Library.open(folder, progress=…)      library: the index of the dump, rows, filters, search
rows = library.rows(parse_query('score<0.5 tools>2 sort:-time'), offset=0, limit=50)
trajectory = library.trajectory(rows[0].number)
conversation(trajectory)                        conversation: what was said, as bubbles
token_runs(trajectory, decode)                  token_runs: where each token came from
request_timeline(trajectory)                    timeline: where the time went
library.steps(query), step_timeline(…)          library, timeline: a step at a glance
compare(left, right)                            comparison: aligned by turn and by token
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class LineFacts:
    """What lists show of one line of a dump."""

    step: int
    request_id: str
    task: str
    """`batch_data_id`; empty in verl's lines."""
    sample: int
    score: float | None
    finish: str
    state: str
    source: str
    turns: int
    tools: int
    """Number of tool calls."""
    failed_tools: int
    """Calls whose outcome or verdict is not ok."""
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int
    chars: int
    """Length of input and output."""
    seconds: float
    """Total time of the request; 0 if the line does not say."""
    preview: str
    """The start of the user's last message before the first sampled one, on one line."""
    damaged: str
    """Why this line cannot be read; all other facts except `step` are then empty."""


@dataclass(frozen=True, slots=True)
class Row(LineFacts):
    """One line of a dump: what it says, and where it is."""

    number: int
    """Its id in the index; stable as long as the file only grows."""
    file: str
    """Relative to the folder."""
    line: int
    """In the file, from 1."""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """All trajectories of one step."""

    step: int
    count: int
    scored: int
    mean_score: float | None
    min_score: float | None
    max_score: float | None
    mean_turns: float
    mean_tools: float
    mean_response_tokens: float
    mean_seconds: float
    finishes: dict[str, int]
    verdicts: dict[str, int]
    """Tool calls by outcome, or by the sandbox's verdict if the outcome is ok."""
    damaged: int


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    OTHER = "other"
    """The speaker is unknown, in lines that Toolyard did not write."""


@dataclass(frozen=True, slots=True)
class CallView:
    """A tool call with its result."""

    name: str
    arguments: str
    """Readable text: indented JSON, without the argument in `code`."""
    code: str | None
    """The argument that is a program."""
    language: str | None
    """The language of `code`."""
    outcome: str
    """ok, or how the call failed."""
    verdict: str | None
    """The sandbox's verdict."""
    response: str
    error: str | None
    reward: float | None
    seconds: float
    wait_seconds: float
    """The part of `seconds` spent waiting for a permit or a worker."""
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    images: tuple[Picture, ...] = ()
    """Images of the result, as shown to the model."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image in a conversation."""

    label: str
    """Type, size in pixels, and size in bytes."""
    url: str
    """`data:image/png;base64,…`; only types that cannot contain scripts."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bubble."""

    kind: str
    """text, reasoning (shown folded), or code."""
    text: str
    language: str | None = None


@dataclass(frozen=True, slots=True)
class Bubble:
    """One message."""

    role: Role
    name: str | None
    pieces: tuple[Piece, ...]
    calls: tuple[CallView, ...] = ()
    """Calls of an assistant's message, with their results; the tool messages are not repeated."""
    turn: int | None = None
    """The turn of a sampled message, from 0."""
    raw: str | None = None
    """The text of a sampled message as it was sampled, including call syntax."""
    timings: dict[str, float] = field(default_factory=dict[str, float])
    images: tuple[Picture, ...] = ()


class Origin(StrEnum):
    PROMPT = "prompt"
    SAMPLED = "sampled"
    TOOL = "tool"
    """Not sampled: tool results, the template's own tokens, or a simulated user's message."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens with the same origin."""

    origin: Origin
    turn: int | None
    start: int
    """Index in `prompt_ids + response_ids`."""
    ids: list[int]
    texts: list[str] | None
    """None without a tokenizer."""
    logprobs: list[float] | None
    """None unless the tokens were sampled."""


class Stage(StrEnum):
    QUEUE = "queue"
    """Before the request started to generate."""
    ENGINE = "engine"
    LIMITER = "limiter"
    """Waiting for a permit or a sandbox worker."""
    TOOL = "tool"
    INTERACTION = "interaction"
    REWARD = "reward"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a request's time, in seconds from the start of the timeline."""

    stage: Stage
    start: float
    end: float
    turn: int | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    number: int | None
    request_id: str
    segments: tuple[Segment, ...]
    seconds: float
    estimated: bool
    """The line has durations but no start times: stages are drawn one after the other."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Where the time of a step went."""

    step: int
    requests: int
    seconds: float
    """Time of the slowest request: the step's critical path."""
    by_stage: dict[str, float]
    """Sums over all requests."""
    critical: RequestTimeline
    critical_by_stage: dict[str, float]
    verdict: str
    """One sentence: which request the step waited for, and in which stage."""
    slowest: tuple[RequestTimeline, ...]


@dataclass(frozen=True, slots=True)
class DiffLine:
    """Two lines side by side."""

    kind: str
    """same, changed, left (only on the left), or right."""
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class TurnDiff:
    turn: int
    same: bool
    lines: tuple[DiffLine, ...]
    """Sampled text, calls and their results, in the order they happened."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two trajectories differ."""

    token: int | None
    """Index in `prompt_ids + response_ids`; None if one of them has no tokens."""
    turn: int | None
    """None: in the prompt."""
    origin: str
    """Origin of the token on the left, or on the right if the left one has ended."""
    left: str
    right: str
    """A short excerpt of each side from there."""
    explanation: str
    """One sentence: a different token was sampled, a tool result differs, the prompts differ, …"""


@dataclass(frozen=True, slots=True)
class Comparison:
    same: bool
    divergence: Divergence | None
    prompt: tuple[DiffLine, ...]
    turns: tuple[TurnDiff, ...]
    facts: tuple[tuple[str, str, str], ...]
    """Name, left and right value: score, finish, turns, tokens, rewards, seconds; equal ones as well."""
