"""The nouns that both viewers show. Nothing here knows of a terminal or a browser, and all of it is JSON's terms.

library = Library.open(folder, progress=…)      library: the index beside the dump, rows, filters, search
rows = library.rows(parse_query('score<0.5 tools>2 sort:-time'), offset=0, limit=50)
trajectory = library.trajectory(rows[0].number)
conversation(trajectory)                        conversation: what was said, as bubbles
token_runs(trajectory, decode)                  token_runs: where each token came from
request_timeline(trajectory)                    timeline: where the time went
step_summaries(…), step_timeline(…)             statistics, timeline
compare(left, right)                            differences: aligned by turn and by token
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a dump, as lists show it."""

    number: int
    """Its name within the index: lasts as long as the file only grows."""
    file: str
    """Relative to the folder."""
    line: int
    """In the file, from 1."""
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
    """Calls."""
    failed_tools: int
    """Calls whose outcome or verdict is not ok."""
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int
    chars: int
    """Of input and output."""
    seconds: float
    """The request's whole time; 0 where the line does not say."""
    preview: str
    """The beginning of the last thing the user said before the model began, on one line."""
    damaged: str = ""
    """Why this line cannot be read. Everything else is then empty but `file` and `line`."""


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
    """Of tool calls: outcome, or the sandbox's verdict where the outcome is ok."""
    damaged: int


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    OTHER = "other"
    """Of a text whose speaker nobody knows, in lines that are not ours."""


@dataclass(frozen=True, slots=True)
class CallView:
    """A tool call beside its result."""

    name: str
    arguments: str
    """As readable text: JSON, indented, without what `code` shows."""
    code: str | None
    """The argument that is a program."""
    language: str | None
    """Of `code`."""
    outcome: str
    """ok, or how the call failed."""
    verdict: str | None
    """Of the sandbox."""
    response: str
    error: str | None
    reward: float | None
    seconds: float
    wait_seconds: float
    """Of `seconds`, how long it waited for a permit or a worker."""
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    images: tuple[Picture, ...] = ()
    """Of the result, as the model was shown them."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image in a conversation."""

    label: str
    """Its type, size in pixels and in bytes."""
    url: str
    """`data:image/png;base64,…`: only of types that hold no programs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a bubble."""

    kind: str
    """text, reasoning (shown folded), code."""
    text: str
    language: str | None = None


@dataclass(frozen=True, slots=True)
class Bubble:
    """One message."""

    role: Role
    name: str | None
    pieces: tuple[Piece, ...]
    calls: tuple[CallView, ...] = ()
    """Of an assistant's message: each with its result, so tool messages that answer them are not repeated."""
    turn: int | None = None
    """Of a sampled message, from 0."""
    raw: str | None = None
    """Of a sampled message: the text as it was sampled, call syntax and all."""
    timings: dict[str, float] = field(default_factory=dict[str, float])
    images: tuple[Picture, ...] = ()


class Origin(StrEnum):
    PROMPT = "prompt"
    SAMPLED = "sampled"
    TOOL = "tool"
    """Put there by us after the prompt: tool results, the template's own tokens, a simulated user."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens in a row that came from the same place."""

    origin: Origin
    turn: int | None
    start: int
    """In `prompt_ids + response_ids`."""
    ids: list[int]
    texts: list[str] | None
    """None without a tokenizer."""
    logprobs: list[float] | None
    """Of sampled tokens."""


class Stage(StrEnum):
    QUEUE = "queue"
    """Before the request began to generate."""
    ENGINE = "engine"
    LIMITER = "limiter"
    """Waiting for a permit or a worker of the sandbox."""
    TOOL = "tool"
    INTERACTION = "interaction"
    REWARD = "reward"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a request's time, in seconds from the begin of the timeline."""

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
    """The line does not say when things began, only how long they took: they are drawn one after the other."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Where the time of a step went."""

    step: int
    requests: int
    seconds: float
    """Of the request that took longest: the step's critical path."""
    by_stage: dict[str, float]
    """Sums over all requests."""
    critical: RequestTimeline
    critical_by_stage: dict[str, float]
    verdict: str
    """In one sentence: which stage of which request the step waited for."""
    slowest: tuple[RequestTimeline, ...]


@dataclass(frozen=True, slots=True)
class DiffLine:
    """Two texts beside each other."""

    kind: str
    """same, changed, left (only there), right."""
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
    """In `prompt_ids + response_ids`; None where one of them has no tokens."""
    turn: int | None
    """None: within the prompt."""
    origin: str
    """Whose token it is on the left, or the right if the left ended there."""
    left: str
    right: str
    """What each says there, a few characters of it."""
    explanation: str
    """In one sentence: sampled differently with the same prompt, another tool result, another prompt, …"""


@dataclass(frozen=True, slots=True)
class Comparison:
    same: bool
    divergence: Divergence | None
    prompt: tuple[DiffLine, ...]
    turns: tuple[TurnDiff, ...]
    facts: tuple[tuple[str, str, str], ...]
    """Name, left, right: score, finish, turns, tokens, rewards, seconds; equal ones too."""
