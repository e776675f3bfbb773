"""The types that both viewers show. They do not depend on a user interface, and their fields are JSON values.

library = Library.open(folder, progress=…)      library: the index of the dump, rows, filters, search
rows = library.rows(parse_query('score<0.5 tools>2 sort:-time'), offset=0, limit=50)
trajectory = library.trajectory(rows[0].number)
conversation(trajectory)                        conversation: what was said, as bubbles
token_runs(trajectory, decode)                  token_runs: where each token came from
request_timeline(trajectory)                    timeline: where the time went
library.steps(query), step_timeline(…)          library, timeline: a step at a glance
library.groups(query), library.calls(query)     groups, calls: by task, by tool
library.changes(before, after)                  groups: which tasks were solved, which broken
compare(left, right)                            comparison: aligned by turn and by token
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class LineFacts:
    """What lists show of one line of a dump. None: the line does not say."""

    step: int
    request_id: str
    task: str
    """`batch_data_id`; empty in verl's lines."""
    group_id: int
    """Equal for the samples of one task: a hash of its name or, if lines have none, of the prompt."""
    sample: int
    score: float | None
    finish: str
    state: str
    failure: str
    """Why it failed; empty if it did not."""
    source: str
    truth: str
    """The start of the ground truth, on one line."""
    turns: int | None
    tools: int | None
    """Number of tool calls."""
    failed_tools: int | None
    """Calls whose outcome or verdict is not ok."""
    prompt_tokens: int | None
    response_tokens: int | None
    sampled_tokens: int | None
    chars: int
    """Length of input and output."""
    started_at: float | None
    """When it began, in seconds since 1970."""
    seconds: float | None
    """Total time of the request."""
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
    failed: int
    """Requests that ended for a reason unrelated to the model."""
    scored: int
    mean_score: float | None
    min_score: float | None
    max_score: float | None
    mean_turns: float | None
    mean_tools: float | None
    mean_response_tokens: float | None
    mean_seconds: float | None
    finishes: dict[str, int]
    verdicts: dict[str, int]
    """Tool calls by outcome, or by the sandbox's verdict if the outcome is ok."""
    damaged: int


class GroupKind(StrEnum):
    """What a group of samples teaches: only mixed ones have advantages other than 0."""

    ALL_0 = "all 0"
    ALL_1 = "all 1"
    EQUAL = "all equal"
    MIXED = "mixed"
    UNSCORED = "unscored"


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one task in one step of one run."""

    step: int
    run: str
    """The folder of its files, relative to the dump; empty if that is the dump itself."""
    group_id: int
    task: str
    kind: GroupKind
    numbers: tuple[int, ...]
    """Its rows, by sample."""
    scores: tuple[float | None, ...]
    mean: float | None
    std: float | None
    """The sample standard deviation (divided by n - 1), as in GRPO. None if fewer than two are scored."""
    advantages: tuple[float | None, ...]
    """(score - mean) / std; 0 if all scores are equal."""
    failed: int


class Attempt(NamedTuple):
    """A trajectory that is not damaged, as far as evaluations are concerned."""

    number: int
    """Its id in the index."""
    file: str
    run: str
    step: int
    group_id: int
    task: str
    """Empty if the line does not name one: then `group_id` and `preview` are those of the prompt."""
    preview: str
    request_id: str
    source: str
    finish: str
    score: float | None
    """None: unknown, never 0."""

    @property
    def task_key(self) -> tuple[str, int, str]:
        """The same for all attempts at a task: its id; or a digest of the prompt, and its beginning, if the line does
        not name a task."""
        return (self.task, 0, "") if self.task else ("", self.group_id, self.preview)


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One task before and after: in two steps, or in any two selections."""

    group_id: int
    task: str
    kind: str
    """solved (no sample had a full score before), broken (none has one now), better, worse, same, new or gone."""
    before: float | None
    after: float | None
    """Mean scores."""
    count_before: int
    count_after: int
    number: int
    """One of its rows, of those after if there are any."""

    @property
    def change(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The calls of one tool. Times are None if the dump does not have them."""

    tool: str
    calls: int
    failed: int
    verdicts: dict[str, int]
    p50: float | None
    """Seconds, including the wait."""
    p95: float | None
    longest: float | None
    wait_p50: float | None
    """Seconds of waiting for a permit or a worker."""
    wait_p95: float | None


@dataclass(frozen=True, slots=True)
class CallErrors:
    """Failed calls of one tool whose error ends with the same line."""

    tool: str
    error: str
    calls: int
    number: int
    """A row with such a call."""
    turn: int
    """The turn of that call, from 0."""
    verdict: str
    """The verdict of that call. Equal to `error` if the calls say nothing else."""


@dataclass(frozen=True, slots=True)
class SlowCall:
    number: int
    """The number of its row."""
    turn: int
    """From 0."""
    tool: str
    verdict: str
    seconds: float
    wait: float | None


@dataclass(frozen=True, slots=True)
class CallReport:
    tools: tuple[ToolCalls, ...]
    """The most called first."""
    errors: tuple[CallErrors, ...]
    """The most frequent first."""
    slowest: tuple[SlowCall, ...]


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
    started_at: float | None
    """In seconds since 1970; None if the line does not say."""
    estimated: bool
    """The line has durations but no start times: stages are drawn one after the other."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Where the time of a step went."""

    step: int
    requests: int
    started_at: float | None
    """When its first request began; None if not all of them say when they did."""
    seconds: float
    """From the beginning of the first to the end of the last request or, without start times, of the slowest one."""
    by_stage: dict[str, float]
    """Sums over all requests."""
    critical: RequestTimeline
    """The request that the step waited for: it ended last."""
    critical_by_stage: dict[str, float]
    verdict: str
    """One sentence: which request the step waited for, and in which stage."""
    slowest: tuple[RequestTimeline, ...]
    waterfall: tuple[RequestTimeline, ...]
    """The requests that ended last, in the order in which they began. Empty without start times."""


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
