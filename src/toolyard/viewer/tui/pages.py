"""What the reader sees of a row, drawn away from the screen: a page may take a while."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from rich.segment import Segment

from toolyard.errors import ToolyardError
from toolyard.records.trajectory import Trajectory
from toolyard.viewer.comparison import compare
from toolyard.viewer.conversation import conversation
from toolyard.viewer.library import Library
from toolyard.viewer.protocol import Bubble, RequestTimeline, Row
from toolyard.viewer.query import Condition, Query
from toolyard.viewer.timeline import request_timeline, step_timeline
from toolyard.viewer.token_runs import Decode
from toolyard.viewer.tui.comparison import comparison_lines
from toolyard.viewer.tui.drawing import MATCH, Line, Pen
from toolyard.viewer.tui.palette import palette
from toolyard.viewer.tui.timeline import request_lines, step_lines
from toolyard.viewer.tui.trajectory import Looks, Material, Part, heading_lines, section, trajectory_lines
from toolyard.viewer.web.answers import decodes

_TIMED = 1_000
"""Requests of a step whose lines are read for its timeline: the slowest ones, which are what it is about."""
_RAW_CHARS = 20_000
_WHOLE_RAW_CHARS = 5_000_000


class View(Enum):
    TRAJECTORY = "trajectory"
    TIMELINE = "timeline"
    COMPARISON = "comparison"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be drawn, and how."""

    row: Row
    view: View
    other: Row | None
    """What it is compared with."""
    looks: Looks
    needles: tuple[str, ...]
    whole: bool
    width: int
    theme: str


@dataclass(frozen=True, slots=True)
class Page:
    lines: list[Line]
    matches: tuple[tuple[int, int], ...] = ()
    """Of each match, in the order of reading: its name in the lines' styles, and the line where it begins."""


class Pages:
    """Draws pages of one library. Every method is safe to call from several threads."""

    def __init__(self, library: Library, decode: Decode | None) -> None:
        self._library = library
        self._decode = decode
        self._trajectory = lru_cache(maxsize=4)(self._read)
        self._bubbles = lru_cache(maxsize=4)(self._conversed)
        self._timeline = lru_cache(maxsize=4096)(self._timed)

    def draw(self, wish: Wish) -> Page:
        """Whatever the line holds, there is a page: one that cannot be drawn says why."""
        try:
            return self._drawn(wish)
        except ToolyardError as error:
            return Page(_excuse(wish, str(error)))
        except Exception as error:  # a line that nobody thought of must not end the viewer, but be seen
            return self._as_it_stands(wish, f"{type(error).__name__}: {error}")

    def trajectory(self, row: Row) -> Trajectory | None:
        return self._trajectory(row.number, self._library.generation)

    def _drawn(self, wish: Wish) -> Page:
        pen = Pen(palette(wish.theme), needles=wish.needles, whole=wish.whole)
        row = wish.row
        trajectory = self.trajectory(row)
        if trajectory is None:
            lines = self._damaged(pen, wish)
        elif wish.view is View.TIMELINE:
            lines = self._timelines(pen, wish, trajectory)
        elif wish.view is View.COMPARISON and wish.other is not None:
            lines = self._comparison(pen, wish, trajectory, wish.other)
        else:
            lines = trajectory_lines(pen, self._material(wish, trajectory), wish.width, wish.looks)
        return Page(lines, matches_in(lines) if wish.needles else ())

    def _material(self, wish: Wish, trajectory: Trajectory) -> Material:
        row, looks = wish.row, wish.looks
        bubbles = self._bubbles(row.number, self._library.generation) if looks.converses else ()
        raw = self._library.raw(row.number, _raw_chars(wish)) if Part.LINE in looks.parts else ""
        decode = self._fitting(trajectory) if Part.TOKENS in looks.parts else None
        return Material(row, trajectory, bubbles, raw, decode)

    def _as_it_stands(self, wish: Wish, why: str) -> Page:
        lines = _excuse(wish, why)
        try:
            pen = Pen(palette(wish.theme), needles=wish.needles, whole=wish.whole)
            raw = self._library.raw(wish.row.number, _raw_chars(wish))
            lines += [[], section(pen, "as it stands", wish.width), *pen.text(raw, wish.width, words=False)]
        except ToolyardError as error:
            lines += _excuse(wish, str(error))
        return Page(lines, matches_in(lines))

    def _damaged(self, pen: Pen, wish: Wish) -> list[Line]:
        row = wish.row
        why = row.damaged or "This line was changed or removed since it was taken in."
        raw = self._library.raw(row.number, _raw_chars(wish))
        return [
            *heading_lines(pen, row, wish.width),
            [],
            [Segment(f"Line {row.line} of this file cannot be read", pen.palette.bad)],
            *pen.text(why, wish.width),
            [],
            section(pen, "as it stands", wish.width),
            *pen.text(raw, wish.width, words=False),
        ]

    def _timelines(self, pen: Pen, wish: Wish, trajectory: Trajectory) -> list[Line]:
        row, width = wish.row, wish.width
        lines = [*heading_lines(pen, row, width), [], section(pen, "this request", width)]
        lines += [*request_lines(pen, request_timeline(trajectory, row.number), width), []]
        slowest = self._library.rows(_slowest_of(row.step), limit=_TIMED)
        generation = self._library.generation
        found = step_timeline(row.step, (self._timeline(one.number, generation) for one in slowest))
        if found is not None:
            lines += [section(pen, f"step {row.step}", width), *step_lines(pen, found, row.number, width), []]
        return lines

    def _comparison(self, pen: Pen, wish: Wish, left: Trajectory, other: Row) -> list[Line]:
        right = self.trajectory(other)
        if right is None:
            return [[Segment("The other line is damaged.", pen.palette.bad)]]
        decode = self._fitting(left) if self._fitting(right) else None
        return comparison_lines(pen, wish.row, other, compare(left, right, decode), wish.width)

    def _fitting(self, trajectory: Trajectory) -> Decode | None:
        """Only if it is what this trajectory was made with: another tokenizer would show nonsense."""
        return self._decode if self._decode is not None and decodes(self._decode, trajectory) else None

    def _read(self, number: int, generation: int) -> Trajectory | None:
        """`generation`: with another one, the number names another line."""
        return self._library.trajectory(number)

    def _conversed(self, number: int, generation: int) -> tuple[Bubble, ...]:
        trajectory = self._trajectory(number, generation)
        return () if trajectory is None else conversation(trajectory)

    def _timed(self, number: int, generation: int) -> RequestTimeline:
        trajectory = self._library.trajectory(number)
        if trajectory is None:
            return RequestTimeline(number, "", (), 0.0, True)
        return request_timeline(trajectory, number)


def empty_page(query: Query, step: int | None, width: int, theme: str) -> Page:
    """For a list in which there is nothing."""
    pen = Pen(palette(theme))
    if not query.alternatives:
        said = "Nothing here yet.\n\nThe dump is followed: trajectories appear as they are written."
    elif step is None:
        said = "No trajectory is what is asked for.\n\n/ changes the filter."
    else:
        said = f"No trajectory of step {step} is what is asked for.\n\n/ changes the filter, P goes to all steps."
    return Page([[], *pen.text(said, width, pen.palette.muted)])


def matches_in(lines: list[Line]) -> tuple[tuple[int, int], ...]:
    """Which there are, and on which line each begins."""
    found: dict[int, int] = {}
    for at, line in enumerate(lines):
        for segment in line:
            if segment.style is not None and (name := segment.style.meta.get(MATCH)) is not None:
                found.setdefault(name, at)
    return tuple(found.items())


def in_step(query: Query, step: int | None) -> Query:
    """The same query, for one step only."""
    if step is None:
        return query
    only = Condition("step", ":", float(step))
    return Query(tuple((*conditions, only) for conditions in query.alternatives or ((),)), query.sort)


def _slowest_of(step: int) -> Query:
    return in_step(Query(((Condition("damaged", ":", False),),)), step).sorted_by("time", descending=True)


def _raw_chars(wish: Wish) -> int:
    return _WHOLE_RAW_CHARS if wish.whole else _RAW_CHARS


def _excuse(wish: Wish, why: str) -> list[Line]:
    colours = palette(wish.theme)
    return [[Segment("This cannot be shown.", colours.bad)], *Pen(colours).text(why, wish.width)]
