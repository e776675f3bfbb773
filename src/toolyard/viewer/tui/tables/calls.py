"""Calls: by tool, failed ones by the last line of their error, and the slowest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from toolyard.viewer.protocol import CallErrors, CallReport, Row, SlowCall, ToolCalls
from toolyard.viewer.query import Condition, Query
from toolyard.viewer.tui.drawing import Line, Pen
from toolyard.viewer.tui.pages import narrowed
from toolyard.viewer.tui.palette import Palette
from toolyard.viewer.tui.tables.groups import RowOf
from toolyard.viewer.tui.tables.table import Cell, Column, Goal, Table, row_line, title_line
from toolyard.viewer.tui.text import counted, format_seconds, one_line

_WIDE = 110
_ORDERS: dict[str, Callable[[ToolCalls], float]] = {
    "most calls first": lambda tool: -tool.calls,
    "most failed first": lambda tool: -tool.failed,
    "slowest p95 first": lambda tool: -(tool.p95 or 0.0),
}
_ERROR_COLUMNS = (
    Column("Failed", 8),
    Column("tool", 18, right=False),
    Column("last line of the error", 0, right=False),
)
_SLOW_COLUMNS = (
    Column("Slowest", 10),
    Column("wait", 8),
    Column("verdict", 15, right=False),
    Column("tool", 18, right=False),
    Column("turn", 4),
    Column("request", 0, right=False),
)
_Entry = ToolCalls | CallErrors | SlowCall | Sequence[Column]
"""A row, or the titles of those that follow."""


class CallTable(Table):
    orders = tuple(_ORDERS)

    def __init__(self, report: CallReport, asked: Query, order: str, row_of: RowOf) -> None:
        self._report, self._asked, self._row_of = report, asked, row_of
        self._entries: list[_Entry] = [*sorted(report.tools, key=_ORDERS[order])]
        if report.errors:
            self._entries += [(), _ERROR_COLUMNS, *report.errors]
        if report.slowest:
            self._entries += [(), _SLOW_COLUMNS, *report.slowest]
        self.count = len(self._entries)

    def head(self, width: int, pen: Pen) -> list[Line]:
        tools = self._report.tools
        calls, failed = sum(tool.calls for tool in tools), sum(tool.failed for tool in tools)
        said = (
            f"{counted(calls, 'call')} of {counted(len(tools), 'tool')} · {failed:,} failed ({_share(failed, calls)})"
        )
        if self._report.slowest:
            slowest = self._report.slowest[0]
            said += f" · slowest {format_seconds(slowest.seconds)} ({one_line(slowest.tool, 40)})"
        titles = title_line(_tool_columns(width), width, pen.palette)
        return [*pen.text(said, width, pen.palette.strong), [], titles]

    def line(self, at: int, width: int, colors: Palette) -> Line:
        entry = self._entries[at]
        if isinstance(entry, ToolCalls):
            return row_line(_tool_columns(width), _tool_cells(entry, colors), width)
        if isinstance(entry, CallErrors):
            return row_line(_ERROR_COLUMNS, _error_cells(entry, colors), width)
        if isinstance(entry, SlowCall):
            return row_line(_SLOW_COLUMNS, _slow_cells(entry, self._row_of(entry.number), colors), width)
        return title_line(entry, width, colors)

    def details(self, at: int) -> str:
        entry = self._entries[at]
        if isinstance(entry, ToolCalls):
            verdicts = " · ".join(f"{count:,} {one_line(verdict, 40)}" for verdict, count in entry.verdicts.items())
            times = f"p50 {format_seconds(entry.p50)} · p95 {format_seconds(entry.p95)}"
            waits = f"wait p50 {format_seconds(entry.wait_p50)} · p95 {format_seconds(entry.wait_p95)}"
            longest = f"longest {format_seconds(entry.longest)}"
            return f"{one_line(entry.tool)}: {verdicts}\n{times} · {longest} · {waits}"
        if isinstance(entry, CallErrors):
            return f"{one_line(entry.tool)}, {counted(entry.calls, 'call')}: {entry.error}"
        if not isinstance(entry, SlowCall):
            return ""
        row = self._row_of(entry.number)
        name = f"{one_line(row.task)} · {one_line(row.request_id)} · step {row.step}\n{row.preview}" if row else ""
        return f"turn {entry.turn + 1} of {name}"

    def goal(self, at: int) -> Goal | None:
        entry = self._entries[at]
        if isinstance(entry, SlowCall):
            return Goal(number=entry.number, turn=entry.turn)
        if isinstance(entry, ToolCalls):
            return Goal(narrowed(self._asked, Condition("tool", "=", entry.tool)))
        if isinstance(entry, CallErrors):
            said = Condition("tool", "=", entry.tool), Condition("text", ":", entry.error)
            return Goal(narrowed(self._asked, *said), entry.number)
        return None

    def key(self, at: int) -> Hashable:
        entry = self._entries[at]
        if isinstance(entry, ToolCalls):
            return entry.tool
        if isinstance(entry, CallErrors):
            return entry.tool, entry.error
        return entry if isinstance(entry, SlowCall) else at


def _share(failed: int, calls: int) -> str:
    return f"{failed / max(1, calls):.0%}"


def _tool_columns(width: int) -> list[Column]:
    columns = [Column("tool", 0, right=False), Column("calls", 8), Column("failed", 14), Column("p50", 9)]
    columns += [Column("p95", 9), Column("wait p95", 9)]
    return columns if width < _WIDE else [*columns, Column("longest", 9), Column("verdicts", 40, right=False)]


def _tool_cells(tool: ToolCalls, colors: Palette) -> dict[str, Cell]:
    verdicts = " ".join(f"{count:,}×{one_line(verdict, 20)}" for verdict, count in tool.verdicts.items())
    return {
        "tool": (one_line(tool.tool) or "(no name)", colors.text),
        "calls": (f"{tool.calls:,}", colors.text),
        "failed": (f"× {tool.failed:,} ({_share(tool.failed, tool.calls)})" if tool.failed else "0", colors.text),
        "p50": (format_seconds(tool.p50), colors.muted),
        "p95": (format_seconds(tool.p95), colors.text),
        "wait p95": (format_seconds(tool.wait_p95), colors.muted),
        "longest": (format_seconds(tool.longest), colors.muted),
        "verdicts": (verdicts, colors.muted),
    }


def _error_cells(error: CallErrors, colors: Palette) -> dict[str, Cell]:
    return {
        "Failed": (f"× {error.calls:,}", colors.text),
        "tool": (one_line(error.tool), colors.muted),
        "last line of the error": (one_line(error.error), colors.text),
    }


def _slow_cells(call: SlowCall, row: Row | None, colors: Palette) -> dict[str, Cell]:
    return {
        "Slowest": (format_seconds(call.seconds), colors.text),
        "wait": (format_seconds(call.wait), colors.muted),
        "verdict": (one_line(call.verdict), colors.verdict(call.verdict)),
        "tool": (one_line(call.tool), colors.muted),
        "turn": (str(call.turn + 1), colors.muted),
        "request": (one_line(row.request_id) if row else "", colors.muted),
    }
