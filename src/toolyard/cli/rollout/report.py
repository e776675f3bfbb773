"""What `toolyard rollout` prints at its end."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from toolyard.cli.console import marked, new_table, print_json
from toolyard.durations import duration
from toolyard.rollout.config import RewardConfig, RolloutConfig
from toolyard.rollout.faults.report import FaultReport
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.run import RolloutResult
from toolyard.rollout.summary import Accounting, RunningStats, Summary

if TYPE_CHECKING:
    from rich.console import Console

_OTHER_REWARD = {"gsm8k": "gsm8k:strict", "gsm8k:strict": "gsm8k", "code": "code:fraction", "code:fraction": "code"}
"""The reward to compare with."""


def print_result(
    result: RolloutResult,
    config: RolloutConfig,
    seconds: float,
    console: Console | None,
    *,
    is_new_folder: bool = False,
) -> None:
    """Print tables to `console`, or JSON to stdout if it is None.

    `is_new_folder`: the same command would choose another one.
    """
    if console is None:
        print_json({**result.as_json(), "wall_seconds": round(seconds, 3)})
        return
    summary = result.summary
    if summary.trajectories:
        for table in (_rewards(summary), _finish_reasons(summary), _calls(summary), _times(summary, seconds)):
            if table.row_count:
                console.print(table)
    if result.faults is not None:
        _print_faults(result.faults, result.accounting, console)
    for what, count in summary.abandoned.most_common():
        console.print(f"[yellow]abandoned[/] {count} ×: {marked(what)}")
    for stall in result.stalls:
        console.print(f"[yellow]blocked[/]: {marked(stall)}")
    for reason, example in summary.failures.items():
        console.print(f"[red]{marked(reason)}[/], for example: {marked(example)}")
    failed = summary.trajectories - summary.completed
    text = f"{summary.trajectories} trajectories in {duration(seconds)}: {summary.completed} completed"
    text += f", {failed} failed" if failed else ""
    text += f"; {result.done_before} were already in the dump" if result.done_before else ""
    if result.missing:
        there = f" with --out {shlex.quote(config.rollout_data_dir or '')}" if is_new_folder else ""
        text += f"; {result.missing} remaining; run the same command{marked(there)} to continue"
    good = (summary.completed or result.done_before) and not result.accounting.problems
    console.print(f"{'[bold green]✔' if good else '[bold red]✘'} {text}.[/]")
    console.print(f"accounting: {marked(result.accounting)}", soft_wrap=True)
    if result.dump is not None and (summary.trajectories or result.done_before):
        console.print(f"dump: [bold]{marked(result.dump)}[/]", soft_wrap=True)
        console.print("next:")
        for command in next_commands(result.dump.parent, config.rewards, summary):
            console.print(f"  {command}", markup=False, soft_wrap=True)


def next_commands(folder: Path, rewards: RewardConfig, summary: Summary) -> list[str]:
    """What to do with a dump: look at it, check it, and score it again if that makes sense."""
    dump = str(folder)
    commands = [["toolyard", "view", dump], ["toolyard", "audit", dump]]
    again = ["--out", f"{dump}-rescored"] if summary.finish_reasons[FinishReason.REWARD_FAILURE] else []
    reward = rewards.final if again else _OTHER_REWARD.get(rewards.final)
    if reward is not None:
        options = [f"--reward-option={name}={json.dumps(value)}" for name, value in (rewards.options or {}).items()]
        commands.append(["toolyard", "score", dump, "--reward", reward, *options, *again])
    return [shlex.join(command) for command in commands]


def _rewards(summary: Summary) -> Table:
    table = new_table("reward", "mean", "std", "trajectories")
    spreads = {"score": summary.score, **summary.rewards}
    for name, spread in spreads.items():
        table.add_row(marked(name), *mean_and_std(spread), str(spread.count))
    return table


def _finish_reasons(summary: Summary) -> Table:
    table = new_table("finish reason", "trajectories", "state")
    for reason, count in summary.finish_reasons.most_common():
        state = FinishReason(reason).state.value
        table.add_row(reason, str(count), state if state == RolloutState.COMPLETED else f"[red]{state}[/]")
    return table


def _calls(summary: Summary) -> Table:
    table = new_table("tool", "verdict", "calls")
    for (tool, outcome), count in summary.outcomes.most_common():
        table.add_row(marked(tool), marked(outcome), str(count))
    if table.row_count:
        table.add_row("[dim]trajectories with ≥ 1 successful tool call[/]", "", str(summary.with_calls))
    if summary.near_misses:
        table.add_row("[yellow]text that looks like a call[/]", "near miss", str(summary.near_misses))
    return table


def _print_faults(report: FaultReport, accounting: Accounting, console: Console) -> None:
    table = new_table("fault", "planned", "injected", "survived", "ended the trajectory")
    for kind, count in report.kinds.items():
        ended = ", ".join(f"{number} × {how}" for how, number in count.ended.most_common()) or "0"
        table.add_row(kind, str(count.planned), str(count.injected), str(count.survived), ended)
    if table.row_count:
        console.print(table)
    told = f"faults: {marked(report.profile)}, seed {report.seed}; {report.hit} trajectories were affected"
    if not accounting.problems:
        told += f"; each of {accounting.in_dump} ids has one line, and no infrastructure failure has a score"
    console.print(told, soft_wrap=True)
    if report.file is not None and report.kinds:
        console.print(f"each fault: {marked(report.file)}", soft_wrap=True)


def _times(summary: Summary, seconds: float) -> Table:
    table = new_table("stage", "time", "share")
    whole = sum(summary.seconds.values()) or 1.0
    for stage, spent in summary.seconds.most_common():
        table.add_row(stage, duration(spent), f"{100 * spent / whole:.0f} %")
    rate = summary.sampled_tokens / max(seconds, 1e-9)
    table.add_row("[dim]sampled tokens[/]", str(summary.sampled_tokens), f"{rate:.0f}/s")
    return table


def mean_and_std(stats: RunningStats) -> tuple[str, str]:
    """As text: – if unknown."""
    return (f"{stats.mean:.3f}" if stats.count else "–"), (f"{stats.deviation:.3f}" if stats.count > 1 else "–")
