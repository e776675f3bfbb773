"""Draws the page of a row, in a worker thread: a page may take a while."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from rich.segment import Segment

from toolyard.errors import ToolyardError
from toolyard.records.audit import Decode
from toolyard.records.trajectory import Trajectory
from toolyard.viewer.comparison import compare
from toolyard.viewer.conversation import conversation
from toolyard.viewer.library import Library
from toolyard.viewer.notes import Notes
from toolyard.viewer.protocol import Bubble, RequestTimeline, Row, StepTimeline
from toolyard.viewer.query import Condition, Query
from toolyard.viewer.timeline import request_timeline, step_timeline
from toolyard.viewer.tui.comparison import comparison_lines
from toolyard.viewer.tui.drawing import MATCH, TURN, Line, Pen
from toolyard.viewer.tui.palette import palette
from toolyard.viewer.tui.timeline import request_lines, step_lines
from toolyard.viewer.tui.trajectory import Looks, Material, Part, heading_lines, section, trajectory_lines
from toolyard.viewer.web.answers import decodes

_TIMED = 1_000
"""Only the slowest requests of a step are read for its timeline, and …"""
_LATE = 200
"""… those that began last."""
_RAW_CHARS = 20_000
_WHOLE_RAW_CHARS = 5_000_000


class View(Enum):
    TRAJECTORY = "trajectory"
    TIMELINE = "timeline"
    COMPARISON = "comparison"
    GROUPS = "groups"
    CALLS = "calls"
    CHANGES = "changes"
    WATERFALL = "waterfall"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What to draw, and how."""

    row: Row
    view: View
    other: Row | None
    """The row to compare with."""
    looks: Looks
    needles: tuple[str, ...]
    whole: bool
    width: int
    theme: str


@dataclass(frozen=True, slots=True)
class Page:
    lines: list[Line]
    matches: tuple[tuple[int, int], ...] = ()
    """For each match, in reading order: its id in the styles of the lines, and the line where it starts."""
    turns: tuple[int, ...] = ()
    """The lines where turns start."""


class Pages:
    """Draws pages of one library. Every method is safe to call from several threads."""

    def __init__(self, library: Library, decode: Decode | None, notes: Notes) -> None:
        self._library = library
        self._notes = notes
        self._decode = decode
        self._trajectory = lru_cache(maxsize=4)(self._read)
        self._bubbles = lru_cache(maxsize=4)(self._conversed)
        self._timeline = lru_cache(maxsize=4096)(self._timed)

    def draw(self, wanted: PageRequest) -> Page:
        """Draw a page. If the line cannot be drawn, the page says why."""
        try:
            return self._drawn(wanted)
        except ToolyardError as error:
            return Page(_excuse(wanted, str(error)))
        except Exception as error:  # an unforeseen line must not end the viewer: show it raw
            return self._raw_page(wanted, f"{type(error).__name__}: {error}")

    def trajectory(self, row: Row) -> Trajectory | None:
        return self._trajectory(row.number, self._library.generation)

    def step_timeline(self, step: int, query: Query | None = None) -> StepTimeline | None:
        """None if no matching request of the step has timings."""
        readable = narrowed(in_step(query or Query(), step), Condition("damaged", ":", False))
        rows = self._library.rows(readable.sorted_by("time", descending=True), limit=_TIMED)
        if len(rows) == _TIMED:  # the request that ended last may be a short one that began late
            rows += self._library.rows(readable.sorted_by("started", descending=True), limit=_LATE)
        generation = self._library.generation
        return step_timeline(step, [self._timeline(number, generation) for number in {row.number for row in rows}])

    def _drawn(self, wanted: PageRequest) -> Page:
        pen = Pen(palette(wanted.theme), needles=wanted.needles, whole=wanted.whole)
        row = wanted.row
        trajectory = self.trajectory(row)
        if trajectory is None:
            lines = self._damaged(pen, wanted)
        elif wanted.view is View.TIMELINE:
            lines = self._timelines(pen, wanted, trajectory)
        elif wanted.view is View.COMPARISON and wanted.other is not None:
            lines = self._comparison(pen, wanted, trajectory, wanted.other)
        else:
            lines = trajectory_lines(pen, self._material(wanted, trajectory), wanted.width, wanted.looks)
        turns = tuple(line for _, line in marked(lines, TURN)) if wanted.view is View.TRAJECTORY else ()
        return Page(lines, marked(lines, MATCH) if wanted.needles else (), turns)

    def _material(self, wanted: PageRequest, trajectory: Trajectory) -> Material:
        row, looks = wanted.row, wanted.looks
        bubbles = self._bubbles(row.number, self._library.generation) if looks.converses else ()
        raw = self._library.raw(row.number, _raw_chars(wanted)) if Part.LINE in looks.parts else ""
        decode = self._fitting(trajectory) if Part.TOKENS in looks.parts else None
        return Material(row, trajectory, bubbles, raw, decode, self._note(row))

    def _note(self, row: Row) -> str:
        try:
            return self._notes.of(row)
        except ToolyardError as error:
            return str(error)

    def _raw_page(self, wanted: PageRequest, why: str) -> Page:
        lines = _excuse(wanted, why)
        try:
            pen = Pen(palette(wanted.theme), needles=wanted.needles, whole=wanted.whole)
            raw = self._library.raw(wanted.row.number, _raw_chars(wanted))
            lines += [[], section(pen, "raw line", wanted.width), *pen.text(raw, wanted.width, words=False)]
        except ToolyardError as error:
            lines += _excuse(wanted, str(error))
        return Page(lines, marked(lines, MATCH))

    def _damaged(self, pen: Pen, wanted: PageRequest) -> list[Line]:
        row = wanted.row
        why = row.damaged or "This line was changed or removed after it was indexed."
        raw = self._library.raw(row.number, _raw_chars(wanted))
        return [
            *heading_lines(pen, row, wanted.width),
            [],
            [Segment(f"Line {row.line} of this file cannot be read", pen.palette.bad)],
            *pen.text(why, wanted.width),
            [],
            section(pen, "raw line", wanted.width),
            *pen.text(raw, wanted.width, words=False),
        ]

    def _timelines(self, pen: Pen, wanted: PageRequest, trajectory: Trajectory) -> list[Line]:
        row, width = wanted.row, wanted.width
        lines = [*heading_lines(pen, row, width), [], section(pen, "this request", width)]
        lines += [*request_lines(pen, request_timeline(trajectory, row.number), width), []]
        found = self.step_timeline(row.step)
        if found is not None:
            lines += [section(pen, f"step {row.step}", width), *step_lines(pen, found, row.number, width), []]
        return lines

    def _comparison(self, pen: Pen, wanted: PageRequest, left: Trajectory, other: Row) -> list[Line]:
        right = self.trajectory(other)
        if right is None:
            return [[Segment("The other line is damaged.", pen.palette.bad)]]
        decode = self._fitting(left) if self._fitting(right) else None
        return comparison_lines(pen, wanted.row, other, compare(left, right, decode), wanted.width)

    def _fitting(self, trajectory: Trajectory) -> Decode | None:
        """The decoder, if it matches this trajectory: another tokenizer would show nonsense."""
        return self._decode if self._decode is not None and decodes(self._decode, trajectory) else None

    def _read(self, number: int, generation: int) -> Trajectory | None:
        """`generation` is part of the cache key: in another generation the number means another line."""
        return self._library.trajectory(number)

    def _conversed(self, number: int, generation: int) -> tuple[Bubble, ...]:
        trajectory = self._trajectory(number, generation)
        return () if trajectory is None else conversation(trajectory)

    def _timed(self, number: int, generation: int) -> RequestTimeline:
        trajectory = self._library.trajectory(number)
        if trajectory is None:
            return RequestTimeline(number, "", (), 0.0, None, True)
        return request_timeline(trajectory, number)


def empty_page(query: Query, step: int | None, width: int, theme: str) -> Page:
    """The page for an empty list."""
    pen = Pen(palette(theme))
    if not query.alternatives:
        text = "No trajectories yet.\n\nThey appear here as they are written."
    elif step is None:
        text = "No matches.\n\nPress / to change the filter."
    else:
        text = f"No matches in step {step}.\n\nPress / to change the filter, P to go to all steps."
    return Page([[], *pen.text(text, width, pen.palette.muted)])


def marked(lines: list[Line], mark: str) -> tuple[tuple[int, int], ...]:
    """The ids of all matches or turns, and the line where each starts."""
    found: dict[int, int] = {}
    for at, line in enumerate(lines):
        for segment in line:
            if segment.style is not None and (name := segment.style.meta.get(mark)) is not None:
                found.setdefault(name, at)
    return tuple(found.items())


def narrowed(query: Query, *conditions: Condition) -> Query:
    """The same query, with further conditions."""
    return replace(query, alternatives=tuple((*one, *conditions) for one in query.alternatives or ((),)))


def in_step(query: Query, step: int | None) -> Query:
    """The same query, for one step only."""
    return query if step is None else narrowed(query, Condition("step", ":", float(step)))


def _raw_chars(wanted: PageRequest) -> int:
    return _WHOLE_RAW_CHARS if wanted.whole else _RAW_CHARS


def _excuse(wanted: PageRequest, why: str) -> list[Line]:
    colors = palette(wanted.theme)
    return [[Segment("This cannot be shown.", colors.bad)], *Pen(colors).text(why, wanted.width)]
