"""A trajectory as a page: its score, the conversation, and the other parts that are switched on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from rich.segment import Segment
from rich.style import Style

from toolyard.records.audit import Decode
from toolyard.records.trajectory import Trajectory
from toolyard.viewer.protocol import Bubble, Origin, Row, TokenRun
from toolyard.viewer.reasons import reward_breakdown
from toolyard.viewer.timeline import request_timeline, stage_seconds
from toolyard.viewer.token_runs import token_runs
from toolyard.viewer.tui.conversation import Folds, conversation_lines
from toolyard.viewer.tui.drawing import Line, Pen, clipped, length, prefixed, spread
from toolyard.viewer.tui.lists import ending
from toolyard.viewer.tui.text import counted, format_seconds, one_line, visible
from toolyard.viewer.tui.timeline import stacked_bar, stage_legend

_LABEL = 8
_MOST_TOKENS = 20_000
"""If there are more, only ids are shown: decoding tokens one by one takes too long."""
_DRAWN_TOKENS = 4_000
_TRUTH_LINES = 12


class Part(Enum):
    """The parts of a trajectory that can be shown; the value is the label."""

    REWARDS = "score and rewards"
    TRUTH = "ground truth"
    TIMINGS = "where the time went"
    CONVERSATION = "conversation"
    METRICS = "metrics"
    TOKENS = "tokens by origin"
    INPUT = "raw input"
    OUTPUT = "raw output"
    EXTRA = "other fields"
    LINE = "raw line"


_ORIGINS = {Origin.PROMPT: "prompt", Origin.SAMPLED: "sampled", Origin.TOOL: "not sampled (masked)"}
_DEFAULT_PARTS = frozenset({Part.REWARDS, Part.TRUTH, Part.TIMINGS, Part.CONVERSATION})


@dataclass(frozen=True, slots=True)
class Looks:
    """How all trajectories are shown."""

    parts: frozenset[Part] = _DEFAULT_PARTS
    plain: bool = False
    """Show raw input and output instead of the conversation."""
    folds: Folds = field(default_factory=Folds)

    @property
    def converses(self) -> bool:
        return Part.CONVERSATION in self.parts and not self.plain


class Material(NamedTuple):
    """What a page is drawn from."""

    row: Row
    trajectory: Trajectory
    bubbles: Sequence[Bubble]
    raw: str
    """The raw line."""
    decode: Decode | None
    note: str


def trajectory_lines(pen: Pen, material: Material, width: int, looks: Looks) -> list[Line]:
    """Draw a trajectory. Material of parts that are not shown may be missing."""
    trajectory = material.trajectory
    lines = heading_lines(pen, material.row, width)
    lines += _facts(pen, trajectory, width, looks.parts)
    if material.note:
        lines += _labelled_lines(pen, "note", pen.text(material.note, width - _LABEL - 1, pen.palette.accent))
    lines.append([])
    if looks.converses:
        lines += conversation_lines(pen, material.bubbles, trajectory, width, looks.folds)
    texts = {Part.INPUT: trajectory.input, Part.OUTPUT: trajectory.output}
    for part, text in texts.items():
        if part in looks.parts or (looks.plain and Part.CONVERSATION in looks.parts):
            lines += [section(pen, part.name.lower(), width), *pen.text(text, width, words=False), []]
    if Part.METRICS in looks.parts:
        lines += _json(pen, "metrics", trajectory.metrics, width)
    if Part.EXTRA in looks.parts:
        lines += _json(pen, "other fields", trajectory.extra, width)
    if Part.TOKENS in looks.parts:
        lines += [section(pen, "tokens", width), *_tokens(pen, trajectory, width, material.decode), []]
    if Part.LINE in looks.parts:
        lines += [section(pen, "line", width), *pen.text(material.raw, width, words=False), []]
    return lines


def heading_lines(pen: Pen, row: Row, width: int) -> list[Line]:
    palette = pen.palette
    where = f"{one_line(row.file)}:{row.line}"
    name = one_line(row.request_id) or where
    sign, ink = ending(row, palette)
    ended = "damaged" if row.damaged else one_line(row.finish)
    if row.state == "FAILED":
        ended = f"failed: {ended}"
    badge = Segment(f"{sign} {ended}".strip(), ink)
    parts = [one_line(row.task), f"sample {row.sample}" if row.task else "", f"step {row.step}"]
    parts += [one_line(row.source) if row.source != "unknown" else "", where]
    about = " · ".join(part for part in parts if part)
    return [*spread([Segment(name, palette.strong)], [badge], width), *pen.text(about, width, palette.muted)]


def section(pen: Pen, title: str, width: int) -> Line:
    rule = "─" * max(0, width - len(title) - 4)
    return [
        Segment("── ", pen.palette.faint),
        Segment(title, pen.palette.strong),
        Segment(f" {rule}", pen.palette.faint),
    ]


# Facts ----------------------------------------------------------------------------------------------------------------


def _facts(pen: Pen, trajectory: Trajectory, width: int, parts: frozenset[Part]) -> list[Line]:
    palette = pen.palette
    lines: list[Line] = [[]]
    if trajectory.failure is not None:
        failure = trajectory.failure
        kind = "infrastructure" if failure.whose == "ours" else "task"
        what = f"{kind} failure while {one_line(failure.stage)}"
        said = pen.text(f"{what}\n{failure.error}", width - _LABEL - 1, palette.bad)
        lines += _labelled_lines(pen, "failed", said)
    if Part.REWARDS in parts:
        lines += _score(pen, trajectory, width)
    if Part.TRUTH in parts and trajectory.ground_truth is not None:
        lines += _labelled_lines(pen, "truth", _truth(pen, trajectory.ground_truth, width - _LABEL - 1))
    if Part.TIMINGS in parts:
        lines += _times(pen, trajectory, width)
    if not trajectory.token_exact and trajectory.tokens.response_ids:
        lines += _labelled(pen, "tokens", [Segment("not token-exact", palette.strong)], width)
    return lines


def _labelled(pen: Pen, label: str, content: Line, width: int) -> list[Line]:
    return _labelled_lines(pen, label, [clipped(content, width - _LABEL - 1)])


def _labelled_lines(pen: Pen, label: str, lines: list[Line]) -> list[Line]:
    first = Segment(f"{label:<{_LABEL}} ", pen.palette.muted)
    rest = Segment(" " * (_LABEL + 1))
    return [[first if at == 0 else rest, *line] for at, line in enumerate(lines)]


def _truth(pen: Pen, truth: Any, width: int) -> list[Line]:
    lines = pen.text(truth if isinstance(truth, str) else _as_json(truth), width)
    hidden = 0 if pen.whole else len(lines) - _TRUTH_LINES
    if hidden <= 1:
        return lines
    return [*lines[:_TRUTH_LINES], pen.note(f"… {counted(hidden, 'more line')}", width)]


def _score(pen: Pen, trajectory: Trajectory, width: int) -> list[Line]:
    palette, why = pen.palette, reward_breakdown(trajectory)
    room = width - _LABEL - 1
    label, score, formula = [*why.formula.split(" ", 2), ""][:3]
    bold, indent = palette.score(trajectory.score) + Style(bold=True), len(score) + 1
    first, *rest = pen.text(formula, room - indent) or [[]]
    lines: list[Line] = [[Segment(f"{score} ", bold), *first], *prefixed(rest, Segment(" " * indent))]
    for part in why.parts:
        if part.sentence:
            lines += pen.text(f"{part.name}: {part.sentence}", room, palette.muted)
    return _labelled_lines(pen, label, lines)


def _times(pen: Pen, trajectory: Trajectory, width: int) -> list[Line]:
    timeline = request_timeline(trajectory)
    if not timeline.segments:
        return []
    total = format_seconds(timeline.seconds)
    room = min(60, width - _LABEL - 2 - len(total) - 1)
    stages = stage_seconds(timeline)
    bar = stacked_bar(pen.palette, stages, timeline.seconds, max(4, room))
    return _labelled_lines(
        pen,
        "time",
        [
            [Segment(f"{total} ", pen.palette.text), *bar],
            *stage_legend(pen.palette, stages, width - _LABEL - 1),
        ],
    )


# Further parts --------------------------------------------------------------------------------------------------------


def _json(pen: Pen, title: str, value: Mapping[str, Any], width: int) -> list[Line]:
    body = pen.code(_as_json(dict(value)), "json", width) if value else [[Segment("none", pen.palette.faint)]]
    return [section(pen, title, width), *body, []]


def _as_json(value: Any) -> str:
    """As readable JSON."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "(nested too deeply)"


def _tokens(pen: Pen, trajectory: Trajectory, width: int, decode: Decode | None) -> list[Line]:
    tokens = trajectory.tokens
    count = len(tokens.prompt_ids) + len(tokens.response_ids)
    if not count:
        return [[Segment("none in this dump", pen.palette.faint)]]
    lines: list[Line] = []
    left = count if pen.whole else _DRAWN_TOKENS
    for run in token_runs(trajectory, decode if count <= _MOST_TOKENS else None):
        turn = "" if run.turn is None else f", turn {run.turn + 1}"
        title = f"{_ORIGINS[run.origin]}{turn} · {counted(len(run.ids), 'token')} from {run.start}"
        shown = min(len(run.ids), max(0, left))
        left -= shown
        lines.append([Segment(title, pen.palette.origins[run.origin] + Style(bold=True))])
        lines += prefixed(_run(pen, run, shown, width - 2), Segment("  "))
        if shown < len(run.ids):
            lines.append(pen.note(f"… {counted(len(run.ids) - shown, 'more token')}", width))
    return lines


def _run(pen: Pen, run: TokenRun, shown: int, width: int) -> list[Line]:
    """Tokens with alternating backgrounds; those of low probability are underlined."""
    palette = pen.palette
    lines: list[Line] = [[]]
    used = 0
    for at in range(shown):
        said = str(run.ids[at]) if run.texts is None else run.texts[at]
        text = visible(said).replace("\n", "⏎").replace("\t", "→")[: max(1, width // 2)] or "·"
        style = palette.origins[run.origin]
        if run.logprobs is not None and run.origin is Origin.SAMPLED:
            logprob = run.logprobs[at]
            style = palette.unlikely if logprob < -3 else style
        piece: Line = [Segment(text, style + (palette.cursor if at % 2 else palette.block))]
        if run.texts is None:
            piece.append(Segment(" "))
        size = length(piece)
        if used + size > width and lines[-1]:
            lines.append([])
            used = 0
        lines[-1] += piece
        used += size
        if run.texts is not None and said.endswith("\n"):
            lines.append([])
            used = 0
    return lines if lines[-1] else lines[:-1]
