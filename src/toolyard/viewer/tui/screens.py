"""Dialogs of the viewer: menus, the choice of fields, help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Label, OptionList, SelectionList, Static
from textual.widgets._footer import FooterKey
from textual.widgets.option_list import Option
from textual.widgets.selection_list import Selection

from toolyard.viewer.tui.palette import palette_of
from toolyard.viewer.tui.text import one_line
from toolyard.viewer.tui.trajectory import Part


class Menu(ModalScreen[int | None]):
    """A choice. Returns the index of the chosen item, or None."""

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
            # Text, not str: it may look like markup.
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
    """The choice of which parts of a trajectory to show."""

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
            yield Label("Fields to show  (space to toggle, esc to close)", classes="dialog-title")
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
            ("N  P", "next, previous step; before the first one: all steps"),
            ("j  k", "scroll the trajectory; space, ctrl+d, ctrl+u scroll by a page"),
            ("g  G", "top, bottom of the trajectory"),
            ("}  {", "next, previous turn"),
            ("u", "outline: the turns of the trajectory, to choose one"),
            ("tab", "next pane; the arrow keys move in it"),
            ("i", "go to a request id, or the start of one"),
            ("z", "hide or show the lists"),
        ),
    ),
    (
        "Pages",
        (
            ("1", "the trajectory; also esc"),
            ("2", "groups: a row per task, with its scores, mean and std; all 0, all 1, all equal or mixed"),
            ("3", "calls: by tool, failed calls by error, and the slowest calls"),
            ("4", "changes: tasks solved, broken, better or worse between two steps"),
            ("5", "waterfall: the requests of a step by wall clock, and what the step waited for"),
            ("enter", "open the row of a page: sets the filter or opens the trajectory; esc goes back"),
            ("o  f", "sort the rows of a page, or show only one kind"),
            ("N  P", "next, previous step; in changes, the later one"),
            (">  <", "in changes: next, previous step for the earlier one"),
        ),
    ),
    (
        "Finding",
        (
            ("/", 'filter: score<0.5 tools>2 finish:length text:"220000" sort:-time; tab completes; empty: all'),
            ("e", "only failed requests, or all again"),
            ("o", "sort; or click a column title"),
            ("v", "saved views: show one, save the filter, remove one"),
            ("s", "search all messages"),
            ("]  [", "next, previous match; continues in the next trajectory"),
            ("esc", "close a menu, the input, a view, or the search"),
        ),
    ),
    (
        "Reading",
        (
            ("r", "raw input and output, or the conversation"),
            ("x", "unfold or fold reasoning and the prompt; or click one of them"),
            ("a", "show all of text that was cut"),
            ("f", "choose the fields to show"),
            ("t", "where the time went, for the request and its step"),
            ("d", "compare with another sample of the task, or the same request in another run"),
            ("y", "copy the id, the text, or a program"),
            ("m", "write a note on this trajectory"),
            ("T", "light or dark"),
            ("q", "quit"),
        ),
    ),
)
_SIGNS = (
    ("✗", "failed: an infrastructure failure, or the line is damaged"),
    ("!", "truncated: stopped by a limit (length, turns, …)"),
    ("×", "a tool call failed"),
    ("✎", "has a note"),
    ("–", "unknown: the dump does not say"),
)
_FIELDS = (
    "Numbers (score<0.5, time>10, length:100..200, score:none): score tools failed_calls turns length prompt chars "
    "time started step line sample group reward.NAME call_time. Text (finish:length contains, file=0.jsonl equals): "
    "finish state source task truth id file tool verdict. failed:yes, damaged:yes. Other words, or "
    'text:"two words", are searched for in all messages. -finish:stop negates; a or b; sort:score, sort:-time.'
)


class KeyLine(Footer):
    """The keys that fit into the last line; the others are in the help."""

    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)

    def compose(self) -> ComposeResult:
        left = self.screen.size.width
        for key in super().compose():
            left -= len(key.key_display) + len(key.description) + 2 if isinstance(key, FooterKey) else left
            if left >= -1:
                yield key

    def on_resize(self) -> None:
        self.call_after_refresh(self.recompose)


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
            yield Label("Symbols in the list", classes="dialog-title")
            yield Static(self._table(_SIGNS))
            yield Label("Filters", classes="dialog-title")
            yield Static(Text(_FIELDS))

    def _table(self, rows: Sequence[tuple[str, str]]) -> Table:
        colors = palette_of(self)
        table = Table.grid(padding=(0, 2))
        table.add_column(width=6)
        table.add_column()
        for key, meaning in rows:
            table.add_row(Text(key, colors.accent), Text(meaning, colors.text))
        return table

    def action_scroll(self, by: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=by * 2, animate=False)
