"""The lists of steps and samples, of any length: only visible lines are drawn, and samples are read in pages."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from toolyard.viewer.protocol import Row, StepSummary
from toolyard.viewer.query import SortKey
from toolyard.viewer.tui.drawing import Line, clipped, length
from toolyard.viewer.tui.palette import Palette, palette_of
from toolyard.viewer.tui.text import fitted, format_number, one_line

_FETCHED = 100
"""Rows per page."""
_KEPT = 20
"""Pages kept in memory."""

Fetch = Callable[[int, int], Sequence[Row]]
"""Called with an offset and a limit."""


class Choices(ScrollView, can_focus=True):
    """A list with one line per item, one of them selected."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "leaf(-1)", show=False),
        Binding("pagedown", "leaf(1)", show=False),
        Binding("home", "edge(False)", show=False),
        Binding("end", "edge(True)", show=False),
        Binding("enter", "enter", show=False),
    ]

    class Entered(Message):
        """The user pressed enter on the selected item."""

    def __init__(self, name: str, chosen: Callable[[], None]) -> None:
        """`chosen` is a callback, not a message: `update` could undo the choice before a message arrives."""
        super().__init__(id=name)
        self.count = 0
        self.cursor = 0
        self._chosen = chosen

    @abstractmethod
    def draw(self, at: int, width: int, colors: Palette) -> Line: ...

    def update(self, count: int, cursor: int) -> None:
        """The contents changed. The selected item keeps its place on the screen."""
        on_screen = self.cursor - round(self.scroll_y)
        self.count, self.cursor = count, max(0, min(cursor, count - 1))
        self._measure()
        height = max(1, self.size.height)
        self.scroll_to(0, self.cursor - max(0, min(on_screen, height - 1)), animate=False, force=True)
        self.refresh()

    def choose(self, at: int) -> None:
        at = max(0, min(at, self.count - 1))
        if at == self.cursor or not self.count:
            return
        self.cursor = at
        top, height = round(self.scroll_y), max(1, self.size.height)
        if at < top:
            self.scroll_to(0, at, animate=False)
        elif at >= top + height:
            self.scroll_to(0, at - height + 1, animate=False)
        self.refresh()
        self._chosen()

    def action_move(self, by: int) -> None:
        self.choose(self.cursor + by)

    def action_leaf(self, direction: int) -> None:
        self.choose(self.cursor + direction * max(1, self.size.height - 1))

    def action_edge(self, end: bool) -> None:
        self.choose(self.count - 1 if end else 0)

    def action_enter(self) -> None:
        self.post_message(self.Entered())

    def on_click(self, event: Click) -> None:
        at = round(self.scroll_y) + event.y
        if at < self.count:
            self.choose(at)

    def on_resize(self, event: Resize) -> None:
        self._measure()

    def _measure(self) -> None:
        self.virtual_size = Size(self.scrollable_content_region.width, self.count)

    def render_line(self, y: int) -> Strip:
        at = round(self.scroll_y) + y
        width = self.scrollable_content_region.width
        ground = self.rich_style
        if at >= self.count:
            return Strip.blank(width, ground)
        colors = palette_of(self)
        chosen = at == self.cursor
        mark = Segment("▌" if chosen else " ", colors.accent if self.has_focus else colors.muted)
        line = [mark, *clipped(self.draw(at, width - 1, colors), width - 1)]
        style = ground + (colors.cursor if chosen else Style())
        return Strip(line).apply_style(style).crop_extend(0, width, style)


# Steps ----------------------------------------------------------------------------------------------------------------


class StepList(Choices):
    """The first item is all steps together, then each step."""

    def __init__(self, chosen: Callable[[], None]) -> None:
        super().__init__("steps", chosen)
        self._steps: Sequence[StepSummary] = ()

    def step_at(self, at: int) -> int | None:
        """The step at index `at`; None: all steps."""
        return self._steps[at - 1].step if 0 < at <= len(self._steps) else None

    @property
    def steps(self) -> list[int]:
        return [one.step for one in self._steps]

    def place_of(self, step: int | None) -> int:
        """Where a step is in the list; 0, all steps, if it is not there."""
        return next((at for at, one in enumerate(self._steps, 1) if one.step == step), 0)

    def show(self, steps: Sequence[StepSummary], step: int | None) -> None:
        self._steps = steps
        self.update(len(steps) + 1, self.place_of(step))

    def draw(self, at: int, width: int, colors: Palette) -> Line:
        if at == 0:
            count = sum(one.count for one in self._steps)
            scored = sum(one.scored for one in self._steps)
            total = sum((one.mean_score or 0.0) * one.scored for one in self._steps)
            failed = sum(map(_failed, self._steps))
            return self._line("all steps", count, total / scored if scored else None, failed, width, colors)
        one = self._steps[at - 1]
        return self._line(f"step {one.step}", one.count, one.mean_score, _failed(one), width, colors)

    def _line(self, name: str, count: int, score: float | None, failed: int, width: int, colors: Palette) -> Line:
        right: Line = [Segment(f"{count:>7,}", colors.muted)]
        most = max(map(_failed, self._steps), default=0)
        if most:
            right = [Segment(f"{f'✗{failed:,}' if failed else '':>7}", colors.bad), *right]
        middle: Line = [Segment(f"{_short(score):>7}", colors.score(score))]
        meter = 12 if width > 44 else 0 if most else 6
        if meter and any(one.scored for one in self._steps):
            reached = 0 if score is None else round(max(0.0, min(1.0, score)) * meter)
            middle += [
                Segment(f" {'━' * reached}", colors.score(score)),
                Segment("─" * (meter - reached), colors.faint),
            ]
        room = width - length(right) - length(middle)
        return [Segment(fitted(name, room), colors.text), *middle, *right]


def _failed(step: StepSummary) -> int:
    """Requests and lines that say nothing about the model."""
    return step.failed + step.damaged


# Samples --------------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    field: str
    """The field's name in queries; empty if rows cannot be sorted by it."""
    title: str
    width: int


_COLUMNS = (
    Column("score", "score", 6),
    Column("turns", "turns", 6),
    Column("tools", "tools", 6),
    Column("length", "tokens", 8),
    Column("time", "time", 8),
)
_FIRST = ("score", "time", "turns", "length", "tools")
"""Columns by priority, if there is no room for all."""
_PREVIEW = 18
"""Minimum width of the question."""


def columns(width: int, sort: SortKey | None) -> list[Column]:
    """The columns that fit, including the one that rows are sorted by."""
    wanted = sorted(_COLUMNS, key=lambda one: (sort is None or one.field != sort.field, _FIRST.index(one.field)))
    room = width - 3 - _PREVIEW
    kept: set[str] = set()
    for column in wanted:
        if column.width <= room:
            kept.add(column.field)
            room -= column.width
    return [column for column in _COLUMNS if column.field in kept]


class SampleList(Choices):
    def __init__(self, fetch: Fetch, chosen: Callable[[], None], noted: Callable[[Sequence[Row]], set[int]]) -> None:
        """`noted` returns the numbers of the rows that have a note."""
        super().__init__("samples", chosen)
        self._find_noted = noted
        self._noted: set[int] = set()
        self.sort: SortKey | None = None
        self._fetch = fetch
        self._fetched_pages: OrderedDict[int, Sequence[Row]] = OrderedDict()

    def update(self, count: int, cursor: int) -> None:
        self._fetched_pages.clear()
        self._noted.clear()
        super().update(count, cursor)

    def row(self, at: int) -> Row | None:
        if not 0 <= at < self.count:
            return None
        page, place = divmod(at, _FETCHED)
        if page not in self._fetched_pages:
            self._fetched_pages[page] = self._fetch(page * _FETCHED, _FETCHED)
            self._noted |= self._find_noted(self._fetched_pages[page])
            if len(self._fetched_pages) > _KEPT:
                self._fetched_pages.popitem(last=False)
        rows = self._fetched_pages[page]
        return rows[place] if place < len(rows) else None

    def forget(self) -> None:
        """Notes were changed: read the rows again when they are drawn."""
        self._fetched_pages.clear()
        self._noted.clear()
        self.refresh()

    def draw(self, at: int, width: int, colors: Palette) -> Line:
        row = self.row(at)
        if row is None:
            return []
        if row.damaged:
            problem = f"{one_line(row.file)}:{row.line} {one_line(row.damaged)}"
            return [Segment("✗  ", colors.bad), Segment(f"damaged {problem}", colors.bad)]
        line: Line = []
        for column in columns(width, self.sort):
            told = _told(row, column.field)
            told = told if len(told) < column.width else "…"
            line.append(Segment(f"{told:>{column.width - 1}} ", _ink(row, column.field, colors)))
        sign, ink = ending(row, colors)
        line += [Segment(sign, ink), Segment("× " if row.failed_tools else "  ", colors.text)]
        note = [Segment("✎ ", colors.accent)] if row.number in self._noted else []
        if row.state == "FAILED":
            return [*line, *note, Segment(one_line(row.failure or row.finish), colors.bad)]
        return [*line, *note, Segment(one_line(row.preview), colors.text)]


def ending(row: Row, colors: Palette) -> tuple[str, Style]:
    """How a request ended: a sign and its style."""
    if row.state == "FAILED" or row.damaged:
        return "✗", colors.bad
    if row.finish == "stop":
        return " ", colors.good
    return (" ", colors.muted) if row.finish in ("unknown", "interaction_ended") else ("!", colors.fair)


def _told(row: Row, field: str) -> str:
    if field == "score":
        return _short(row.score)
    if field == "time":
        return "–" if row.seconds is None else f"{row.seconds:.1f}s"
    value = {"turns": row.turns, "tools": row.tools, "length": row.response_tokens}[field]
    return "–" if value is None else f"{value:,}"


def _short(score: float | None) -> str:
    told = format_number(score)
    return told if score is None or len(told) < 6 else f"{score:.2g}"


def _ink(row: Row, field: str, colors: Palette) -> Style:
    return colors.score(row.score) if field == "score" else colors.muted


class Titles(Widget):
    """The titles of the samples' columns; a click sorts by one."""

    ALLOW_SELECT = False

    class Sorted(Message):
        def __init__(self, field: str) -> None:
            super().__init__()
            self.field = field

    def __init__(self) -> None:
        super().__init__(id="titles")
        self.sort: SortKey | None = None

    def show(self, sort: SortKey | None) -> None:
        self.sort = sort
        self.refresh()

    def render_line(self, y: int) -> Strip:
        colors = palette_of(self)
        line: Line = [Segment(" ")]
        # As wide as the list below, which reserves a column for its scrollbar.
        width = self.size.width - 1
        for column in columns(width - 1, self.sort):
            chosen = self.sort is not None and self.sort.field == column.field
            arrow = ("▾" if self.sort and self.sort.descending else "▴") if chosen else ""
            style = (colors.accent if chosen else colors.faint) + Style.from_meta({"sort": column.field})
            line.append(Segment(f"{column.title + arrow:>{column.width - 1}} ", style))
        line.append(Segment("   question", colors.faint))
        ground = self.rich_style
        return Strip(clipped(line, width)).apply_style(ground).crop_extend(0, self.size.width, ground)

    def on_click(self, event: Click) -> None:
        if isinstance(field := event.style.meta.get("sort"), str):
            self.post_message(self.Sorted(field))
