"""What `toolyard score` does: load the reward, go through the dump with progress, keep what changed."""

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

from toolyard.cli.score.report import GIVEN, Report
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
"""Where there is no terminal to redraw: one line so often."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's arguments."""

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
    top: int = 10


async def run(asked: Asked, console: Console) -> Report:
    """Score the dump, with progress on `console`. Ctrl-C ends it with what is done; a second one at once.

    Raises:
        ConfigError: the reward, an option or a weight is wrong, or the output would go over something.
        RecordError: there is no such dump, nothing in it, or the output cannot be written.
    """
    options = overridden({}, asked.options)
    reward = load_reward(asked.reward, options)
    if reward is None:
        raise ConfigError(f"--reward {asked.reward}: that is no reward, and there would be nothing to score")
    weights, said = _weights(asked)
    report = Report(str(asked.path), asked.reward, options, weights, said, asked.top)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(reward.close)
        scoring = Rescoring(
            asked.path,
            reward,
            weights=weights,
            steps=asked.steps,
            limit=asked.limit,
            data_source=asked.data_source,
            deadline_seconds=asked.deadline_seconds,
            concurrency=asked.concurrency,
        )
        dump = None
        if asked.out is not None:
            dump = stack.enter_context(RescoredDump(asked.out, source=asked.path, files=scoring.files))
            report.out = str(asked.out)
        board = _Board(console, report, asked.limit, sum(file.stat().st_size for file in scoring.files))

        def ended(rescored: Rescored) -> None:
            if dump is not None:
                dump.write(rescored)
            report.add(rescored)
            board.advance(rescored)

        began = time.monotonic()
        await _watched(scoring, ended, board)
        report.seconds = time.monotonic() - began
        if dump is not None:
            rewards: JSON = {"final": asked.reward, "options": options or None, "weights": weights.model_dump()}
            dump.finish(rewards, stopped=scoring.stopped)
            report.partial = None if dump.partial is None else str(dump.partial)
    report.end(scoring, reward.reads_the_task)
    if not report.total.trajectories and not report.damaged_lines and not report.interrupted:
        raise RecordError(f"{asked.path} has no trajectory: its files are empty")
    return report


async def _watched(scoring: Rescoring, ended: Callable[[Rescored], None], board: _Board) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if scoring.stopped:
            task.cancel()
        else:
            board.say("stopping: what is done is kept (again: at once)", "yellow")
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


class _Board:
    """The progress: of bytes, since nobody counted the lines; of lines where there is a limit."""

    def __init__(self, console: Console, report: Report, limit: int | None, size: int) -> None:
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
        mean = f"mean {total.after.mean:.3f}" if total.after.count else "no score yet"
        return f"{total.trajectories} scored, {total.changed} changed, {mean}"


def _weights(asked: Asked) -> tuple[Weights, str]:
    """And where they are from."""
    found = weights_beside(asked.path)
    said = "by default" if found is None else "of its run"
    if not asked.weights:
        return found or Weights(), said
    given = overridden({} if found is None else found.model_dump(), asked.weights)
    try:
        return Weights.model_validate(given), GIVEN
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--weight {where}: {first['msg']}; known: {', '.join(Weights.model_fields)}") from None
