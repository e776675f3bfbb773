"""Draws an evaluation: values with their intervals, overall and by tag; or two runs with their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from toolyard.errors import ConfigError, MissingDependencyError
from toolyard.evaluation.comparison import Comparison
from toolyard.evaluation.estimators import Interval
from toolyard.evaluation.results import MEAN, Evaluation
from toolyard.whole_file import whole_file

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingDependencyError("matplotlib", "pictures", "--picture") from error

_BEFORE, _AFTER, _DIFFERENCE = "#8c8c8c", "#4c72b0", "#c44e52"
_MOST_ROWS = 30
"""Slices of a tag that are drawn; others are in the JSON."""
_ROW_INCHES, _FRAME_INCHES = 0.28, 1.1
_FORMATS = (".png", ".svg", ".pdf")


class _Mark(NamedTuple):
    value: float | None
    interval: Interval | None


class _Panel(NamedTuple):
    title: str
    rows: Sequence[str]
    series: Mapping[str, Sequence[_Mark]]
    """The marks of each row, by the name of the series."""
    differences: Sequence[_Mark] | None = None


def draw(result: Evaluation | Comparison, path: Path) -> None:
    """Write the picture, replacing an old one atomically. The format is that of the suffix.

    Raises:
        ConfigError: the suffix is unknown, or the file cannot be written.
    """
    if path.suffix not in _FORMATS:
        raise ConfigError(f"--picture {path}: its name must end in {', '.join(_FORMATS)}")
    panels = _compared(result) if isinstance(result, Comparison) else _evaluated(result)
    sides = 2 if isinstance(result, Comparison) else 1
    heights = [_ROW_INCHES * len(panel.rows) * len(panel.series) + _FRAME_INCHES for panel in panels]
    figure = Figure(figsize=(7.5 * sides, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(panels), sides, squeeze=False, height_ratios=heights)
    for panel, row in zip(panels, axes, strict=True):
        _values(row[0], panel)
        if panel.differences is not None:
            _differences(row[1], panel, panel.differences)
    drawn: Any = figure
    with whole_file(path) as file:
        drawn.savefig(file, format=path.suffix[1:], dpi=110)


def _evaluated(found: Evaluation) -> list[_Panel]:
    marks = {name: _Mark(one.value, one.interval) for name, one in found.whole.estimates.items()}
    panels = [_Panel(f"{found.name}, {found.whole.tasks} tasks", list(marks), {found.name: list(marks.values())})]
    for tag, slices in found.by.items():
        shown = slices[:_MOST_ROWS]
        means = [_Mark(*one.estimates[MEAN][:2]) for one in shown]
        rows = [f"{one.value} ({one.tasks})" for one in shown]
        panels.append(_Panel(f"mean reward by {tag} (tasks)", rows, {found.name: means}))
    return panels


def _compared(found: Comparison) -> list[_Panel]:
    names = found.before.name, found.after.name
    whole = found.whole.differences
    panels = [_panel(f"{found.whole.tasks} tasks of both", list(whole), list(whole.values()), names)]
    for tag, slices in found.by.items():
        shown = slices[:_MOST_ROWS]
        rows = [f"{one.value} ({one.tasks})" for one in shown]
        if rows:
            means = [one.differences[MEAN] for one in shown]
            panels.append(_panel(f"mean reward by {tag} (tasks)", rows, means, names))
    return panels


def _panel(title: str, rows: Sequence[str], differences: Sequence[Any], names: tuple[str, str]) -> _Panel:
    series = {
        names[0]: [_Mark(one.before, None) for one in differences],
        f"{names[1]} ": [_Mark(one.after, None) for one in differences],  # the names of both may be equal
    }
    return _Panel(title, rows, series, [_Mark(one.difference, one.interval) for one in differences])


def _values(axis: Any, panel: _Panel) -> None:
    axis.set_title(panel.title)
    colors = (_AFTER,) if len(panel.series) == 1 else (_BEFORE, _AFTER)
    for number, (name, marks) in enumerate(panel.series.items()):
        _marks(axis, marks, colors[number], name.strip(), offset=0.25 * (number - (len(panel.series) - 1) / 2))
    _rows(axis, panel.rows)
    if len(panel.series) > 1:
        axis.legend(frameon=False, fontsize="small", loc="best")


def _differences(axis: Any, panel: _Panel, marks: Sequence[_Mark]) -> None:
    axis.set_title("difference, with its 95 % interval")
    _marks(axis, marks, _DIFFERENCE, "", offset=0.0)
    axis.axvline(0.0, color="black", linewidth=0.8)
    _rows(axis, panel.rows)


def _marks(axis: Any, marks: Sequence[_Mark], color: str, name: str, *, offset: float) -> None:
    known = [(place + offset, mark.value, mark.interval) for place, mark in enumerate(marks) if mark.value is not None]
    axis.plot([value for _, value, _ in known], [place for place, *_ in known], "o", color=color, label=name)
    for place, _, interval in known:
        if interval is not None:
            axis.plot(list(interval), [place, place], color=color, linewidth=1.5)


def _rows(axis: Any, rows: Sequence[str]) -> None:
    # A text between dollar signs would be read as a formula.
    axis.set_yticks(range(len(rows)), [row.replace("$", r"\$") for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.grid(alpha=0.3, axis="x")
