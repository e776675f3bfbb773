"""What opens over the viewer: menus, the choice of fields, help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Label, OptionList, SelectionList, Static
from textual.widgets.option_list import Option
from textual.widgets.selection_list import Selection

from toolyard.viewer.tui.palette import palette_of
from toolyard.viewer.tui.text import one_line
from toolyard.viewer.tui.trajectory import Part


class Menu(ModalScreen[int | None]):
    """One of several things: its place is returned, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss(None)", show=False),
        Binding("j", "move('down')", show=False),
        Binding("k", "move('up')", show=False),
    ]

    def __init__(self, title: str, choices: Sequence[str], chosen: int = 0) -> None:
        super().__init__()
        self._title = title
        self._choices = choices
        self._chosen = chosen

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(Text(one_line(self._title)), classes="dialog-title")
            # Text, not str: what stands there may look like markup.
            yield OptionList(*(Option(Text(one_line(choice))) for choice in self._choices), markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = self._chosen

    def action_move(self, direction: str) -> None:
        options = self.query_one(OptionList)
        if direction == "down":
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_index)


class Fields(ModalScreen[frozenset[Part] | None]):
    """Which parts of a trajectory are shown."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f,q", "close", show=False),
        Binding("j", "move('down')", show=False),
        Binding("k", "move('up')", show=False),
    ]

    def __init__(self, shown: frozenset[Part]) -> None:
        super().__init__()
        self._parts = SelectionList[Part](*(Selection(part.value, part, part in shown) for part in Part))

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label("Fields to show  (space turns one on or off, esc closes)", classes="dialog-title")
            yield self._parts

    def on_mount(self) -> None:
        self._parts.focus()

    def action_move(self, direction: str) -> None:
        if direction == "down":
            self._parts.action_cursor_down()
        else:
            self._parts.action_cursor_up()

    def action_close(self) -> None:
        self.dismiss(frozenset(self._parts.selected))


KEYS = (
    (
        "Moving",
        (
            ("n  p", "next, previous sample"),
            ("N  P", "next, previous step; before the first: all steps"),
            ("j  k", "scroll the trajectory; space, ctrl+d, ctrl+u by pages"),
            ("g  G", "its top, its bottom"),
            ("tab", "from pane to pane; there, the arrows move"),
            ("i", "jump to a request id, or the beginning of one"),
            ("z", "hide the lists, show them again"),
        ),
    ),
    (
        "Finding",
        (
            ("/", 'filter: score<0.5 tools>2 finish:length text:"220000" sort:-time; nothing: all'),
            ("o", "sort; a click on a column's title does it, too"),
            ("s", "search in everything that was said"),
            ("]  [", "next, previous match; after the last one, in the next trajectory"),
            ("esc", "leave: a menu, the input, a view, the search"),
        ),
    ),
    (
        "Reading",
        (
            ("r", "plain (input and output as they stand) or rendered"),
            ("x", "unfold reasoning and the prompt, fold them; a click does it for one"),
            ("a", "all of texts that were cut"),
            ("f", "which fields are shown"),
            ("t", "where the time went: of the request, of its step"),
            ("d", "compare with another sample of the task, or the same request in another run"),
            ("y", "copy the id, the text, or a program"),
            ("T", "light or dark"),
            ("q", "quit"),
        ),
    ),
)
_SIGNS = (
    ("!", "did not end by itself: length, turns, …"),
    ("×", "a call of a tool went wrong"),
    ("✗", "the request failed, or the line is damaged"),
)
_FIELDS = (
    "Numbers (score<0.5, time>10, length:100..200, score:none): score tools turns length prompt chars time step line "
    "sample. Texts (finish:length, file=0.jsonl): finish state source task id verdict file. damaged:yes. Words, or "
    'text:"two words": what was said. -finish:stop is its opposite; a or b; sort:score, sort:-time.'
)


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss(None)", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog wide"):
            for title, keys in KEYS:
                yield Label(title, classes="dialog-title")
                yield Static(self._table(keys))
            yield Label("Signs in the list", classes="dialog-title")
            yield Static(self._table(_SIGNS))
            yield Label("Filters", classes="dialog-title")
            yield Static(Text(_FIELDS))

    def _table(self, rows: Sequence[tuple[str, str]]) -> Table:
        colours = palette_of(self)
        table = Table.grid(padding=(0, 2))
        table.add_column(width=6)
        table.add_column()
        for key, meaning in rows:
            table.add_row(Text(key, colours.accent), Text(meaning, colours.text))
        return table

    def action_scroll(self, by: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=by * 2, animate=False)
