"""Groups: a row per task, with the scores of its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from rich.style import Style

from toolyard.viewer.protocol import Group, GroupKind, Row
from toolyard.viewer.query import Condition, Query
from toolyard.viewer.tui.drawing import Line, Pen
from toolyard.viewer.tui.pages import narrowed
from toolyard.viewer.tui.palette import Palette
from toolyard.viewer.tui.tables.table import Cell, Column, Goal, Table, row_line, title_line
from toolyard.viewer.tui.text import counted, format_number, one_line

RowOf = Callable[[int], Row | None]
_SCORES = 22
_MEASURED = 500
"""Groups whose scores decide how wide their column is."""
_NO_VALUE = float("inf")
_ORDERS: dict[str, Callable[[Group], tuple[float, ...]]] = {
    "file order": lambda group: (),
    "lowest mean first": lambda group: (_NO_VALUE if group.mean is None else group.mean,),
    "highest mean first": lambda group: (_NO_VALUE if group.mean is None else -group.mean,),
    "largest std first": lambda group: (_NO_VALUE if group.std is None else -group.std,),
    "most failed first": lambda group: (-group.failed,),
}


class GroupTable(Table):
    orders = tuple(_ORDERS)

    def __init__(self, groups: Sequence[Group], asked: Query, kind: str, order: str, row_of: RowOf) -> None:
        """`asked`: the query that found them; `kind`: list only these groups."""
        counts = Counter(group.kind for group in groups)
        self.kinds = [(one.value, counts[one]) for one in GroupKind if counts[one]]
        self._all = len(groups)
        self._kind = kind
        self._groups = sorted((group for group in groups if kind in ("", group.kind.value)), key=_ORDERS[order])
        self._asked = asked
        self._row_of = row_of
        self._several_steps = len({group.step for group in groups}) > 1
        self._several_runs = len({group.run for group in groups}) > 1
        self._any_failed = any(group.failed for group in groups)
        self._longest = max(len("scores"), *(len(_by_sample(group.scores)) for group in groups[:_MEASURED]))
        self.count = len(self._groups)

    def _columns(self, width: int) -> list[Column]:
        columns = [Column("kind", 9, right=False)]
        columns += [Column("step", 5)] if self._several_steps else []
        columns += [Column("mean", 6), Column("std", 5)]
        columns += [Column("failed", 6)] if self._any_failed else []
        scores = min(self._longest, max(_SCORES, width // 3))
        return [*columns, Column("scores", scores, right=False), Column("task", 0, right=False)]

    def head(self, width: int, pen: Pen) -> list[Line]:
        said = " · ".join(f"{count:,} {kind}" for kind, count in self.kinds)
        lines = pen.text(f"{counted(self._all, 'group')}: {said}", width, pen.palette.strong)
        if self._kind:
            lines += pen.text(f"only {self._kind}; press f for others", width, pen.palette.accent)
        return [*lines, [], title_line(self._columns(width), width, pen.palette)]

    def line(self, at: int, width: int, colors: Palette) -> Line:
        group = self._groups[at]
        columns = self._columns(width)
        room = next(column.width for column in columns if column.title == "scores")
        known = [score for score in group.scores if score is not None]
        cells: dict[str, Cell] = {
            "kind": (group.kind.value, _ink(group, colors)),
            "step": (str(group.step), colors.muted),
            "mean": (format_number(group.mean), colors.score(group.mean)),
            "std": (_rounded(group.std), colors.muted),
            "failed": (f"✗{group.failed}" if group.failed else "", colors.bad),
            "scores": (_scores(group.scores, known, room), colors.text),
            "task": (self._name(group), colors.text),
        }
        return row_line(columns, cells, width)

    def _name(self, group: Group) -> str:
        if group.task:
            return one_line(group.task)
        row = self._row_of(group.numbers[0])
        return one_line(row.preview) if row else ""

    def details(self, at: int) -> str:
        group = self._groups[at]
        row = self._row_of(group.numbers[0])
        run = f" · {one_line(group.run)}" if group.run else ""
        said = f"{one_line(group.task) or 'no name'}{run} · step {group.step} · {counted(len(group.scores), 'sample')}"
        if group.std:
            known = [value for value in group.advantages if value is not None]
            said += f" · advantages {min(known):+.2f} to {max(known):+.2f}"
        return f"{said}\n{one_line(row.preview) if row else ''}"

    def goal(self, at: int) -> Goal:
        group = self._groups[at]
        conditions = [Condition("step", ":", float(group.step)), Condition("group", ":", float(group.group_id))]
        if self._several_runs:
            conditions.append(Condition("file", ":", f"{group.run}/" if group.run else "/", negated=not group.run))
        return Goal(narrowed(self._asked, *conditions), group.numbers[0])

    def key(self, at: int) -> Hashable:
        group = self._groups[at]
        return group.step, group.run, group.group_id, group.task


def _ink(group: Group, colors: Palette) -> Style:
    return {GroupKind.ALL_1: colors.good, GroupKind.UNSCORED: colors.muted}.get(group.kind, colors.text)


def _rounded(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 100 else format_number(value)


def _by_sample(scores: Sequence[float | None]) -> str:
    return " ".join(map(format_number, scores))


def _scores(scores: Sequence[float | None], known: Sequence[float], room: int) -> str:
    """All scores by sample if there is room, otherwise how often each occurs, otherwise their range."""
    said = _by_sample(scores)
    if len(said) <= room:
        return said
    counts = Counter(map(format_number, sorted(known)))
    missing = len(scores) - len(known)
    said = "  ".join([*(f"{count}×{score}" for score, count in counts.items()), *([f"{missing}×–"] if missing else [])])
    if len(said) <= room:
        return said
    return f"{format_number(min(known))} … {format_number(max(known))}"
