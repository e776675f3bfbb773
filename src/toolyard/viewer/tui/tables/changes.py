"""Changes: which tasks were solved, broken, or got better or worse between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from rich.style import Style

from toolyard.viewer.protocol import TaskChange
from toolyard.viewer.query import Condition, Query
from toolyard.viewer.tui.drawing import Line, Pen
from toolyard.viewer.tui.pages import in_step, narrowed
from toolyard.viewer.tui.palette import Palette
from toolyard.viewer.tui.tables.groups import RowOf
from toolyard.viewer.tui.tables.table import Column, Goal, Table, row_line, title_line
from toolyard.viewer.tui.text import counted, format_number, one_line

_SIGNS = {"solved": "✓", "broken": "×", "better": "▲", "worse": "▼", "new": "+", "gone": "−"}
_KINDS = (*_SIGNS, "same")
_COLUMNS = (
    Column("", 8, right=False),
    Column("before", 7),
    Column("after", 7),
    Column("change", 7),
    Column("samples", 9),
    Column("task", 0, right=False),
)
_ORDERS: dict[str, Callable[[TaskChange], tuple[bool, float]]] = {
    "largest change first": lambda one: (one.change is None, -abs(one.change or 0.0)),
    "largest loss first": lambda one: (one.change is None, one.change or 0.0),
    "largest gain first": lambda one: (one.change is None, -(one.change or 0.0)),
}


class ChangeTable(Table):
    orders = tuple(_ORDERS)

    def __init__(
        self,
        changes: Sequence[TaskChange],
        steps: tuple[int, int],
        query: Query,
        kind: str,
        order: str,
        row_of: RowOf,
    ) -> None:
        counts = Counter(change.kind for change in changes)
        self.kinds = [(one, counts[one]) for one in _KINDS if counts[one]]
        self._counts, self._kind = counts, kind
        self._steps, self._query, self._row_of = steps, query, row_of
        self._changes = sorted((change for change in changes if kind in ("", change.kind)), key=_ORDERS[order])
        self.count = len(self._changes)

    def head(self, width: int, pen: Pen) -> list[Line]:
        before, after = self._steps
        shown = [kind for kind in _KINDS if self._counts[kind] or kind in ("solved", "broken", "better", "worse")]
        said = " · ".join(f"{self._counts[kind]:,} {kind}" for kind in shown)
        lines = pen.text(f"Step {before} → step {after}: {said}", width, pen.palette.strong)
        hint = "N P: the later step · < >: the earlier step"
        hint += f" · only {self._kind}; press f for others" if self._kind else ""
        return [*lines, *pen.text(hint, width, pen.palette.muted), [], title_line(_COLUMNS, width, pen.palette)]

    def line(self, at: int, width: int, colors: Palette) -> Line:
        one = self._changes[at]
        cells = {
            "": (f"{_SIGNS.get(one.kind, ' ')} {one.kind}", _ink(one, colors)),
            "before": (format_number(one.before), colors.score(one.before)),
            "after": (format_number(one.after), colors.score(one.after)),
            "change": ("–" if one.change is None else f"{one.change:+.2f}", colors.text),
            "samples": (f"{one.count_before} → {one.count_after}", colors.muted),
            "task": (self._name(one), colors.text),
        }
        return row_line(_COLUMNS, cells, width)

    def _name(self, one: TaskChange) -> str:
        row = None if one.task else self._row_of(one.number)
        return one_line(one.task or (row.preview if row else ""))

    def details(self, at: int) -> str:
        one = self._changes[at]
        row = self._row_of(one.number)
        said = f"{counted(one.count_before, 'sample')} before, {counted(one.count_after, 'sample')} after"
        return f"{one_line(one.task) or 'no name'} · {said}\n{one_line(row.preview) if row else ''}"

    def goal(self, at: int) -> Goal:
        one = self._changes[at]
        sides = (in_step(self._query, step) for step in self._steps)
        group = Condition("group", ":", float(one.group_id))
        either = tuple(conditions for side in sides for conditions in narrowed(side, group).alternatives)
        return Goal(Query(either, self._query.sort), one.number)

    def key(self, at: int) -> Hashable:
        return self._changes[at].group_id, self._changes[at].task


def _ink(one: TaskChange, colors: Palette) -> Style:
    return {"solved": colors.good, "same": colors.muted}.get(one.kind, colors.text)
