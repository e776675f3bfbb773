"""The browser with its overviews: groups, calls, changes between two steps, and the waterfall of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from textual import on, work

from toolyard.errors import ToolyardError
from toolyard.viewer.protocol import Row
from toolyard.viewer.query import Condition, Query
from toolyard.viewer.tui.browser import WAIT_SECONDS, Browser, Found, ScrollTarget
from toolyard.viewer.tui.pages import View, in_step, narrowed
from toolyard.viewer.tui.screens import Menu
from toolyard.viewer.tui.tables.calls import CallTable
from toolyard.viewer.tui.tables.changes import ChangeTable
from toolyard.viewer.tui.tables.groups import GroupTable
from toolyard.viewer.tui.tables.table import Note, Table, TableRows
from toolyard.viewer.tui.tables.waterfall import WaterfallTable

TABLES = (View.GROUPS, View.CALLS, View.CHANGES, View.WATERFALL)
_FAILED = Condition("failed", ":", True)


class _Request(NamedTuple):
    """What a table shows."""

    view: View
    query: Query
    step: int | None
    """The selected step."""
    near: int
    """The step of the current row."""
    between: tuple[int | None, int | None]
    kind: str
    order: int


class _Left(NamedTuple):
    """A table, and the filter that it had."""

    view: View
    query: Query
    step: int | None
    opened: Query
    """The filter since then."""


class Overviews(Browser):
    """The keys of the pages are in `TableRows`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kinds: dict[View, str] = {}
        self._orders: dict[View, int] = {}
        self._between: tuple[int | None, int | None] = (None, None)
        """The steps to compare; None: the first and the last one."""
        self._left: _Left | None = None
        """The table that Enter left; escape goes back to it."""
        self._wanted_tables = 0
        """How often a table was asked for."""
        self._tabulating = False
        self._keep = True
        self._shown = View.TRAJECTORY
        """The view of the table that is shown, or was last."""
        self._row_of = lru_cache(maxsize=1024)(self._found_row)

    def _found_row(self, number: int) -> Row | None:
        try:
            return self._library.row(number)
        except ToolyardError:
            return None

    # Drawing ----------------------------------------------------------------------------------------------------------

    def _set_view(self, view: View) -> None:
        was, is_table = self._view in TABLES, view in TABLES
        super()._set_view(view)
        self._body.set_class(is_table, "tabled")
        if is_table and view is not self._shown:  # a key must not open a row of another page
            self._shown = view
            self._table.show(Note(""), keep=False)
        if was != is_table:
            self.screen.set_focus(self._table.rows if is_table else self._samples)

    def _draw(self, place: ScrollTarget = ScrollTarget.SAME) -> None:
        if self._view not in TABLES:
            super()._draw(place)
            return
        self._wanted_tables += 1
        self._keep = self._keep and place is ScrollTarget.SAME
        if not self._tabulating:
            self._tabulating = True
            self._tabulate()

    def _list(self, found: Found) -> None:
        if found.generation != self._generation:
            self._row_of.cache_clear()
        super()._list(found)
        if self._view in TABLES:
            self._draw()

    @work(group="draw")
    async def _tabulate(self) -> None:
        """Draw the table, again if it was asked for meanwhile: a dump may grow faster than a large table is drawn."""
        drawn = -1
        try:
            while self._view in TABLES and drawn != self._wanted_tables:
                drawn, wanted = self._wanted_tables, self._request()
                announce = self.set_timer(WAIT_SECONDS, lambda: self._tell("reading …"))
                try:
                    table = await asyncio.to_thread(self._table_of, wanted)
                finally:
                    announce.stop()
                if wanted == self._request():
                    self._table.show(table, keep=self._keep)
                    self._keep = True
                    self._tell()
        finally:
            self._tabulating = False

    def _request(self) -> _Request:
        view, row = self._view, self._row
        kind, order = self._kinds.get(view, ""), self._orders.get(view, 0)
        near = row.step if row is not None and view is View.WATERFALL else 0
        return _Request(view, self._query, self._step, near, self._between, kind, order)

    def _table_of(self, wanted: _Request) -> Table:
        try:
            return self._tables[wanted.view](wanted)
        except ToolyardError as error:
            return Note(str(error))
        except Exception as error:  # an unforeseen line must not end the viewer
            return Note(f"This cannot be shown. {type(error).__name__}: {error}")

    @property
    def _tables(self) -> dict[View, Callable[[_Request], Table]]:
        return {
            View.GROUPS: self._groups,
            View.CALLS: self._calls,
            View.CHANGES: self._changes,
            View.WATERFALL: self._waterfall,
        }

    def _groups(self, wanted: _Request) -> Table:
        asked = in_step(wanted.query, wanted.step)
        groups = self._library.groups(asked)
        if not groups:
            return _nothing(wanted)
        return GroupTable(groups, asked, wanted.kind, GroupTable.orders[wanted.order], self._row_of)

    def _calls(self, wanted: _Request) -> Table:
        asked = in_step(wanted.query, wanted.step)
        report = self._library.calls(asked)
        if not report.tools:
            return Note("No tool calls.") if self._library.count(asked) else _nothing(wanted)
        return CallTable(report, asked, CallTable.orders[wanted.order], self._row_of)

    def _changes(self, wanted: _Request) -> Table:
        steps = [one.step for one in self._library.steps(wanted.query)]
        if len(steps) < 2:
            return Note(f"Only step {steps[0]} has trajectories; changes need two.") if steps else _nothing(wanted)
        before, after = _compared(steps, wanted.between)
        found = self._library.changes(in_step(wanted.query, before), in_step(wanted.query, after))
        order = ChangeTable.orders[wanted.order]
        return ChangeTable(found, (before, after), wanted.query, wanted.kind, order, self._row_of)

    def _waterfall(self, wanted: _Request) -> Table:
        step = wanted.near if wanted.step is None else wanted.step
        if not self._library.count(in_step(wanted.query, step)):
            return _nothing(wanted)
        found = self._pages.step_timeline(step, wanted.query)
        if found is None:
            return Note(f"Step {step}: No timings in this dump")
        return WaterfallTable(found, WaterfallTable.orders[wanted.order], self._row_of)

    # Keys -------------------------------------------------------------------------------------------------------------

    def action_trajectory(self) -> None:
        self._set_view(View.TRAJECTORY)
        self._draw(ScrollTarget.TOP)

    @work(exclusive=True, group="menu")
    async def action_order(self) -> None:
        names = self._table.rows.table.orders
        if not names:
            self._say("nothing to sort")
            return
        at = await self.push_screen_wait(Menu("Sort by", names, self._orders.get(self._view, 0)))
        if at is not None:
            self._orders[self._view] = at
            self._draw(ScrollTarget.TOP)

    @work(exclusive=True, group="menu")
    async def action_kind(self) -> None:
        kinds = self._table.rows.table.kinds
        if not kinds:
            self._say("no kinds to choose from")
            return
        names = ["", *(name for name, _ in kinds)]
        now = self._kinds.get(self._view, "")
        said = ["all", *(f"{name}  {count:,}" for name, count in kinds)]
        at = await self.push_screen_wait(Menu("Show only", said, names.index(now) if now in names else 0))
        if at is not None:
            self._kinds[self._view] = names[at]
            self._draw(ScrollTarget.TOP)

    def action_next_step(self, by: int) -> None:
        """The next step or, on the page of changes, the next later one to compare with."""
        if self._view is View.CHANGES:
            self._compare_steps(later=by)
        elif self._view is View.WATERFALL and self._step is None and self._row is not None:
            self._steps.choose(self._steps.place_of(self._row.step) + by)
        else:
            self._steps.choose(self._steps.cursor + by)

    def action_next_base(self, by: int) -> None:
        if self._view is View.CHANGES:
            self._compare_steps(earlier=by)

    def _compare_steps(self, *, earlier: int = 0, later: int = 0) -> None:
        steps = self._steps.steps
        if len(steps) > 1:
            before, after = map(steps.index, _compared(steps, self._between))
            last = len(steps) - 1
            before = max(0, min(before + earlier, last))
            after = max(0, min(after + later, last))
            self._between = steps[before], steps[after]
            self._draw(ScrollTarget.TOP)

    @work(exclusive=True, group="seek")
    async def action_failed(self) -> None:
        """List only failed requests, or all again."""
        query = self._query
        if query.alternatives and all(_FAILED in conditions for conditions in query.alternatives):
            rest = tuple(tuple(one for one in conditions if one != _FAILED) for conditions in query.alternatives)
            self._query = replace(query, alternatives=rest if all(rest) else ())
        else:
            wanted = narrowed(query, _FAILED)
            with self._saying():
                if not await asyncio.to_thread(self._library.count, in_step(wanted, self._step)):
                    self._say("no request failed")
                    return
            self._query = wanted
        self._look(first=True)

    @on(TableRows.Opened)
    @work(exclusive=True, group="seek")
    async def _open_goal(self, event: TableRows.Opened) -> None:
        goal, library = event.goal, self._library
        with self._saying():
            row = None if goal.number is None else await asyncio.to_thread(library.row, goal.number)
            query = goal.query
            if query is not None and row is not None:
                position = await asyncio.to_thread(library.position, row.number, query)
                query = None if position is None else query  # an error's text may have been cut
            left = self._view, self._query, self._step
            if query is not None:
                self._query, self._step = query, None
            self._left = _Left(*left, self._query)
            self._set_view(View.TRAJECTORY)
            if row is None:
                self._look(first=True)
                return
            self._turn_wanted = goal.turn
            self._open(row, ScrollTarget.FIRST if self._query.needles else ScrollTarget.TOP)
            self._look()

    def action_leave(self) -> None:
        if self._view is not View.TRAJECTORY:
            self.action_trajectory()
        elif self._needle:
            self._needle = ""
            self._draw()
        elif self._left is not None and self._left.opened == self._query:
            view, self._query, self._step, _ = self._left
            self._left = None
            self._set_view(view)
            self._draw()
            self._look()


def _compared(steps: list[int], between: tuple[int | None, int | None]) -> tuple[int, int]:
    """The earlier and the later step; by default, and if they are gone, the first and the last one."""
    before, after = between
    return before if before in steps else steps[0], after if after in steps else steps[-1]


def _nothing(wanted: _Request) -> Note:
    if wanted.query.alternatives or wanted.step is not None:
        return Note("No matches. Press / to change the filter.")
    return Note("No trajectories yet. They appear here as they are written.")
