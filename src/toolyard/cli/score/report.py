"""What `toolyard score` prints: how many scores changed, which changed most, and why some could not be computed."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolyard.cli.console import new_table, print_json, printable
from toolyard.cli.outcomes import duration
from toolyard.rewards.combination import Weights
from toolyard.rollout.rescore.scoring import Change, MissingInput, Rescored, Rescoring
from toolyard.rollout.summary import RunningStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GIVEN = "given"
"""`weights_are` if the weights are from the command line."""
_WHY_CHARS = 200
_REASONS = 50
"""Maximum number of different reasons to count; more are probably variants of one message."""
_OTHER_REASONS = "other reasons"
_STEPS = 40
"""Maximum rows of the table."""
_CHANGED = (Change.UP, Change.DOWN, Change.NEWLY_SCORED, Change.NEWLY_ABSENT)
_ALWAYS_SHOWN = (Change.UNCHANGED, Change.UP, Change.DOWN)


@dataclass(slots=True)
class Tally:
    """The counts of one step, or of all steps."""

    changes: Counter[Change] = field(default_factory=Counter[Change])
    before: RunningStats = field(default_factory=RunningStats)
    after: RunningStats = field(default_factory=RunningStats)

    @property
    def trajectories(self) -> int:
        return self.changes.total()

    @property
    def changed(self) -> int:
        return sum(self.changes[change] for change in _CHANGED)

    def add(self, rescored: Rescored) -> None:
        self.changes[rescored.change] += 1
        for spread, score in ((self.before, rescored.trajectory.score), (self.after, rescored.score)):
            if score is not None:
                spread.add(score)

    def as_json(self) -> dict[str, Any]:
        return {
            "trajectories": self.trajectories,
            "changed": self.changed,
            **{change.replace(" ", "_"): self.changes[change] for change in Change},
            "scores_before": self.before.count,
            "scores_after": self.after.count,
            "mean_before": self.before.mean if self.before.count else None,
            "mean_after": self.after.mean if self.after.count else None,
        }


@dataclass(frozen=True, slots=True)
class Changed:
    """A trajectory whose score changed."""

    file: str
    line: int
    request_id: str
    step: int
    before: float | None
    after: float | None
    why: str

    @property
    def place(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass(slots=True)
class ScoreReport:
    """The report of a run, updated with each trajectory. It keeps counts and the largest changes, so it stays small."""

    dump: str
    reward: str
    options: dict[str, Any]
    weights: Weights
    weights_are: str
    """Where they come from."""
    top: int
    out: str | None = None
    partial: str | None = None
    total: Tally = field(default_factory=Tally)
    steps: dict[int, Tally] = field(default_factory=dict[int, Tally])
    unscored: Counter[str] = field(default_factory=Counter[str])
    """Number of trajectories by reason."""
    examples: dict[str, str] = field(default_factory=dict[str, str])
    """The first place of each reason."""
    damaged: list[str] = field(default_factory=list[str])
    damaged_lines: int = 0
    notes: list[str] = field(default_factory=list[str])
    interrupted: bool = False
    seconds: float = 0.0
    _largest: list[tuple[float, int, Changed]] = field(default_factory=list[tuple[float, int, Changed]])

    def add(self, rescored: Rescored) -> None:
        self.total.add(rescored)
        self.steps.setdefault(rescored.trajectory.step, Tally()).add(rescored)
        if rescored.change in _CHANGED:
            self._keep(rescored)
        if rescored.change in (Change.NEWLY_ABSENT, Change.STILL_ABSENT):
            reason = one_line(rescored.why)
            if reason not in self.unscored and len(self.unscored) >= _REASONS:
                reason = _OTHER_REASONS
            self.unscored[reason] += 1
            self.examples.setdefault(reason, f"{rescored.path.name}:{rescored.number}")

    def _keep(self, rescored: Rescored) -> None:
        before, after, trajectory = rescored.trajectory.score, rescored.score, rescored.trajectory
        size = abs((after or 0.0) - (before or 0.0))
        changed = Changed(
            str(rescored.path),
            rescored.number,
            trajectory.request_id,
            trajectory.step,
            before,
            after,
            one_line(rescored.why),
        )
        # Among equal changes, keep the first.
        heapq.heappush(self._largest, (size, -self.total.trajectories, changed))
        if len(self._largest) > self.top:
            heapq.heappop(self._largest)

    @property
    def largest(self) -> list[Changed]:
        return [changed for _, _, changed in sorted(self._largest, key=lambda kept: kept[:2], reverse=True)]

    def end(self, scoring: Rescoring, reads_the_task: bool) -> None:
        self.interrupted = scoring.stopped
        self.damaged, self.damaged_lines = scoring.damaged, scoring.damaged_lines
        missing = scoring.missing_inputs
        if reads_the_task and (count := missing[MissingInput.DATA_SOURCE]):
            self.notes.append(f"{count} lines have no data source: the reward got 'unknown' (set --data-source)")
        if reads_the_task and (count := missing[MissingInput.EXTRA_INFO]):
            self.notes.append(f"{count} lines have no extra_info: the reward got an empty one")
        if count := missing[MissingInput.MESSAGES]:
            self.notes.append(f"{count} lines have no turns: their whole output was scored as the model's answer")
        if scoring.unexplained and self.weights_are != GIVEN:
            self.notes.append(
                f"scores in the dump that do not match the weights {self.weights_are}: {scoring.unexplained}; they may "
                "have changed for that reason alone (set --weight)"
            )

    @property
    def good(self) -> bool:
        """Whether every trajectory that should have a score has one."""
        return not self.damaged_lines and not self.unscored

    def as_json(self) -> dict[str, Any]:
        return {
            "dump": self.dump,
            "reward": self.reward,
            "options": self.options,
            "weights": self.weights.model_dump(),
            "weights_are": self.weights_are,
            "out": self.out,
            "partial": self.partial,
            "interrupted": self.interrupted,
            **self.total.as_json(),
            "steps": [{"step": step, **self.steps[step].as_json()} for step in sorted(self.steps)],
            "changes": [
                {
                    "file": changed.file,
                    "line": changed.line,
                    "request_id": changed.request_id,
                    "step": changed.step,
                    "before": changed.before,
                    "after": changed.after,
                    "why": changed.why,
                }
                for changed in self.largest
            ],
            "unscored": [
                {"why": why, "trajectories": count, "first": self.examples[why]}
                for why, count in self.unscored.most_common()
            ],
            "damaged_lines": self.damaged_lines,
            "damaged": self.damaged,
            "notes": self.notes,
            "wall_seconds": round(self.seconds, 3),
        }


def one_line(why: str) -> str:
    """`why` as one short line: the first and the last line of a traceback. Escape sequences are escaped."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    text = lines[0] if len(lines) == 1 else f"{lines[0]}: {lines[-1]}" if lines else ""
    text = printable(text)
    return text if len(text) <= _WHY_CHARS else f"{text[:_WHY_CHARS]}…"


# Printing -------------------------------------------------------------------------------------------------------------


def print_report(report: ScoreReport, console: Console | None) -> None:
    """Print tables to `console`, or JSON to stdout if it is None."""
    if console is None:
        print_json(report.as_json())
        return
    from rich.markup import escape

    if report.total.trajectories:
        console.print(_by_step(report))
        if report.largest:
            console.print(_changes(report))
    for why, count in report.unscored.most_common():
        console.print(f"[red]{count} without a score[/]: {escape(why)} [dim](first: {report.examples[why]})[/]")
    for damaged in report.damaged:
        console.print(f"[red]damaged[/]: {escape(one_line(damaged))}", soft_wrap=True)
    if report.damaged_lines > len(report.damaged):
        console.print(f"[red]damaged[/]: {report.damaged_lines - len(report.damaged)} more")
    for note in report.notes:
        console.print(note, style="yellow", markup=False)
    console.print(_totals(report))
    if report.out is not None:
        console.print(f"written: [bold]{escape(report.out)}[/]" + _left_out(report))
        if report.partial is not None:
            console.print(f"unfinished file: {escape(report.partial)}", style="yellow")


def _by_step(report: ScoreReport) -> Table:
    shown = [change for change in Change if change in _ALWAYS_SHOWN or report.total.changes[change]]
    table = new_table("step", "trajectories", *shown, "mean before", "mean after")
    steps = sorted(report.steps)
    rows = [(str(step), report.steps[step]) for step in steps[-_STEPS:]]
    if len(steps) > _STEPS:
        table.add_row(f"[dim]{len(steps) - _STEPS} earlier steps: use --json[/]")
    if len(steps) > 1:
        rows.append(("all", report.total))
    for name, tally in rows:
        counts = [str(tally.changes[change]) if tally.changes[change] else "–" for change in shown]
        means = [f"{spread.mean:.4f}" if spread.count else "–" for spread in (tally.before, tally.after)]
        table.add_row(name, str(tally.trajectories), *counts, *means, style="bold" if name == "all" else "")
    return table


def _changes(report: ScoreReport) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for title in ("line", "request", "before", "after"):
        table.add_column(title, justify="right" if title in ("before", "after") else "left", no_wrap=True)
    explained = any(changed.why for changed in report.largest)
    if explained:
        table.add_column("why", overflow="fold")
    for changed in report.largest:
        scores = [_score(changed.before), _score(changed.after)]
        why = [escape(changed.why)] if explained else []
        table.add_row(escape(changed.place), escape(one_line(changed.request_id)), *scores, *why)
    hidden = report.total.changed - len(report.largest)
    if hidden:
        table.caption = f"and {hidden} more; --top {report.total.changed} shows all"
        table.caption_justify = "left"
    return table


def _totals(report: ScoreReport) -> str:
    total = report.total
    means = [f"{spread.mean:.4f}" if spread.count else "none" for spread in (total.before, total.after)]
    text = f"{total.trajectories - total.changes[Change.LEFT]} scored again with {report.reward} in "
    text += f"{duration(report.seconds)}: {total.changed} changed; mean {means[0]} → {means[1]}"
    text += "; interrupted" if report.interrupted else ""
    from rich.markup import escape

    return f"{'[bold green]✔' if report.good else '[bold red]✘'} {escape(text)}.[/]"


def _left_out(report: ScoreReport) -> str:
    return f", without the {report.damaged_lines} damaged lines" if report.damaged_lines else ""


def _score(value: float | None) -> str:
    return "absent" if value is None else f"{value:.4g}"
