"""What `toolyard train` shows: progress while it runs, a summary at the end."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Self

import typer
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from toolyard.cli.console import INTERRUPTED, marked, new_table, print_json
from toolyard.durations import duration, elapsed
from toolyard.messages import JSON
from toolyard.records.trajectory import Trajectory
from toolyard.train.config import TrainConfig
from toolyard.train.observer import TrainObserver, TrainResult

if TYPE_CHECKING:
    from rich.console import Console

_STOPPING = "Stopping after this step, with a checkpoint. Ctrl-C again to quit now."
_COLUMNS = ("step", "reward", "calls", "calls ok", "tokens", "rollout", "update", "loss")
_BAR_WIDTH = 20
_HEADER_EVERY = 20
"""The column titles are repeated after this many steps."""
_COMPARED = 10
"""The summary compares the first and the last 10 steps; in short runs, the first and the last third."""


def run(config: TrainConfig, console: Console, *, resume: bool) -> tuple[TrainResult | None, float]:
    """Train with progress on `console`. Returns the result, None except in the main process, and the seconds it took.

    Raises:
        MissingDependencyError: an extra that training needs is not installed.
        Exit: a second Ctrl-C stopped it.
    """
    began = time.monotonic()
    with _importing(console):
        from toolyard.train.trl.run import run_training
    with ProgressDisplay(console) as board:
        try:
            result = run_training(config, board, resume=resume)
        except KeyboardInterrupt as stopped:
            raise typer.Exit(128 + stopped.args[0] if stopped.args else INTERRUPTED) from None
    return (result if board.is_main else None), time.monotonic() - began


def _importing(console: Console) -> AbstractContextManager[object]:
    if not console.is_terminal:
        console.print("importing torch and TRL", style="dim")
        return nullcontext()
    began = time.monotonic()
    return Live(
        get_renderable=lambda: Text(f"importing torch and TRL  {elapsed(time.monotonic() - began)}"),
        console=console,
        transient=True,
    )


class _Clock(ProgressColumn):
    """How long something has been going on."""

    def __init__(self, text: Callable[[Task], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return Text.from_markup(self._text(task))


class ProgressDisplay(TrainObserver):
    """Prints one line per step, and below them the current activity."""

    def __init__(self, console: Console) -> None:
        self.is_main = False
        """Set by the first event: only the main process gets any."""
        self._console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            _Clock(lambda task: elapsed(task.elapsed or 0)),
            _Clock(lambda task: f"{task.fields['doing']}  {elapsed(time.monotonic() - self._since)}"),
            console=console,
        )
        self._live: Live | None = None
        self._task: TaskID | None = None
        self._stopping = False
        self._doing = "starting"
        self._since = time.monotonic()
        """When it began to do that."""
        self._rows = self._requests = self._ended = 0
        self._playing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def note(self, text: str) -> None:
        self.is_main = True
        self._console.print(marked(text), style="dim")

    def began(self, done: int, steps: int) -> None:
        self.is_main = True
        if done:
            self.note(f"continuing after step {done}")
        self._task = self.bar.add_task("training", total=steps, completed=done, doing=self._doing)
        if self._console.is_terminal and self._live is None:
            self._live = Live(self.bar, console=self._console, transient=True)
            self._live.start()

    def playing(self, step: int, requests: int, evaluation: bool) -> None:
        self._requests, self._ended, self._since = requests, 0, time.monotonic()
        self._playing = True
        if evaluation and self._live is None:
            self.note("evaluation")
        self._show(f"{'evaluation' if evaluation else 'rollouts'} 0/{requests}")

    def ended(self, trajectory: Trajectory) -> None:
        if not self._playing:  # it is for a later step
            return
        self._ended += 1
        of = f"/{self._requests}" if self._ended <= self._requests else ""  # more if groups are replaced
        self._show(f"{self._doing.partition(' ')[0]} {self._ended}{of}")

    def played(self) -> None:
        self._playing = False
        self._since = time.monotonic()
        self._show("update")

    def stepped(self, line: JSON) -> None:
        groups, ages = line.get("dynamic_sampling"), line.get("staleness")
        if self._rows % _HEADER_EVERY == 0:
            titles = (*_COLUMNS, *(["flat"] if groups else []), *(["staleness"] if ages else []))
            self._console.print("".join(f"{title:>11}" for title in titles), style="bold")
        self._rows += 1
        seconds = line["seconds"]
        shown = (
            str(line["step"]),
            _number(line["reward"], 3),
            _number(line["tool_calls"], 2),
            _share(line["calls_ok"]),
            _number(line["response_tokens"], 0),
            duration(seconds["rollout"]) if "rollout" in seconds else "–",
            duration(seconds["update"]),
            _number(line.get("loss"), 4),
            *([f"{groups['flat']}/{groups['sampled']}"] if groups else []),
            *([_number(ages["mean"], 2)] if ages else []),
        )
        self._console.print("".join(f"{text:>11}" for text in shown), markup=False)
        if line["refused"]:
            why = ", ".join(f"{count} {reason}" for reason, count in line["refused"].items())
            self._console.print(f"{'':>11} not trained on: {why}", style="yellow", markup=False)
        if self._task is not None:
            self.bar.update(self._task, completed=line["step"])

    def evaluated(self, line: JSON) -> None:
        reward, calls, ok = _number(line["reward"], 3), _number(line["tool_calls"], 2), _share(line["calls_ok"])
        text = f"evaluation after step {line['step']}: reward {reward}, {calls} calls, {ok} successful"
        self._console.print(text, style="cyan", markup=False)

    def saved(self, checkpoint: Path) -> None:
        self.note(f"saved {checkpoint}")

    def stopping(self) -> None:
        # This runs in a signal handler, possibly in the middle of a print, so it must not print itself.
        self._stopping = True
        if self._live is None:
            os.write(2, f"{_STOPPING}\n".encode())
        self._show(self._doing)

    def _show(self, doing: str) -> None:
        self._doing = doing
        if self._task is not None:
            self.bar.update(self._task, doing=f"[yellow]{_STOPPING}[/]" if self._stopping else doing)


# The summary ----------------------------------------------------------------------------------------------------------


def print_result(result: TrainResult, config: TrainConfig, seconds: float, console: Console | None) -> None:
    """Print tables to `console`, or JSON to stdout if it is None."""
    if console is None:
        print_json({**result.as_json(), "wall_seconds": round(seconds, 3)})
        return
    if result.lines:
        console.print(_progress(result.lines, result.evaluations))
        console.print(_times(result.lines))
    steps = result.steps - result.steps_before
    text = f"{steps} {'step' if steps == 1 else 'steps'} in {duration(seconds)}" + (
        f", {result.steps} in all" if result.steps_before else ""
    )
    if result.interrupted_by is None:
        console.print(f"[bold green]✔ {text}.[/]")
    else:
        console.print(
            f"[bold yellow]■ {text}: stopped at step {result.steps} of {config.steps}; "
            f"--out {marked(shlex.quote(str(result.folder)))} --resume continues.[/]",
            soft_wrap=True,
        )
    places = {
        "model": result.model,
        "checkpoint": result.checkpoint if result.model is None else None,
        "plot": result.plot,
    }
    for name, place in places.items():
        if place is not None:
            console.print(f"{name}: [bold]{marked(str(place))}[/]", soft_wrap=True)
    if result.lines:
        folder = config.rollout.rollout_data_dir or str(result.folder / "rollouts")
        console.print("next:")
        for command in ("view", "audit"):
            console.print(f"  toolyard {command} {shlex.quote(folder)}", markup=False, soft_wrap=True)


def _progress(lines: list[JSON], evaluations: list[JSON]) -> Table:
    size = max(1, min(_COMPARED, len(lines) // 3))
    first, last = lines[:size], lines[-size:]
    titles = [_steps(first), _steps(last)] if len(lines) > 1 else [_steps(first)]
    titles += [f"evaluation after {line['step']}" for line in (*evaluations[:1], *evaluations[1:][-1:])]
    table = new_table("mean of", *titles)
    columns = [first, last] if len(lines) > 1 else [first]
    columns += [[line] for line in (*evaluations[:1], *evaluations[1:][-1:])]
    rows: tuple[tuple[str, str, int | None], ...] = (
        ("reward", "reward", 3),
        ("tool_calls", "tool calls per trajectory", 2),
        ("calls_ok", "call success", None),
        ("turns", "turns", 2),
        ("sampled_tokens", "sampled tokens", 0),
        ("dynamic_sampling.sampled", "groups sampled", 1),
        ("dynamic_sampling.flat", "groups of equal scores", 1),
        ("staleness.mean", "staleness of tokens", 2),
    )
    for key, title, places in rows:
        means = [_mean(column, key) for column in columns]
        if "." in key and means[0] is None:
            continue
        table.add_row(title, *(_share(mean) if places is None else _number(mean, places) for mean in means))
    return table


def _times(lines: list[JSON]) -> Table:
    table = new_table("stage", "time", "share")
    stages = [stage for stage in ("sync", "rollout", "update") if any(stage in line["seconds"] for line in lines)]
    spent = {stage: sum(line["seconds"].get(stage, 0.0) for line in lines) for stage in stages}
    whole = sum(spent.values()) or 1.0
    for stage, seconds in spent.items():
        table.add_row(stage, duration(seconds), f"{100 * seconds / whole:.0f} %")
    return table


def _steps(lines: list[JSON]) -> str:
    first, last = lines[0]["step"], lines[-1]["step"]
    return f"step {first}" if first == last else f"steps {first}–{last}"


def _mean(lines: list[JSON], key: str) -> float | None:
    known = [value for line in lines if (value := _value(line, key)) is not None]
    return sum(known) / len(known) if known else None


def _value(line: JSON, key: str) -> float | None:
    """`key` is a name, or names joined with dots."""
    part, _, rest = key.partition(".")
    found = line.get(part)
    return _value(found or {}, rest) if rest else found


def _number(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:.{places}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
