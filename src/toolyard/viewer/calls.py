"""Tool calls by tool: verdicts, times, and errors grouped by their last line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple

from toolyard.viewer.protocol import CallErrors, CallReport, SlowCall, ToolCalls

_ERRORS = 100
_SLOWEST = 50


class Call(NamedTuple):
    """A row of the index's calls."""

    number: int
    turn: int
    tool: str
    verdict: str
    failed: bool
    seconds: float | None
    wait: float | None
    error: str


@dataclass(slots=True)
class _Tool:
    verdicts: Counter[str] = field(default_factory=Counter[str])
    failed: int = 0
    seconds: list[float] = field(default_factory=list[float])
    waits: list[float] = field(default_factory=list[float])


def report_of(calls: Iterable[Call]) -> CallReport:
    tools = defaultdict[str, _Tool](_Tool)
    errors: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], Call] = {}
    timed: list[Call] = []
    for call in calls:
        tool = tools[call.tool]
        tool.verdicts[call.verdict] += 1
        if call.seconds is not None:
            tool.seconds.append(call.seconds)
            timed.append(call)
        if call.wait is not None:
            tool.waits.append(call.wait)
        if call.failed:
            tool.failed += 1
            error = call.tool, call.error or call.verdict
            errors[error] += 1
            examples.setdefault(error, call)
    slowest = nlargest(_SLOWEST, timed, key=lambda call: call.seconds or 0.0)
    return CallReport(
        tuple(sorted((_summary(name, tool) for name, tool in tools.items()), key=lambda one: (-one.calls, one.tool))),
        tuple(
            CallErrors(*error, count, example.number, example.turn, example.verdict)
            for error, count in errors.most_common(_ERRORS)
            for example in [examples[error]]
        ),
        tuple(SlowCall(one.number, one.turn, one.tool, one.verdict, one.seconds or 0.0, one.wait) for one in slowest),
    )


def _summary(name: str, tool: _Tool) -> ToolCalls:
    seconds, waits = sorted(tool.seconds), sorted(tool.waits)
    return ToolCalls(
        name,
        tool.verdicts.total(),
        tool.failed,
        dict(tool.verdicts.most_common()),
        _percentile(seconds, 0.5),
        _percentile(seconds, 0.95),
        seconds[-1] if seconds else None,
        _percentile(waits, 0.5),
        _percentile(waits, 0.95),
    )


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed."""
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)] if ordered else None
