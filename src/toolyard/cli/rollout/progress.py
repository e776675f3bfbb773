"""What `toolyard rollout` shows: progress while it runs, a summary at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from toolyard.cli.outcomes import duration
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.faults.report import FaultReport
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.observer import Observer, Running
from toolyard.rollout.run import RolloutResult, run_rollouts
from toolyard.rollout.run_many import Stuck
from toolyard.rollout.summary import Accounting, Summary
from toolyard.supervision import Stall

if TYPE_CHECKING:
    from rich.console import Console

_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 10.0
"""Interval of progress lines when the output is not a terminal."""
_RATE_SECONDS = 10.0
"""Window over which rates are computed."""
_LIVE = (RolloutState.PENDING, RolloutState.GENERATING, RolloutState.TOOL_CALLING, RolloutState.INTERACTING)


def default_folder() -> str:
    return f"rollouts/{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def embedded_defaults(config: RolloutConfig) -> str:
    """The settings of a run without a config file and a model of the user's own, in one line."""
    sampling, limits = config.sampling, config.limits
    role = ", tool results as user messages" if config.chat.tool_role == "user" else ""
    return (
        f"model {config.engine.model}; --format {config.chat.format}{role}; temperature {sampling.temperature:g}; "
        f"at most {limits.max_assistant_turns} messages of {sampling.max_tokens} tokens; {config.n} samples per task "
        "(--print-config shows all)"
    )


async def run(config: RolloutConfig, console: Console) -> tuple[RolloutResult, bool, float]:
    """Run with progress on `console`. Returns the result, whether Ctrl-C ended it, and the seconds it took."""
    board = _ProgressDisplay(console)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if board.interrupt():
            task.cancel()

    def interrupted(*_: object) -> None:
        if board.is_blocked:  # the event loop is blocked: interrupt whatever blocks it
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(interrupt)

    before = signal.signal(signal.SIGINT, interrupted)
    began = time.monotonic()
    drawing = asyncio.create_task(board.draw())
    # Ray prints news of its processes to stdout, which is for the result.
    apart = contextlib.nullcontext() if config.cluster is None else contextlib.redirect_stdout(sys.stderr)
    try:
        with apart:
            result = await run_rollouts(config, board)
    except asyncio.CancelledError:
        if board.interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        drawing.cancel()
        await asyncio.wait([drawing])
    return result, board.interrupted, time.monotonic() - began


class _ProgressDisplay(Observer):
    """Draws the progress of a run."""

    def __init__(self, console: Console) -> None:
        self.interrupted = False
        self._console = console
        self._run: Running | None = None
        self._summary = Summary()
        self._total = self._done = 0
        self._doing = "loading"
        self._blocked_at = ""
        self._counts: deque[tuple[float, int, int]] = deque()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task: TaskID | None = None

    def interrupt(self) -> bool:
        """Stop cleanly. Returns True if the run should be cancelled instead: the second time."""
        again, self.interrupted = self.interrupted, True
        if self._run is None or again:
            return True
        self._console.print(
            "Stopping: finished trajectories are kept, running ones aborted. Ctrl-C again to quit now.", style="yellow"
        )
        self._run.stop()
        return False

    @property
    def is_blocked(self) -> bool:
        return self._run is not None and self._run.is_blocked

    def note(self, text: str) -> None:
        self._doing = text
        self._console.print(escape(text), style="dim")

    def opened(self, total: int, done: int) -> None:
        self._total, self._done, self._doing = total, done, "opening the engine"
        if done:
            self._console.print(f"{done} of {total} trajectories are already in the dump", style="dim")
        self._task = self._bar.add_task("rollouts", total=total, completed=done)

    def began(self, run: Running) -> None:
        self._run = run

    def ended(self, trajectory: Trajectory, summary: Summary) -> None:
        self._summary = summary
        if self._task is not None:
            self._bar.advance(self._task)

    def told(self, kind: str, text: str) -> None:
        self._console.print(f"{kind}: {text}", style="bold yellow", markup=False)

    def stuck(self, stuck: Stuck) -> None:
        self._console.print(f"stuck: {stuck}", style="bold yellow", markup=False)

    def stalled(self, stall: Stall) -> None:
        self._console.print(f"blocked: {stall}", style="bold yellow", markup=False)
        if stall.line != self._blocked_at:  # print the stack only once
            self._console.print(stall.stack.rstrip(), style="yellow", markup=False)
        self._blocked_at = stall.line

    # ------------------------------------------------------------------------------------------------------- drawing
    async def draw(self) -> None:
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(_LINE_SECONDS)
                self._console.print(self._line())
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(Group(self._bar, Text.from_markup(self._line())), refresh=True)
                await asyncio.sleep(_REFRESH_SECONDS)

    def _line(self) -> str:
        if self._run is None:
            return escape(self._doing)
        states = self._run.states
        shown = "  ".join(f"{state.value.lower()} {states[state]}" for state in _LIVE if states[state])
        tokens, calls = self._rates()
        score = f"reward {self._summary.score.mean:.3f}" if self._summary.score.count else "reward –"
        failed = self._summary.trajectories - self._summary.completed
        done = f"{self._done + self._summary.trajectories}/{self._total} done" + (
            f", {failed} failed" if failed else ""
        )
        turns = self._summary.turns + self._run.live[0]
        return f"{done}  {shown}  turns {turns}  {tokens:.0f} tokens/s  {calls:.1f} tool calls/s  {score}"

    def _rates(self) -> tuple[float, float]:
        """Sampled tokens and tool calls per second, including those of running requests."""
        assert self._run is not None
        _, tokens, calls = self._run.live
        tokens += self._summary.sampled_tokens
        calls += sum(self._summary.outcomes.values())
        now = time.monotonic()
        self._counts.append((now, tokens, calls))
        while now - self._counts[0][0] > _RATE_SECONDS and len(self._counts) > 2:
            self._counts.popleft()
        then, tokens_then, calls_then = self._counts[0]
        seconds = max(now - then, 1e-9)
        return (0.0, 0.0) if now == then else ((tokens - tokens_then) / seconds, (calls - calls_then) / seconds)


# The summary ----------------------------------------------------------------------------------------------------------


def print_result(result: RolloutResult, seconds: float, console: Console | None) -> None:
    """Print tables to `console`, or JSON to stdout if it is None."""
    if console is None:
        print(json.dumps({**result.as_json(), "wall_seconds": round(seconds, 3)}, indent=2, ensure_ascii=False))  # noqa: T201
        return
    summary = result.summary
    if summary.trajectories:
        for table in (_rewards(summary), _finish_reasons(summary), _calls(summary), _times(summary, seconds)):
            if table.row_count:
                console.print(table)
    if result.faults is not None:
        _print_faults(result.faults, result.accounting, console)
    for what, count in summary.abandoned.most_common():
        console.print(f"[yellow]abandoned[/] {count} ×: {escape(what)}")
    for stall in result.stalls:
        console.print(f"[yellow]blocked[/]: {escape(str(stall))}")
    for reason, example in summary.failures.items():
        console.print(f"[red]{escape(reason)}[/], for example: {escape(example)}")
    failed = summary.trajectories - summary.completed
    text = f"{summary.trajectories} trajectories in {duration(seconds)}: {summary.completed} completed"
    text += f", {failed} failed" if failed else ""
    text += f"; {result.done_before} were already in the dump" if result.done_before else ""
    text += f"; {result.missing} remaining; run the same command to continue" if result.missing else ""
    good = (summary.completed or result.done_before) and not result.accounting.problems
    console.print(f"{'[bold green]✔' if good else '[bold red]✘'} {text}.[/]")
    console.print(f"accounting: {escape(str(result.accounting))}", soft_wrap=True)
    if result.dump is not None and (summary.trajectories or result.done_before):
        dump = escape(str(result.dump))
        console.print(f"dump: [bold]{dump}[/]", soft_wrap=True)
        console.print(f"view it: toolyard view {dump}", soft_wrap=True)
        console.print(f"check it: toolyard audit {dump}", soft_wrap=True)


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, justify="right" if index else "left", no_wrap=True)
    return table


def _rewards(summary: Summary) -> Table:
    table = _table("reward", "mean", "std", "trajectories")
    spreads = {"score": summary.score, **summary.rewards}
    for name, spread in spreads.items():
        mean = (f"{spread.mean:.3f}", f"{spread.deviation:.3f}") if spread.count else ("–", "–")
        table.add_row(escape(name), *mean, str(spread.count))
    return table


def _finish_reasons(summary: Summary) -> Table:
    table = _table("finish reason", "trajectories", "state")
    for reason, count in summary.finish_reasons.most_common():
        state = FinishReason(reason).state.value
        table.add_row(reason, str(count), state if state == RolloutState.COMPLETED else f"[red]{state}[/]")
    return table


def _calls(summary: Summary) -> Table:
    table = _table("tool", "verdict", "calls")
    for (tool, outcome), count in summary.outcomes.most_common():
        table.add_row(escape(tool), escape(outcome), str(count))
    if table.row_count:
        table.add_row("[dim]trajectories with ≥ 1 successful tool call[/]", "", str(summary.with_calls))
    if summary.near_misses:
        table.add_row("[yellow]text that looks like a call[/]", "near miss", str(summary.near_misses))
    return table


def _print_faults(report: FaultReport, accounting: Accounting, console: Console) -> None:
    table = _table("fault", "planned", "injected", "survived", "ended the trajectory")
    for kind, count in report.kinds.items():
        ended = ", ".join(f"{number} × {how}" for how, number in count.ended.most_common()) or "0"
        table.add_row(kind, str(count.planned), str(count.injected), str(count.survived), ended)
    if table.row_count:
        console.print(table)
    told = f"faults: {escape(report.profile)}, seed {report.seed}; {report.hit} trajectories were hit"
    if not accounting.problems:
        told += f"; each of {accounting.in_dump} ids has one line, and no failure of ours has a score"
    console.print(told, soft_wrap=True)
    if report.file is not None and report.kinds:
        console.print(f"each fault: {escape(str(report.file))}", soft_wrap=True)


def _times(summary: Summary, seconds: float) -> Table:
    table = _table("stage", "time", "share")
    whole = sum(summary.seconds.values()) or 1.0
    for stage, spent in summary.seconds.most_common():
        table.add_row(stage, duration(spent), f"{100 * spent / whole:.0f} %")
    rate = summary.sampled_tokens / max(seconds, 1e-9)
    table.add_row("[dim]sampled tokens[/]", str(summary.sampled_tokens), f"{rate:.0f}/s")
    return table
