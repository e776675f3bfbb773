"""A table as a page: a head, rows to choose from, and details of the chosen one. Only visible rows are drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from toolyard.viewer.query import Query
from toolyard.viewer.tui.drawing import Line, Pen, clipped
from toolyard.viewer.tui.lists import Choices
from toolyard.viewer.tui.palette import Palette, palette_of
from toolyard.viewer.tui.text import counted, fitted

_DETAILS = 3
"""Lines for the details of the chosen row."""
_MOST_HEAD = 8

Cell = tuple[str, Style]


class Goal(NamedTuple):
    """What Enter opens."""

    query: Query | None = None
    """The filter to set."""
    number: int | None = None
    """The row to open."""
    turn: int | None = None
    """The turn to scroll to, from 0."""


class Column(NamedTuple):
    title: str
    width: int
    """0: all that is left."""
    right: bool = True


def row_line(columns: Sequence[Column], cells: Mapping[str, Cell], width: int) -> Line:
    """The cells in their columns, with a space between them. Missing ones are empty."""
    left = width - sum(column.width + 1 for column in columns if column.width)
    line: Line = []
    for column in columns:
        room = column.width or max(0, left)
        text, style = cells.get(column.title, ("", Style.null()))
        shown = fitted(text, room)
        if column.right and len(text) < room:
            shown = shown.rstrip().rjust(room)
        line += [Segment(shown, style), Segment(" ")]
    return line[:-1]


def title_line(columns: Sequence[Column], width: int, colors: Palette) -> Line:
    return row_line(columns, {column.title: (column.title, colors.muted) for column in columns}, width)


class Table(ABC):
    """The contents of a page. Rows are drawn when they are visible."""

    count: int = 0
    kinds: Sequence[tuple[str, int]] = ()
    """The kinds of rows to choose from, and their numbers."""
    orders: Sequence[str] = ()

    @abstractmethod
    def head(self, width: int, pen: Pen) -> list[Line]: ...

    @abstractmethod
    def line(self, at: int, width: int, colors: Palette) -> Line: ...

    @abstractmethod
    def details(self, at: int) -> str: ...

    @abstractmethod
    def goal(self, at: int) -> Goal | None: ...

    @abstractmethod
    def key(self, at: int) -> Hashable:
        """Identifies the row, also when the dump has grown."""


class Note(Table):
    """A page without rows: why there is nothing to show."""

    def __init__(self, text: str) -> None:
        self._text = text

    def head(self, width: int, pen: Pen) -> list[Line]:
        return pen.text(self._text, width, pen.palette.muted)

    def line(self, at: int, width: int, colors: Palette) -> Line:
        raise IndexError(at)

    def details(self, at: int) -> str:
        return ""

    def goal(self, at: int) -> Goal | None:
        return None

    def key(self, at: int) -> Hashable:
        return at


class _Lines(Widget):
    """A few drawn lines, with a margin."""

    ALLOW_SELECT = False

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self._lines: Sequence[Line] = ()

    @property
    def room(self) -> int:
        return max(20, self.size.width - 2)

    def show(self, lines: Sequence[Line], height: int) -> None:
        self._lines = lines
        self.styles.height = height
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width, ground = self.size.width, self.rich_style
        if y >= len(self._lines):
            return Strip.blank(width, ground)
        line = [Segment(" "), *clipped(self._lines[y], width - 2)]
        return Strip(line).apply_style(ground).crop_extend(0, width, ground)


class TableRows(Choices):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,n", "move(1)", show=False),
        Binding("k,p", "move(-1)", show=False),
        Binding("g", "edge(False)", show=False),
        Binding("G", "edge(True)", show=False),
        Binding("space,ctrl+d", "leaf(1)", show=False),
        Binding("ctrl+u", "leaf(-1)", show=False),
        Binding("enter", "enter", "open", key_display="⏎"),
        Binding("o", "app.order", "sort"),
        Binding("f", "app.kind", "kind"),
        Binding("N", "app.next_step(1)", show=False),
        Binding("P", "app.next_step(-1)", show=False),
        Binding("greater_than_sign", "app.next_base(1)", show=False),
        Binding("less_than_sign", "app.next_base(-1)", show=False),
        *(Binding(key, "app.bell", show=False) for key in ("r", "t", "d", "y", "x", "a", "z")),
    ]

    class Opened(Message):
        def __init__(self, goal: Goal) -> None:
            super().__init__()
            self.goal = goal

    def __init__(self, chosen: Callable[[], None]) -> None:
        super().__init__("rows", chosen)
        self.table: Table = Note("")

    def draw(self, at: int, width: int, colors: Palette) -> Line:
        return self.table.line(at, width, colors) if at < self.table.count else []

    def action_enter(self) -> None:
        goal = self.table.goal(self.cursor) if self.cursor < self.table.count else None
        if goal is not None:
            self.post_message(self.Opened(goal))


class TableView(Vertical):
    """Shows one table. Hidden unless it is in use."""

    def __init__(self) -> None:
        super().__init__(id="table")
        self._head = _Lines("head")
        self._details = _Lines("details")
        self.rows = TableRows(self._draw_details)

    def compose(self) -> ComposeResult:
        yield self._head
        yield self.rows
        yield self._details

    @property
    def text(self) -> str:
        """The whole page as text."""
        table, colors, width = self.rows.table, palette_of(self), self._head.room
        lines = [*table.head(width, Pen(colors)), *(table.line(at, width, colors) for at in range(table.count))]
        return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)

    def show(self, table: Table, *, keep: bool) -> None:
        """`keep`: stay on the chosen row if it is still there."""
        rows = self.rows
        cursor = 0
        if keep and rows.cursor < rows.table.count:
            was = rows.table.key(rows.cursor)
            cursor = next((at for at in range(table.count) if table.key(at) == was), rows.cursor)
        rows.table = table
        self._draw_head()
        rows.update(table.count, cursor)
        self._draw_details()

    def _draw_head(self) -> None:
        lines = self.rows.table.head(self._head.room, Pen(palette_of(self)))[:_MOST_HEAD]
        self._head.show(lines, len(lines))

    def _draw_details(self) -> None:
        table, at, pen = self.rows.table, self.rows.cursor, Pen(palette_of(self))
        lines = pen.text(table.details(at), self._details.room, pen.palette.muted) if at < table.count else []
        hidden = len(lines) - _DETAILS
        if hidden > 0:
            lines[_DETAILS - 1 :] = [[Segment(f"… {counted(hidden + 1, 'more line')}", pen.palette.muted)]]
        self._details.show(lines, _DETAILS)

    def on_resize(self, event: Resize) -> None:
        self._draw_head()
        self._draw_details()
