"""What `toolyard score` does: load the reward, score the dump with progress, and collect the changes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from toolyard.cli.score.report import GIVEN, ScoreReport
from toolyard.errors import ConfigError, RecordError
from toolyard.messages import JSON
from toolyard.rewards.combination import Weights
from toolyard.rewards.registry import load_reward
from toolyard.rollout.config import overridden
from toolyard.rollout.rescore.dump import RescoredDump
from toolyard.rollout.rescore.scoring import Rescored, Rescoring, weights_beside

if TYPE_CHECKING:
    from rich.console import Console

_LINE_SECONDS = 10.0
"""Interval of progress lines when the output is not a terminal."""


@dataclass(frozen=True, slots=True)
class ScoreArguments:
    """The arguments of the command."""

    path: Path
    reward: str
    options: Sequence[str] = ()
    weights: Sequence[str] = ()
    deadline_seconds: float = 60.0
    data_source: str | None = None
    steps: Sequence[int] | None = None
    limit: int | None = None
    out: Path | None = None
    concurrency: int = 32
    ray: str | None = None
    """The address of a cluster."""
    top: int = 10


async def run(arguments: ScoreArguments, console: Console) -> ScoreReport:
    """Score the dump, with progress on `console`. Ctrl-C stops with a partial report; a second one cancels.

    Raises:
        ConfigError: the reward, an option or a weight is invalid, or the output would overwrite something.
        RecordError: the dump does not exist or is empty, or the output cannot be written.
    """
    options = overridden({}, arguments.options)
    if arguments.ray is not None:
        if arguments.reward.partition(":")[0] not in ("code", "default"):
            raise ConfigError(f"--ray: the reward {arguments.reward} runs no programs; expected code or default")
        options["sandbox"] = "ray"
    reward = load_reward(arguments.reward, options)
    if reward is None:
        raise ConfigError(f"--reward {arguments.reward}: there would be nothing to score")
    weights, weights_are = _weights(arguments)
    report = ScoreReport(str(arguments.path), arguments.reward, options, weights, weights_are, arguments.top)
    async with AsyncExitStack() as stack:
        if arguments.ray is not None:
            from toolyard.rollout.cluster.connection import connect, disconnect

            if await asyncio.to_thread(connect, arguments.ray, "--ray"):
                stack.push_async_callback(asyncio.to_thread, disconnect)
        stack.push_async_callback(reward.close)
        scoring = Rescoring(
            arguments.path,
            reward,
            weights=weights,
            steps=arguments.steps,
            limit=arguments.limit,
            data_source=arguments.data_source,
            deadline_seconds=arguments.deadline_seconds,
            concurrency=arguments.concurrency,
        )
        dump = None
        if arguments.out is not None:
            dump = stack.enter_context(RescoredDump(arguments.out, source=arguments.path, files=scoring.files))
            report.out = str(arguments.out)
        board = _ProgressDisplay(console, report, arguments.limit, sum(file.stat().st_size for file in scoring.files))

        def ended(rescored: Rescored) -> None:
            if dump is not None:
                dump.write(rescored)
            report.add(rescored)
            board.advance(rescored)

        began = time.monotonic()
        await _run_with_progress(scoring, ended, board)
        report.seconds = time.monotonic() - began
        if dump is not None:
            rewards: JSON = {"final": arguments.reward, "options": options or None, "weights": weights.model_dump()}
            dump.finish(rewards, stopped=scoring.stopped)
            report.partial = None if dump.partial is None else str(dump.partial)
    report.end(scoring, reward.reads_the_task)
    if not report.total.trajectories and not report.damaged_lines and not report.interrupted:
        raise RecordError(f"{arguments.path} has no trajectories: its files are empty")
    return report


async def _run_with_progress(scoring: Rescoring, ended: Callable[[Rescored], None], board: _ProgressDisplay) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if scoring.stopped:
            task.cancel()
        else:
            board.say("Stopping: finished scores are kept. Ctrl-C again to quit now.", "yellow")
            scoring.stop()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    drawing = asyncio.create_task(board.draw())
    try:
        await scoring.run(ended)
    except asyncio.CancelledError:
        if scoring.stopped:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        drawing.cancel()
        await asyncio.wait([drawing])


class _ProgressDisplay:
    """A progress bar over bytes, since the number of lines is unknown; over lines if there is a limit."""

    def __init__(self, console: Console, report: ScoreReport, limit: int | None, size: int) -> None:
        self._console, self._report = console, report
        self._by_line = limit is not None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("scoring", total=limit or size)

    def say(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False)

    def advance(self, rescored: Rescored) -> None:
        self._bar.update(self._task, advance=1 if self._by_line else len(rescored.raw), description=self._line())

    async def draw(self) -> None:
        with self._bar:
            while True:
                await asyncio.sleep(_LINE_SECONDS)
                if not self._console.is_terminal:
                    self._console.print(self._line())

    def _line(self) -> str:
        total = self._report.total
        mean = f"mean {total.after.mean:.3f}" if total.after.count else "mean –"
        return f"{total.trajectories} scored, {total.changed} changed, {mean}"


def _weights(arguments: ScoreArguments) -> tuple[Weights, str]:
    """The weights, and where they come from."""
    found = weights_beside(arguments.path)
    if not arguments.weights:
        return found or Weights(), "by default" if found is None else "of its run"
    given = overridden({} if found is None else found.model_dump(), arguments.weights)
    try:
        return Weights.model_validate(given), GIVEN
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--weight {where}: {first['msg']}; known: {', '.join(Weights.model_fields)}") from None
