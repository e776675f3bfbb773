"""The terminal viewer: steps and samples on the left, the trajectory on the right. `?` lists the keys."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType

from toolyard.viewer.protocol import Row
from toolyard.viewer.query import SortKey
from toolyard.viewer.tui.browser import ScrollTarget
from toolyard.viewer.tui.conversation import Folds, turn_label
from toolyard.viewer.tui.copying import MOST_CHARS, Copy, copies
from toolyard.viewer.tui.notes import NoteKeys
from toolyard.viewer.tui.overviews import Overviews
from toolyard.viewer.tui.pages import View
from toolyard.viewer.tui.palette import CSS, DARK, LIGHT
from toolyard.viewer.tui.prompt import Asked
from toolyard.viewer.tui.screens import Fields, Help, Menu
from toolyard.viewer.tui.text import counted

_ORDERS = (
    ("file order", None),
    *(
        (f"{name}, {end} first", SortKey(field, descending))
        for field, name, low, high in (
            ("score", "score", "lowest", "highest"),
            ("length", "length", "shortest", "longest"),
            ("turns", "turns", "fewest", "most"),
            ("time", "time", "fastest", "slowest"),
            ("tools", "tool calls", "fewest", "most"),
            ("step", "step", "earliest", "latest"),
        )
        for end, descending in ((low, False), (high, True))
    ),
)


class Viewer(NoteKeys, Overviews):
    """Follows `library` while the viewer runs. The caller closes it."""

    TITLE = "toolyard view"
    CSS = CSS
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help", key_display="?"),
        # With priority, so that what is typed next goes into the field they open.
        Binding("slash", "ask('FILTER')", "filter", key_display="/", priority=True),
        Binding("1", "trajectory", show=False),
        Binding("2", "view('GROUPS')", "groups"),
        Binding("3", "view('CALLS')", "calls"),
        Binding("4", "view('CHANGES')", "changes"),
        Binding("5", "view('WATERFALL')", "waterfall"),
        Binding("e", "failed", "failed"),
        Binding("s", "ask('SEARCH')", "search", priority=True),
        Binding("q", "quit", "quit"),
        Binding("t", "view('TIMELINE')", "time"),
        Binding("d", "compare", "compare"),
        Binding("o", "sort", "sort"),
        Binding("f", "fields", "fields"),
        Binding("r", "plain", "raw"),
        Binding("y", "copy", "copy"),
        Binding("n", "sample(1)", show=False),
        Binding("p", "sample(-1)", show=False),
        Binding("N", "step(1)", show=False),
        Binding("P", "step(-1)", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
        Binding("g", "edge(False)", show=False),
        Binding("G", "edge(True)", show=False),
        Binding("right_square_bracket", "match(False)", show=False),
        Binding("left_square_bracket", "match(True)", show=False),
        Binding("right_curly_bracket", "turn(1)", show=False),
        Binding("left_curly_bracket", "turn(-1)", show=False),
        Binding("u", "outline", show=False),
        Binding("i", "ask('ID')", show=False, priority=True),
        Binding("x", "unfold", show=False),
        Binding("a", "whole", show=False),
        Binding("z", "zoom", show=False),
        Binding("T", "light", show=False),
        Binding("escape", "leave", show=False),
    ]

    # Keys -------------------------------------------------------------------------------------------------------------

    def action_sample(self, by: int) -> None:
        self._samples.choose(self._samples.cursor + by)

    def action_step(self, by: int) -> None:
        self._steps.choose(self._steps.cursor + by)

    def action_scroll(self, by: int) -> None:
        self._page.scroll_relative(y=by * 2, animate=False)

    def action_edge(self, end: bool) -> None:
        page = self._page
        page.scroll_to(0, page.max_scroll_y if end else 0, animate=False)

    def action_turn(self, by: int) -> None:
        self._page.go_on_turns(by)

    @work(exclusive=True, group="menu")
    async def action_outline(self) -> None:
        row = self._row
        trajectory = None if row is None else await asyncio.to_thread(self._pages.trajectory, row)
        if trajectory is None or not trajectory.turns:
            self._say("No turns in this line")
            return
        at = await self.push_screen_wait(Menu("Go to", [turn_label(*one) for one in enumerate(trajectory.turns)]))
        if at is not None:
            self._turn_wanted = at
            self._set_view(View.TRAJECTORY)
            self._draw()

    def action_match(self, backwards: bool) -> None:
        if not self.needles:
            self._say("nothing to search for; press s to search")
        elif self._view is not View.TRAJECTORY:
            self._set_view(View.TRAJECTORY)
            self._draw(ScrollTarget.LAST if backwards else ScrollTarget.FIRST)
        elif self._page.go_on(backwards=backwards):
            self._tell()
        else:
            self._seek(backwards=backwards, here=False)

    def action_ask(self, asked: str) -> None:
        kind = Asked[asked]
        given = {Asked.FILTER: str(self._query), Asked.SEARCH: self._needle, Asked.ID: ""}[kind]
        self._prompt.ask(kind, given)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """In an input or a menu, letters are not commands."""
        return action != "ask" or not (self._prompt.display or self.screen.is_modal)

    def action_view(self, name: str) -> None:
        """Show a view; if it is shown already, go back to the trajectory."""
        wanted = View[name]
        self._set_view(View.TRAJECTORY if wanted is self._view else wanted)
        self._draw(ScrollTarget.TOP)

    def action_plain(self) -> None:
        self._looks = replace(self._looks, plain=not self._looks.plain)
        self._set_view(View.TRAJECTORY)
        self._draw(ScrollTarget.TOP)

    def action_unfold(self) -> None:
        self._looks = replace(self._looks, folds=Folds(not self._looks.folds.all_open))
        self._draw()

    def action_zoom(self) -> None:
        self._body.toggle_class("zoomed")

    def action_light(self) -> None:
        self.theme = LIGHT if self.theme == DARK else DARK
        self._draw()
        self._tell()

    def action_help(self) -> None:
        self.push_screen(Help())

    @work(exclusive=True, group="menu")
    async def action_fields(self) -> None:
        parts = await self.push_screen_wait(Fields(self._looks.parts))
        if parts is not None and parts != self._looks.parts:
            self._looks = replace(self._looks, parts=parts)
            self._draw()

    @work(exclusive=True, group="menu")
    async def action_sort(self) -> None:
        now = self._query.sort[0] if self._query.sort else None
        keys = [key for _, key in _ORDERS]
        at = await self.push_screen_wait(
            Menu("Sort by", [name for name, _ in _ORDERS], keys.index(now) if now in keys else 0)
        )
        if at is not None:
            self._sort_by(keys[at])

    @work(exclusive=True, group="menu")
    async def action_compare(self) -> None:
        row = self._row
        if row is None:
            return
        with self._saying():
            near = await asyncio.to_thread(self._library.related, row.number)
            rows = [*near.group, *near.elsewhere]
            if not rows:
                self._say("nothing to compare with: no other sample of this task, and no other run of this request")
                return
            other = await self._one_of("Compare with", rows)
            if other is not None and row is self._row:
                self._other = other
                self._set_view(View.COMPARISON)
                self._draw(ScrollTarget.TOP)

    @work(exclusive=True, group="menu")
    async def action_copy(self) -> None:
        row = self._row
        if row is None:
            return
        with self._saying():
            choices = await asyncio.to_thread(self._copies, row)
            at = await self.push_screen_wait(Menu("Copy", [choice.label for choice in choices]))
            if at is not None:
                text = choices[at].text
                self.copy_to_clipboard(text)
                self._say(f"copied {counted(len(text), 'character')}")

    def _copies(self, row: Row) -> list[Copy]:
        trajectory = self._pages.trajectory(row)
        return copies(row, trajectory, "" if trajectory is not None else self._library.raw(row.number, MOST_CHARS))
