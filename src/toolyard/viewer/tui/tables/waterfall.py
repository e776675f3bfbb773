"""Waterfall: the requests of a step by wall clock."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from datetime import UTC, datetime
from itertools import groupby

from rich.segment import Segment

from toolyard.viewer.protocol import RequestTimeline, Stage, StepTimeline
from toolyard.viewer.timeline import stage_seconds
from toolyard.viewer.tui.drawing import Line, Pen
from toolyard.viewer.tui.palette import Palette
from toolyard.viewer.tui.tables.groups import RowOf
from toolyard.viewer.tui.tables.table import Goal, Table
from toolyard.viewer.tui.text import counted, fitted, format_seconds, one_line
from toolyard.viewer.tui.timeline import STAGE_SIGNS, stage_legend

_NAME, _TIME = 14, 13
_STAGES = 4
"""Stages to name in the details."""
_ORDERS = ("by start", "longest first", "last end first")


class WaterfallTable(Table):
    orders = _ORDERS

    def __init__(self, step: StepTimeline, order: str, row_of: RowOf) -> None:
        self._step, self._row_of = step, row_of
        self._requests: Sequence[RequestTimeline] = step.waterfall or step.slowest
        if order == _ORDERS[1]:
            self._requests = sorted(self._requests, key=lambda one: -one.seconds)
        elif order == _ORDERS[2]:
            self._requests = sorted(self._requests, key=lambda one: -(self._start(one) + one.seconds))
        self.count = len(self._requests)

    def head(self, width: int, pen: Pen) -> list[Line]:
        step, colors = self._step, pen.palette
        lines = pen.text(f"Step {step.step}. {step.verdict}", width, colors.strong)
        if step.started_at is None:
            lines += pen.text("This dump has no start times; bars start at 0.", width, colors.muted)
        lines += stage_legend(colors, step.by_stage, width)
        shown = "" if self.count == step.requests else f", {self.count} of them shown"
        began = "" if step.started_at is None else f", from {_clock(step.started_at)}"
        left = f"{counted(step.requests, 'request')}{shown}{began}"
        right = format_seconds(step.seconds)
        room = max(1, width - len(left) - len(right))
        return [*lines, [], [Segment(f"{left}{' ' * room}{right}", colors.muted)]]

    def line(self, at: int, width: int, colors: Palette) -> Line:
        one = self._requests[at]
        room = max(8, width - _NAME - _TIME - 2)
        last = one.number == self._step.critical.number
        return [
            Segment(fitted(one_line(one.request_id), _NAME), colors.strong if last else colors.muted),
            Segment(" "),
            *_bar(one, self._start(one), self._step.seconds, room, colors),
            Segment(f" {format_seconds(one.seconds) + (' ◀' if last else ''):>{_TIME}}", colors.text),
        ]

    def _start(self, one: RequestTimeline) -> float:
        """Seconds after the beginning of the step."""
        first = self._step.started_at
        return 0.0 if first is None or one.started_at is None else one.started_at - first

    def details(self, at: int) -> str:
        one = self._requests[at]
        row = None if one.number is None else self._row_of(one.number)
        stages = sorted(stage_seconds(one).items(), key=lambda item: -item[1])[:_STAGES]
        spent = " · ".join(f"{name} {format_seconds(seconds)}" for name, seconds in stages)
        start = "" if self._step.started_at is None else f" · began after {format_seconds(self._start(one))}"
        last = " · ◀ the step waited for it" if one.number == self._step.critical.number else ""
        return f"{one_line(one.request_id)}{start}{last}\n{spent}\n{one_line(row.preview, 70) if row else ''}"

    def goal(self, at: int) -> Goal | None:
        number = self._requests[at].number
        return None if number is None else Goal(number=number)

    def key(self, at: int) -> Hashable:
        return self._requests[at].number


def _clock(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g} s"


def _bar(one: RequestTimeline, start: float, total: float, width: int, colors: Palette) -> Line:
    """Its stages at their places: each cell shows the one that takes most of it."""
    if not 0 < total < math.inf:
        return [Segment(" " * width)]
    cells: list[tuple[float, Stage | None]] = [(0.0, None)] * width
    scale = width / total
    for segment in one.segments:
        low, high = ((start + end) * scale for end in (segment.start, segment.end))
        for at in range(max(0, int(low)), min(width, math.ceil(high))):
            cells[at] = max(cells[at], (min(high, at + 1) - max(low, at), segment.stage), key=lambda cell: cell[0])
    return [
        Segment(STAGE_SIGNS[stage] * len(list(run)), colors.stages[stage]) if stage else Segment(" " * len(list(run)))
        for stage, run in groupby(stage for _, stage in cells)
    ]
