"""What `toolyard rollout` shows while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from toolyard.cli.rollout.report import mean_and_std
from toolyard.durations import duration, elapsed
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.finish import RolloutState
from toolyard.rollout.observer import Observer, Running
from toolyard.rollout.run import RolloutResult, run_rollouts
from toolyard.rollout.run_many import Stuck
from toolyard.rollout.summary import Summary
from toolyard.supervision import Stall

if TYPE_CHECKING:
    from rich.console import Console

_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 10.0
"""Interval of progress lines when the output is not a terminal."""
_FIRST_LINE_SECONDS = 1.0
"""When a stage before the first request gets such a line."""
_RATE_SECONDS = 10.0
"""Window over which rates are computed."""
_WORTH_SECONDS = 1.0
"""Stages that took less are not named afterwards."""
_SLOW_SHOWN = 3
"""A server that hangs would make hundreds of requests slow at once."""
_BAR_WIDTH = 30
_BESIDE_BAR = 45
"""Columns for the rest of its line."""
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
    board = ProgressDisplay(console)
    began, asked = time.monotonic(), False
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if board.interrupt():
            task.cancel()

    def interrupted(*_: object) -> None:
        nonlocal asked
        # If the event loop is blocked, interrupt whatever blocks it.
        if board.is_blocked or (asked and not board.interrupted):
            raise KeyboardInterrupt
        asked = True
        loop.call_soon_threadsafe(interrupt)

    before = signal.signal(signal.SIGINT, interrupted)
    # Ray prints news of its processes to stdout, which is for the result.
    apart = contextlib.nullcontext() if config.cluster is None else contextlib.redirect_stdout(sys.stderr)
    try:
        with board, apart:
            result = await run_rollouts(config, board)
    except asyncio.CancelledError:
        if board.interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    return result, board.interrupted, time.monotonic() - began


class ProgressDisplay(Observer):
    """Draws the progress of a run, in a thread of its own: an import or a tool may block the event loop."""

    def __init__(self, console: Console) -> None:
        self.interrupted = False
        self._console = console
        self._is_drawn = console.is_terminal and not console.is_dumb_terminal
        self._began = self._stage_began = time.monotonic()
        self._stage = "starting"
        self._stages: list[tuple[str, float]] = []
        """Those that have ended, with their seconds."""
        self._next_line = self._began + _FIRST_LINE_SECONDS
        self._run: Running | None = None
        self._is_started = False
        """A request is running, or has ended."""
        self._summary = Summary()
        self._total = self._done = self._calls = 0
        self._groups = (0, 0)
        self._tokens_rate, self._calls_rate = Rate(self._began), Rate(self._began)
        self._figures: list[str] = []
        self._slow: deque[str] = deque()
        """Not yet printed."""
        self._blocked_at = ""
        self._live = Live(get_renderable=self.screen, console=console, auto_refresh=False, transient=True)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="toolyard progress", daemon=True)

    def __enter__(self) -> Self:
        if self._is_drawn:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._live.stop()
        self._print_slow()

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

    def stage(self, text: str) -> None:
        now = time.monotonic()
        self._stages.append((self._stage, now - self._stage_began))
        self._stage, self._stage_began, self._next_line = text, now, now + _FIRST_LINE_SECONDS

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=not self._is_drawn)

    def opened(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        if done:
            self.note(f"{done} of {total} trajectories are already in the dump")

    def grouped(self, total: int, done: int) -> None:
        self._groups = total, done

    def began(self, run: Running) -> None:
        self._run = run

    def ended(self, trajectory: Trajectory, summary: Summary) -> None:
        self._summary = summary
        self._calls += sum(len(turn.tool_calls) for turn in trajectory.turns)

    def told(self, kind: str, text: str) -> None:
        if kind == "stuck":
            self._slow.append(text)
        else:
            self._console.print(f"{kind}: {text}", style="bold yellow", markup=False)

    def stuck(self, stuck: Stuck) -> None:
        self._slow.append(str(stuck))

    def stalled(self, stall: Stall) -> None:
        if _waits_for_events(stall):  # nobody blocks it
            self.note(f"the machine is busy: the event loop got no CPU time for {duration(stall.seconds)}")
            return
        self._console.print(f"blocked: {stall}", style="bold yellow", markup=False)
        if stall.line != self._blocked_at:  # print the stack only once
            self._console.print(stall.stack.rstrip(), style="yellow", markup=False)
        self._blocked_at = stall.line

    # ------------------------------------------------------------------------------------------------------- drawing
    def _draw(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            while not self._closing.wait(_REFRESH_SECONDS):
                self.update()

    def update(self) -> None:
        """Measure, and show it; in a file or a pipe, now and then."""
        self._print_slow()
        if not self._is_started:
            if self._run is not None and (self._run.states or self._summary.trajectories):
                self._start()
            else:
                self._tokens_rate, self._calls_rate = Rate(time.monotonic()), Rate(time.monotonic())
        if not self._is_drawn and time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + _LINE_SECONDS
        if self._is_started:
            self._figures = self._measured()
        if self._is_drawn:
            self._live.refresh()
        else:
            self._console.print(self._line())

    def _print_slow(self) -> None:
        slow = [self._slow.popleft() for _ in range(len(self._slow))]
        for text in slow[:_SLOW_SHOWN]:
            self._console.print(f"slow: {text}", style="yellow", markup=False)
        if len(slow) > _SLOW_SHOWN:
            self._console.print(f"slow: {len(slow) - _SLOW_SHOWN} more requests", style="yellow")

    def _start(self) -> None:
        self.stage("")
        self._is_started = True
        self._next_line = time.monotonic() + _LINE_SECONDS
        if (seconds := time.monotonic() - self._began) >= _WORTH_SECONDS:
            stages = ", ".join(f"{text} {duration(took)}" for text, took in self._stages if took >= _WORTH_SECONDS)
            self.note(f"started after {duration(seconds)}" + (f": {stages}" if stages else ""))

    def screen(self) -> RenderableType:
        if not self._is_started:
            return Group(_fitted(escape(self._starting())))
        head = Table.grid(padding=(0, 1))
        width = max(4, min(_BAR_WIDTH, self._console.width - _BESIDE_BAR))
        bar = ProgressBar(max(1, self._total), self._in_dump, width=width)
        head.add_row("rollouts", bar, f"{self._in_dump}/{self._total} done", elapsed(time.monotonic() - self._began))
        return Group(head, *map(_fitted, self._figures))

    def _line(self) -> str:
        if not self._is_started:
            return escape(self._starting())
        seconds = elapsed(time.monotonic() - self._began)
        return " · ".join((f"{self._in_dump}/{self._total} done", *self._figures, seconds))

    def _starting(self) -> str:
        return f"{self._stage}  {elapsed(time.monotonic() - self._stage_began)}"

    @property
    def _in_dump(self) -> int:
        return self._done + self._summary.trajectories

    def _measured(self) -> list[str]:
        """What has ended, what runs, and how fast."""
        assert self._run is not None
        states, summary = self._run.states, self._summary
        groups, complete = self._groups
        failed = summary.trajectories - summary.completed
        ended = [f"{complete}/{groups} groups"] if groups < self._total else []
        mean, std = mean_and_std(summary.score)
        ended.append(f"[red]{failed} failed[/]" if failed else "0 failed")
        ended.append(f"reward {mean} (std {std})" if summary.score.count else "reward –")
        waiting = self._total - self._in_dump - states.total()
        running = [f"{state.value.lower().replace('_', ' ')} {states[state]}" for state in _LIVE if states[state]]
        running += [f"not started {waiting}"] if waiting > 0 else []
        now, (turns, tokens, calls) = time.monotonic(), self._run.live
        sampled = self._tokens_rate.after(now, tokens + summary.sampled_tokens)
        if not sampled and (states[RolloutState.GENERATING] or not tokens + summary.sampled_tokens):
            sampled = None  # a server tells only when a turn has ended
        called = self._calls_rate.after(now, calls + self._calls)
        rates = [f"{_rate(sampled)} tokens/s", f"{_rate(called)} tool calls/s", f"{turns + summary.turns} turns"]
        return [" · ".join(part) for part in (ended, running, rates) if part]


class Rate:
    """Counts per second over the last seconds, and back to the last change before them: turns end in lumps."""

    def __init__(self, now: float) -> None:
        """The count is 0."""
        self._changes = deque([(now, 0)])

    def after(self, now: float, count: int) -> float | None:
        """The rate, when the count is `count`. None: it is too early to say."""
        changes = self._changes
        if changes[-1][1] != count:
            changes.append((now, count))
        while len(changes) > 1 and changes[1][0] <= now - _RATE_SECONDS:
            changes.popleft()
        then, before = changes[0]
        return max(0.0, (count - before) / (now - then)) if now > then else None


def _rate(rate: float | None) -> str:
    if rate is None:
        return "–"
    return "< 0.1" if 0 < rate < 0.05 else f"{rate:,.{1 if rate < 10 else 0}f}"


def _waits_for_events(stall: Stall) -> bool:
    """Whether the event loop itself is what the stack ends in."""
    frames = [line for line in stall.stack.splitlines() if line.lstrip().startswith("File ")]
    return len(frames) > 1 and "base_events.py" in frames[-2] and "selectors.py" in frames[-1]


def _fitted(markup: str) -> Text:
    line = Text.from_markup(markup)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
