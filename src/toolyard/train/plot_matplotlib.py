"""Plots a run's metrics: rewards, tool use, lengths, times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from toolyard.messages import JSON

_SMOOTHED_OVER = 10
"""Steps. Runs with fewer than twice as many are not smoothed."""
_STAGES = ("sync", "generating", "tool_calling", "reward", "other", "update")
_COLOURS = ("#8c8c8c", "#4c72b0", "#dd8452", "#c44e52", "#ccb974", "#55a868")


def draw(lines: Sequence[JSON], evaluations: Sequence[JSON], path: Path) -> None:
    """Write the plot as PNG, replacing an old one atomically. Without steps there is no plot."""
    if not lines:
        return
    further = {"dynamic_sampling": _groups, "staleness": _staleness}
    extra = [drawn for key, drawn in further.items() if any(key in line for line in lines)]
    columns = 4 if extra else 3
    figure = Figure(figsize=(13 * columns / 3, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, columns)
    _curve(axes[0, 0], lines, "reward", "reward", evaluations)
    _curve(axes[0, 1], lines, "tool_calls", "tool calls per trajectory", evaluations)
    _curve(axes[0, 2], lines, "calls_ok", "call success", evaluations)
    axes[0, 2].set_ylim(-0.03, 1.03)
    _lengths(axes[1, 0], lines)
    _times(axes[1, 1], lines)
    _curve(axes[1, 2], lines, "loss", "loss")
    for row in range(2 if extra else 0):
        if row < len(extra):
            extra[row](axes[row, 3], lines)
        else:
            axes[row, 3].remove()
    shown: list[Any] = list(figure.axes)
    for axis in shown:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    new = path.with_suffix(".new")
    written: Any = figure
    written.savefig(new, format="png", dpi=110)
    new.replace(path)


def _curve(axis: Any, lines: Sequence[JSON], key: str, title: str, evaluations: Sequence[JSON] = ()) -> None:
    axis.set_title(title)
    steps, values = _series(lines, key)
    smooth = _smoothed(values)
    axis.plot(steps, values, color="#4c72b0", alpha=0.35 if smooth else 1.0, marker="" if len(steps) > 50 else ".")
    if smooth:
        axis.plot(steps, smooth, color="#4c72b0")
    at, found = _series(evaluations, key)
    if at:
        axis.plot(at, found, color="#c44e52", marker="o", linestyle="--", label="evaluation")
        axis.legend(frameon=False)


def _lengths(axis: Any, lines: Sequence[JSON]) -> None:
    axis.set_title("tokens per trajectory")
    for key, label in (("response_tokens", "response"), ("sampled_tokens", "sampled")):
        axis.plot(*_series(lines, key), label=label)
    axis.legend(frameon=False)


def _groups(axis: Any, lines: Sequence[JSON]) -> None:
    axis.set_title("groups per step")
    for key in ("sampled", "flat", "replaced"):
        axis.plot(*_series([{**line, **line.get("dynamic_sampling", {})} for line in lines], key), label=key)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)


def _staleness(axis: Any, lines: Sequence[JSON]) -> None:
    axis.set_title("updates since a token's weights")
    for key in ("max", "mean"):
        axis.plot(*_series([{**line, **line.get("staleness", {})} for line in lines], key), label=key)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)


def _times(axis: Any, lines: Sequence[JSON]) -> None:
    """Seconds per step. Requests run concurrently: a rollout's wall time is split in proportion to their stages."""
    axis.set_title("seconds per step")
    shares = [_stages(line) for line in lines]
    used = [(stage, colour) for stage, colour in zip(_STAGES, _COLOURS, strict=True) if any(s[stage] for s in shares)]
    if used:
        axis.stackplot(
            [line["step"] for line in lines],
            [[share[stage] for share in shares] for stage, _ in used],
            labels=[stage.replace("_", " ") for stage, _ in used],
            colors=[colour for _, colour in used],
        )
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small", loc="lower left")


def _stages(line: JSON) -> dict[str, float]:
    seconds, requests = line["seconds"], line["request_seconds"]
    whole = sum(requests.values())
    scale = seconds.get("rollout", 0.0) / whole if whole else 0.0
    found = {stage: scale * requests.get(stage, 0.0) for stage in ("generating", "tool_calling", "reward")}
    other = seconds.get("rollout", 0.0) - sum(found.values())
    return {"sync": seconds.get("sync", 0.0), **found, "other": other, "update": seconds.get("update", 0.0)}


def _series(lines: Sequence[JSON], key: str) -> tuple[list[int], list[float]]:
    known = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in known], [value for _, value in known]


def _smoothed(values: Sequence[float]) -> list[float]:
    """A running mean; empty if there are too few values."""
    if len(values) < 2 * _SMOOTHED_OVER:
        return []
    windows = (values[max(0, end - _SMOOTHED_OVER) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
