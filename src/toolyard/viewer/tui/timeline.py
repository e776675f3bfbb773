"""Timelines of a request and its step, as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.segment import Segment
from rich.style import Style

from toolyard.viewer.protocol import RequestTimeline, Stage, StepTimeline
from toolyard.viewer.tui.drawing import Line, Pen, clipped, filled, length
from toolyard.viewer.tui.palette import Palette
from toolyard.viewer.tui.text import counted, fitted, format_seconds, one_line

_EIGHTHS = " ▏▎▍▌▋▊▉"
_NAME = 14
_TIME = 9
_MOST_ROWS = 400
_LABELLED_WIDTH = 64
_SLIVER = 0.2
_LEAST = 0.0005
"""Shorter stages, in seconds, are not shown."""
_STAGES = {stage.value: stage for stage in Stage}
STAGE_SIGNS = {
    Stage.QUEUE: "░",
    Stage.ENGINE: "█",
    Stage.LIMITER: "▒",
    Stage.TOOL: "▓",
    Stage.INTERACTION: "▚",
    Stage.REWARD: "▞",
    Stage.OTHER: "·",
}
"""Stages can be told apart without colors."""


def stacked_bar(palette: Palette, stages: Mapping[str, float], total: float, width: int) -> Line:
    """A bar of `width` cells for `total` seconds. Stages shorter than a cell get the thinnest block."""
    if not 0 < total < math.inf:
        return []
    bar: Line = []
    used, so_far = 0, 0.0
    for name, seconds in _noticeable(stages).items():
        so_far += seconds
        end = round(min(so_far / total, 1.0) * width)
        size = max(end - used, 0)
        if size:
            bar.append(Segment(_sign(name) * size, _ink(palette, name)))
        elif used < width and seconds / total * width > _SLIVER:
            bar.append(Segment("▏", _ink(palette, name)))
            size = 1
        used += size
    return bar


def stage_legend(palette: Palette, stages: Mapping[str, float], width: int) -> list[Line]:
    """The legend of a stacked bar: colors, stages and times."""
    lines: list[Line] = [[]]
    for name, seconds in sorted(_noticeable(stages).items(), key=lambda item: -item[1]):
        entry: Line = [
            Segment(f"{_sign(name) * 2} ", _ink(palette, name)),
            Segment(f"{name} ", palette.muted),
            Segment(format_seconds(seconds), palette.text),
        ]
        if lines[-1] and length(lines[-1]) + 3 + length(entry) > width:
            lines.append([])
        lines[-1] += [Segment("   "), *entry] if lines[-1] else entry
    return lines


def request_lines(pen: Pen, timeline: RequestTimeline, width: int) -> list[Line]:
    """Each stage at its place in the request's time."""
    palette = pen.palette
    if not timeline.segments:
        return [[Segment("No timings in this dump", palette.muted)]]
    room = max(8, width - _NAME - _TIME - 2)
    label_room = min(36, room // 3) if width >= _LABELLED_WIDTH else 0
    room -= label_room
    lines: list[Line] = []
    told = [one for one in timeline.segments if one.end - one.start >= _LEAST] or timeline.segments
    for segment in told[:_MOST_ROWS]:
        name = segment.stage.value if segment.turn is None else f"{segment.stage.value} {segment.turn + 1}"
        lines.append(
            [
                Segment(fitted(name, _NAME), palette.muted),
                *filled(
                    _placed(segment.start, segment.end, timeline.seconds, room, palette.stages[segment.stage]), room
                ),
                Segment(f" {format_seconds(segment.end - segment.start):>{_TIME - 1}} ", palette.text),
                Segment(fitted(one_line(segment.label), label_room), palette.faint),
            ]
        )
    if len(told) > _MOST_ROWS:
        lines.append([Segment(f"… {counted(len(told) - _MOST_ROWS, 'more stage')}", palette.accent)])
    if timeline.estimated:
        lines.append([])
        lines += pen.text(
            "The dump has durations but no start times: stages are drawn one after the other.", width, palette.faint
        )
    return lines


def step_lines(pen: Pen, step: StepTimeline, chosen: int | None, width: int) -> list[Line]:
    """What the step waited for. `chosen`: the row that is being viewed."""
    palette = pen.palette
    lines = pen.text(step.verdict, width, palette.strong)
    lines += [[], [Segment(f"Total of {counted(step.requests, 'request')}", palette.muted)]]
    total = sum(step.by_stage.values())
    lines += [stacked_bar(palette, step.by_stage, total, width), *stage_legend(palette, step.by_stage, width), []]
    lines.append(
        [Segment("Critical path: ", palette.muted), Segment(one_line(step.critical.request_id), palette.strong)]
    )
    lines[-1] = clipped(lines[-1], width)
    lines += [
        stacked_bar(palette, step.critical_by_stage, step.seconds, width),
        *stage_legend(palette, step.critical_by_stage, width),
        [],
        [Segment("Slowest requests", palette.muted)],
    ]
    room = max(8, width - _NAME - _TIME - 2)
    for one in step.slowest:
        here = one.number is not None and one.number == chosen
        bar = stacked_bar(palette, _in_order(one), step.seconds, room)
        lines.append(
            [
                Segment("▸" if here else " ", palette.accent),
                Segment(fitted(one_line(one.request_id), _NAME - 2) + " ", palette.strong if here else palette.muted),
                *filled(bar, room),
                Segment(f" {format_seconds(one.seconds):>{_TIME - 1}}", palette.text),
            ]
        )
    return lines


def _noticeable(stages: Mapping[str, float]) -> Mapping[str, float]:
    """The stages that took noticeable time, or all stages if none did."""
    return {name: seconds for name, seconds in stages.items() if seconds >= _LEAST} or stages


def _in_order(timeline: RequestTimeline) -> dict[str, float]:
    stages = {stage.value: 0.0 for stage in Stage}
    for segment in timeline.segments:
        stages[segment.stage.value] += segment.end - segment.start
    return {name: seconds for name, seconds in stages.items() if seconds > 0}


def _placed(start: float, end: float, total: float, width: int, ink: Style) -> Line:
    """A bar from `start` to `end`: its start to the nearest cell, its end to an eighth of a cell."""
    if not 0 < total < math.inf:
        return []
    start, end = min(start, total), min(end, total)
    scale = width / total
    first = min(int(start * scale), width - 1)
    eighths = max(1, min(round((end - start) * scale * 8), (width - first) * 8))
    whole, part = divmod(eighths, 8)
    return [Segment(" " * first), Segment("█" * whole + (_EIGHTHS[part] if part else ""), ink)]


def _sign(stage: str) -> str:
    return STAGE_SIGNS[_STAGES.get(stage, Stage.OTHER)]


def _ink(palette: Palette, stage: str) -> Style:
    return palette.stages[_STAGES.get(stage, Stage.OTHER)]
