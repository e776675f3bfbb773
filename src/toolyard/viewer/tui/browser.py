"""The lists and the reading pane: the viewer without its keys."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from toolyard.errors import ToolyardError
from toolyard.records.audit import Decode
from toolyard.viewer.library import Library
from toolyard.viewer.notes import Notes
from toolyard.viewer.protocol import Row, StepSummary
from toolyard.viewer.query import Query, SortKey, parse_query
from toolyard.viewer.tui.completion import Completions, completions
from toolyard.viewer.tui.conversation import Folds
from toolyard.viewer.tui.lists import Choices, SampleList, StepList, Titles
from toolyard.viewer.tui.page import PageView
from toolyard.viewer.tui.pages import PageRequest, Pages, View, empty_page, in_step
from toolyard.viewer.tui.palette import DARK, palette, themes
from toolyard.viewer.tui.prompt import Asked, Prompt
from toolyard.viewer.tui.screens import KeyLine, Menu
from toolyard.viewer.tui.tables.table import TableView
from toolyard.viewer.tui.text import format_number, one_line, visible
from toolyard.viewer.tui.trajectory import Looks

_FOLLOW_SECONDS = 0.5
WAIT_SECONDS = 0.4
"""If drawing a page takes longer, the status line says so."""


class ScrollTarget(Enum):
    """Where to scroll once a page is drawn."""

    SAME = "keep the position"
    TOP = "the top"
    NEAR = "the next match from here"
    FIRST = "the first match"
    LAST = "the last match"


class Found(NamedTuple):
    """The contents of the lists."""

    rows: int
    steps: list[StepSummary]
    row: Row | None
    """The current row, if it still exists."""
    position: int | None
    """Its position in the list, if it matches the query."""
    generation: int


class Browser(App[None]):
    """Follows `library` while the viewer runs. The caller closes it."""

    def __init__(
        self,
        library: Library,
        *,
        query: Query | None = None,
        title: str = "",
        decode: Decode | None = None,
        notes: Notes | None = None,
    ) -> None:
        super().__init__()
        for theme in themes():
            self.register_theme(theme)
        self.theme = DARK
        self._library = library
        self._notes = notes or Notes(library.folder)
        self._pages = Pages(library, decode, self._notes)
        self._label = one_line(title or str(library.folder))
        self._query = query or Query()
        self._step: int | None = None
        self._row: Row | None = None
        """The current row."""
        self._view = View.TRAJECTORY
        self._other: Row | None = None
        self._looks = Looks()
        self._whole = False
        self._needle = ""
        self._place: ScrollTarget | None = None
        """Where to scroll when the page being drawn is done."""
        self._turn_wanted: int | None = None
        """The turn to scroll to when the page is drawn."""
        self._to_first = False
        """Whether to open the first row of the pending lookup."""
        self._count = 0
        self._generation = library.generation
        self._problem = ""
        """Why the dump is not followed."""
        self._refreshing = False
        # Kept as attributes: queries by type do not find them while a menu is open.
        self._top = Static(id="top")
        self._body = Horizontal(id="body")
        self._steps = StepList(self._step_chosen)
        self._titles = Titles()
        self._samples = SampleList(self._fetch, self._sample_chosen, self._noted)
        self._page = PageView()
        self._table = TableView()
        self._prompt = Prompt(self._completions)

    @property
    def asked(self) -> Query:
        """The query of the list: the filter, restricted to the selected step."""
        return in_step(self._query, self._step)

    @property
    def needles(self) -> tuple[str, ...]:
        return (self._needle,) if self._needle else self._query.needles

    # Widgets ----------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield self._top
        with self._body:
            with Vertical(id="lists"):
                yield self._steps
                yield self._titles
                yield self._samples
            yield self._page
            yield self._table
        yield self._prompt
        yield KeyLine()

    def on_mount(self) -> None:
        self._samples.focus()
        self._look(first=True)
        self.set_interval(_FOLLOW_SECONDS, self._follow)

    def _completions(self, text: str) -> Completions:
        try:
            return completions(text, self._library.values, self._library.reward_names)
        except ToolyardError:
            return Completions()

    def _fetch(self, offset: int, limit: int) -> list[Row]:
        try:
            return self._library.rows(self.asked, offset=offset, limit=limit)
        except ToolyardError as error:
            self._say(str(error), bad=True)
            return []

    def _noted(self, rows: Sequence[Row]) -> set[int]:
        try:
            return self._notes.noted(rows)
        except ToolyardError as error:
            self._say(str(error), bad=True)
            return set()

    # Lists ------------------------------------------------------------------------------------------------------------

    def _look(self, *, first: bool = False) -> None:
        """Update the lists. `first`: then open the first row; otherwise the page stays as it is."""
        self._to_first = self._to_first or first
        self._look_up()

    @work(exclusive=True, group="look")
    async def _look_up(self) -> None:
        with self._saying():
            while True:
                asked = (self._query, self._step, self._row)
                found = await asyncio.to_thread(self._looked_up, *asked)
                if self._step is not None and all(one.step != self._step for one in found.steps):
                    self._step = None  # the step has no rows any more
                elif asked == (self._query, self._step, self._row):
                    self._list(found)
                    return

    def _list(self, found: Found) -> None:
        first, self._to_first = self._to_first, False
        if found.generation != self._generation:  # a file was replaced or deleted: numbers mean other lines now
            self._generation = found.generation
            first = first or found.row is None
            self._row = found.row
        self._count = found.rows
        sort = self._query.sort[0] if self._query.sort else None
        samples = self._samples
        samples.sort = sort
        self._titles.show(sort)
        self._steps.show(found.steps, self._step)
        if first or self._row is None:
            samples.update(found.rows, 0)
            self._open(samples.row(0))
        else:
            samples.update(found.rows, samples.cursor if found.position is None else found.position)
        self._tell()

    def _looked_up(self, query: Query, step: int | None, row: Row | None) -> Found:
        library = self._library
        asked = in_step(query, step)
        generation = library.generation
        if row is not None and generation != self._generation:
            now = library.at(row.file, row.line)
            row = now if now is not None and now.request_id == row.request_id else None
        position = None if row is None else library.position(row.number, asked)
        return Found(library.count(asked), library.steps(query), row, position, generation)

    def _follow(self) -> None:
        if not self._refreshing:
            self._refreshing = True
            self._refresh_library()

    @work(group="follow")
    async def _refresh_library(self) -> None:
        try:
            came = await asyncio.to_thread(self._library.refresh)
            problem = ""
        except ToolyardError as error:
            came, problem = 0, str(error)
        finally:
            self._refreshing = False
        if came:
            self._look()
        if problem != self._problem:
            self._problem = problem
            self._tell()

    def _step_chosen(self) -> None:
        self._step = self._steps.step_at(self._steps.cursor)
        self._look(first=True)

    def _sample_chosen(self) -> None:
        self._open(self._samples.row(self._samples.cursor))

    @on(Choices.Entered)
    def _read_it(self) -> None:
        self._page.focus()

    @on(Titles.Sorted)
    def _sort_by_column(self, event: Titles.Sorted) -> None:
        now = self._query.sort[0] if self._query.sort else None
        descending = not now.descending if now is not None and now.field == event.field else False
        self._sort_by(SortKey(event.field, descending))

    def _sort_by(self, key: SortKey | None) -> None:
        self._query = replace(self._query, sort=(key,) if key else ())
        self._look(first=True)

    # The page ---------------------------------------------------------------------------------------------------------

    def _open(self, row: Row | None, place: ScrollTarget = ScrollTarget.TOP) -> None:
        self._row = row
        self._whole = False
        self._looks = replace(self._looks, folds=Folds(self._looks.folds.all_open))
        if self._view is View.COMPARISON:
            self._set_view(View.TRAJECTORY)
        self._draw(place)

    def _set_view(self, view: View) -> None:
        self._view = view
        self._body.set_class(view is View.COMPARISON, "comparing")

    def _draw(self, place: ScrollTarget = ScrollTarget.SAME) -> None:
        if place is not ScrollTarget.SAME or self._place is None:
            self._place = place
        self._draw_page()

    @work(exclusive=True, group="draw")
    async def _draw_page(self) -> None:
        view, row = self._page, self._row
        if row is None:
            view.show(empty_page(self._query, self._step, view.room, self.theme), keep=False)
            self._place = None
            return
        wanted = PageRequest(
            row, self._view, self._other, self._looks, self.needles, self._whole, view.room, self.theme
        )
        announce = self.set_timer(WAIT_SECONDS, lambda: self._tell("drawing …"))
        try:
            page = await asyncio.to_thread(self._pages.draw, wanted)
        finally:
            announce.stop()
        place, self._place = self._place or ScrollTarget.SAME, None
        view.show(page, keep=place in (ScrollTarget.SAME, ScrollTarget.NEAR))
        turn, self._turn_wanted = self._turn_wanted, None
        if place is ScrollTarget.NEAR:
            view.go_to_near_match()
        elif place in (ScrollTarget.FIRST, ScrollTarget.LAST):
            view.go_to_match(-1 if place is ScrollTarget.LAST else 0)
        if turn is not None:
            view.go_to_turn(turn)
        if self._needle and not page.matches and place in (ScrollTarget.NEAR, ScrollTarget.FIRST, ScrollTarget.LAST):
            self._say("the match is in a part that is not shown: press f for fields, r for raw text, a for all text")
        self._tell()

    @on(PageView.Widened)
    def _redraw(self) -> None:
        self._draw()

    @on(PageView.Turned)
    def _turn(self, event: PageView.Turned) -> None:
        self._looks = replace(self._looks, folds=self._looks.folds.toggle(event.key))
        self._draw()

    @on(PageView.WholeWanted)
    def action_whole(self) -> None:
        self._whole = not self._whole
        self._draw()

    # Searching --------------------------------------------------------------------------------------------------------

    @on(Prompt.Answered)
    def _answered(self, event: Prompt.Answered) -> None:
        if event.asked is Asked.FILTER:
            self._query = parse_query(event.text)
            self._look(first=True)
        elif event.asked is Asked.SEARCH:
            self._needle = event.text
            self._set_view(View.TRAJECTORY)
            if self._needle:
                self._seek(backwards=False, here=True)
            else:
                self._draw()
        elif event.text.strip():
            self._jump(event.text.strip())

    @work(exclusive=True, group="seek")
    async def _seek(self, *, backwards: bool, here: bool) -> None:
        """Go to the next trajectory with a match; `here`: stay in this one if it has a match."""
        needle, row, library = self.needles[0], self._row, self._library
        place = ScrollTarget.LAST if backwards else ScrollTarget.FIRST
        with self._saying():
            if here and row is not None and await asyncio.to_thread(library.contains, row.number, needle):
                self._draw(ScrollTarget.NEAR)
                return
            number = None if row is None else row.number
            found = await asyncio.to_thread(library.next_match, needle, number, self.asked, backwards=backwards)
            if found is None:
                self._draw()
                self._say(f"no listed trajectory contains {visible(needle)!r}")
            elif found.number == number:
                self._draw(place)
            else:
                await self._go_to(found, place)

    @work(exclusive=True, group="seek")
    async def _jump(self, request_id: str) -> None:
        with self._saying():
            rows = await asyncio.to_thread(self._library.find, request_id)
            if not rows:
                self._say(f"no request id starts with {visible(request_id)!r}, or several do", bad=True)
            elif (row := await self._one_of("Which one?", rows)) is not None:
                await self._go_to(row, ScrollTarget.TOP)

    async def _one_of(self, title: str, rows: Sequence[Row]) -> Row | None:
        """The only row, or the one the user chooses."""
        if len(rows) == 1:
            return rows[0]
        at = await self.push_screen_wait(Menu(title, [_named(row) for row in rows]))
        return None if at is None else rows[at]

    async def _go_to(self, row: Row, place: ScrollTarget) -> None:
        """Open `row`. If it is not in the list, clear the filter."""
        position = await asyncio.to_thread(self._library.position, row.number, self.asked)
        if position is None:
            self._step, self._query = None, replace(self._query, alternatives=())
            self._say("filter cleared to show this trajectory")
            self._open(row, place)
            self._look()
        else:
            self._samples.update(self._count, position)
            self._open(row, place)

    # Messages ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _saying(self) -> Generator[None]:
        """Show errors as notifications: an unreadable library may come back."""
        try:
            yield
        except ToolyardError as error:
            self._say(str(error), bad=True)

    def _say(self, text: str, *, bad: bool = False) -> None:
        self.notify(visible(text), severity="error" if bad else "information", markup=False, timeout=4)

    def _tell(self, doing: str = "") -> None:
        """Update the status line at the top."""
        colors = palette(self.theme)
        room = max(12, self.size.width // 3)
        label = self._label if len(self._label) <= room else f"…{self._label[1 - room :]}"
        parts = [Text(label, colors.strong)]
        if self._view is not View.TRAJECTORY:
            parts.append(Text(f"{self._view.value} (esc to close)", colors.accent))
        parts.append(Text(_trajectories(self._count), colors.muted))
        if self._step is not None:
            parts.append(Text(f"step {self._step}", colors.muted))
        if self._query.alternatives:
            parts.append(Text(f"filter {visible(str(replace(self._query, sort=())))}", colors.accent))
        if self._needle:
            page = self._page
            place = f" {page.match + 1}/{page.matches}" if page.match is not None else ""
            parts.append(Text(f"search {visible(self._needle)!r}{place}", colors.accent))
        if self._looks.plain:
            parts.append(Text("raw", colors.muted))
        if doing or self._problem:
            parts.append(Text(doing or f"not updating: {one_line(self._problem)}", colors.strong))
        self._top.update(Text("  ·  ", colors.faint).join(parts), layout=False)


def _trajectories(count: int) -> str:
    return f"{count:,} {'trajectory' if count == 1 else 'trajectories'}"


def _named(row: Row) -> str:
    score = f"score {format_number(row.score)}"
    sample = f"sample {row.sample}  " if row.task else ""
    return f"{sample}{score}  step {row.step}  {row.finish}  {row.request_id or f'{row.file}:{row.line}'}"
