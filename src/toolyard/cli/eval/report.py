"""What `toolyard eval` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolyard.cli.console import err, marked, new_table, out, print_json
from toolyard.evaluation.comparison import ComparedSlice, Comparison, Difference
from toolyard.evaluation.estimators import Interval
from toolyard.evaluation.results import MEAN, Estimate, Evaluation, Slice

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MOST_ROWS = 40
_CHANCE = 0.05


def print_result(result: Evaluation | Comparison, *, as_json: bool, picture: Path | None) -> int:
    """Print tables, or JSON. Returns the exit status."""
    if isinstance(result, Comparison):
        has_result = result.whole.tasks > 0 and result.whole.differences[MEAN].difference is not None
    else:
        has_result = result.whole.estimates[MEAN].value is not None
    if as_json:
        print_json(result.as_json())
    elif isinstance(result, Comparison):
        _print_comparison(result, out())
    else:
        _print_evaluation(result, out())
    if picture is not None:
        err().print(f"picture: {picture}", markup=False)
    return 0 if has_result else 1


def _print_evaluation(found: Evaluation, console: Console) -> None:
    _print_size(found, console)
    table = new_table("", "value", "95 % interval", "tasks")
    for name, estimate in found.whole.estimates.items():
        table.add_row(_metric(name), _number(estimate.value), _interval(estimate.interval), f"{estimate.tasks:,}")
    console.print(table)
    for tag, slices in found.by.items():
        _print_slices(found, tag, slices, console)
    _print_notes(found.notes, console)


def _print_slices(found: Evaluation, tag: str, slices: Sequence[Slice], console: Console) -> None:
    passes = [f"pass@{k}" for k in found.ks]
    table = new_table(tag, "tasks", "samples", "mean reward", "95 % interval", *passes)
    for one in slices[:_MOST_ROWS]:
        whole: Estimate = one.estimates[MEAN]
        numbers = [_number(one.estimates[name].value) for name in passes]
        samples = f"{one.attempts - sum(one.without_reward.values()):,}"
        table.add_row(
            marked(one.value), f"{one.tasks:,}", samples, _number(whole.value), _interval(whole.interval), *numbers
        )
    _print_rows(table, len(slices), console)


def _print_comparison(found: Comparison, console: Console) -> None:
    _print_size(found.before, console)
    _print_size(found.after, console)
    only = [
        f"{count:,} only in {one.name}"
        for count, one in ((found.only_before, found.before), (found.only_after, found.after))
        if count
    ]
    both = f"{_counted(found.whole.tasks, 'task')} in both" + (f", {', '.join(only)}" if only else "")
    console.print(both, style="yellow" if only else "", markup=False, soft_wrap=True)
    if not found.whole.tasks:
        console.print(
            "no task is in both dumps: tasks are paired by id, or by prompt if lines have none", style="bold red"
        )
    else:
        table = new_table("", "before", "after", "difference", "95 % interval", "p", "better", "worse", "tasks")
        for name, one in found.whole.differences.items():
            table.add_row(_metric(name), *_difference(one), f"{one.tasks:,}")
        console.print(table)
    for tag, slices in found.by.items():
        if slices:
            _print_compared(tag, slices, console)
    _print_notes(found.notes, console)


def _print_compared(tag: str, slices: Sequence[ComparedSlice], console: Console) -> None:
    table = new_table(tag, "before", "after", "difference", "95 % interval", "p", "better", "worse", "tasks")
    for one in slices[:_MOST_ROWS]:
        table.add_row(marked(one.value), *_difference(one.differences[MEAN]), f"{one.tasks:,}")
    _print_rows(table, len(slices), console)


def _print_rows(table: Table, count: int, console: Console) -> None:
    console.print(table)
    if count > _MOST_ROWS:
        console.print(f"and {count - _MOST_ROWS} more: use --json", style="dim")


def _print_size(found: Evaluation, console: Console) -> None:
    whole = found.whole
    without = sum(whole.without_reward.values())
    size = f"{_counted(whole.tasks, 'task')}, {_counted(whole.attempts, 'sample')} ({_per_task(whole.samples)})"
    console.print(f"{found.name}: {size}", markup=False, soft_wrap=True)
    if without:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in whole.without_reward.items())
        console.print(
            f"{_counted(without, 'sample')} without a reward left out: {reasons}",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


def _per_task(samples: Mapping[int, int]) -> str:
    """How many samples with a reward tasks have."""
    if len(samples) == 1:
        return f"{next(iter(samples))} per task"
    least, most = min(samples), max(samples)
    usual = max(samples, key=lambda count: (samples[count], count))
    return f"{least} to {most} with a reward per task, most often {usual}"


def _print_notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        console.print(note, style="yellow", markup=False, soft_wrap=True)


def _difference(one: Difference) -> list[str]:
    change = "–" if one.difference is None else f"{one.difference:+.4f}"
    p = "–" if one.p is None else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"
    p = f"[bold]{p}[/]" if one.p is not None and one.p < _CHANCE else p
    interval = "–" if one.interval is None else f"{one.interval.low:+.4f} … {one.interval.high:+.4f}"
    return [_number(one.before), _number(one.after), change, interval, p, f"{one.better:,}", f"{one.worse:,}"]


def _metric(name: str) -> str:
    return "mean reward" if name == MEAN else name


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _interval(found: Interval | None) -> str:
    return "–" if found is None else f"{found.low:.4f} … {found.high:.4f}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
