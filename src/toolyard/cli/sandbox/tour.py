"""What `toolyard sandbox tour` does: run the stops one by one, then tell in a table what became of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from toolyard.cli.doctor.remedies import toolchain_remedy
from toolyard.cli.outcomes import duration, ending, telling_line
from toolyard.cli.sandbox.tour_programs import STOPS, TourStop
from toolyard.errors import ToolchainMissingError, ToolyardError
from toolyard.sandbox import languages
from toolyard.sandbox.isolation import Level
from toolyard.sandbox.local import LocalSandbox, SandboxConfig
from toolyard.sandbox.protocol import Execution, Verdict

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {Verdict.OK: "green", Verdict.FAILED: "yellow", Verdict.SIGNALED: "yellow", Verdict.COMPILE_FAILED: "yellow"}
_STOPPED = "magenta"


@dataclass(frozen=True, slots=True)
class Visit:
    """One stop and what came of it."""

    stop: TourStop
    right: frozenset[Verdict] = frozenset()
    """The verdicts that are as they should be."""
    execution: Execution | None = None
    passed_over: str = ""
    """Why it was not run, where that is no fault: no toolchain, or no walls to hold it."""
    failure: str = ""
    """Our own failure."""

    @property
    def as_expected(self) -> bool:
        if self.execution is None:
            return bool(self.passed_over)
        return self.execution.verdict in self.right


async def take_tour(config: SandboxConfig, console: Console, stops: Sequence[TourStop] = STOPS) -> int:
    """Run the stops and print them; returns the exit status: 1 if one ended otherwise than expected."""
    started = time.monotonic()
    visits: list[Visit] = []
    with console.status("starting the sandbox") as status:
        async with LocalSandbox(config) as sandbox:
            opened = time.monotonic() - started
            level, memory_limit = sandbox.level, sandbox.grants.memory_limit
            console.print(
                f"[bold]A tour of the sandbox[/], open after {duration(opened)}, isolation [bold]{level}[/].\n"
            )
            for number, stop in enumerate(stops, 1):
                status.update(f"{number} of {len(stops)}: {escape(stop.title)}")
                visits.append(await _visit(sandbox, stop))
                console.print(f"{_mark(visits[-1])} [bold]{escape(stop.title)}[/]  [dim]{escape(stop.story)}[/]")
    console.print()
    console.print(_table(visits))
    _conclude(visits, console, f"isolation {level}, memory limited by {memory_limit}", time.monotonic() - started)
    return 0 if all(visit.as_expected for visit in visits) else 1


async def _visit(sandbox: LocalSandbox, stop: TourStop) -> Visit:
    if stop.harmful and sandbox.level not in (Level.FULL, Level.NAMESPACES):
        return Visit(stop, passed_over=f"left out: isolation {sandbox.level} could not hold it")
    try:
        execution = await sandbox.run(stop.program, stop.limits)
        return Visit(stop, right_verdicts(stop, sandbox.grants.memory_limit), execution)
    except ToolchainMissingError:
        language = languages.find_language(stop.program.language)
        return Visit(stop, passed_over=f"no toolchain here: {toolchain_remedy(language)}")
    except ToolyardError as error:
        return Visit(stop, failure=str(error))


def right_verdicts(stop: TourStop, memory_limit: str) -> frozenset[Verdict]:
    """Where every process has a limit of its own, it is refused the memory and fails by itself instead."""
    if stop.expected is Verdict.MEMORY_EXCEEDED and memory_limit == "per process":
        return frozenset({stop.expected, Verdict.FAILED, Verdict.SIGNALED})
    return frozenset({stop.expected})


def _table(visits: Sequence[Visit]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column("Program", min_width=12)
    table.add_column("Language", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    table.add_column("Time", justify="right", no_wrap=True)
    table.add_column("What came of it", overflow="fold")
    for visit in visits:
        title = languages.find_language(visit.stop.program.language).title
        table.add_row(_mark(visit), escape(visit.stop.title), title, *_outcome(visit))
    return table


def _mark(visit: Visit) -> str:
    if not visit.as_expected:
        return "[bold red]✘[/]"
    return "[green]✔[/]" if visit.execution else "[dim]–[/]"


def _outcome(visit: Visit) -> tuple[str, str, str]:
    execution = visit.execution
    if execution is None:
        if visit.passed_over:
            return "[dim]not run[/]", "", f"[dim]{escape(visit.passed_over)}[/]"
        return "[bold red]our failure[/]", "", escape(visit.failure)
    colour = _COLOURS.get(execution.verdict, _STOPPED) if visit.as_expected else "bold red"
    verdict = f"[{colour}]{execution.verdict.value}[/]"
    said = telling_line(execution)
    if execution.verdict in (Verdict.OK, Verdict.FAILED, Verdict.COMPILE_FAILED):
        story = said or ending(execution, visit.stop.limits)
    else:
        story = ending(execution, visit.stop.limits) + (f", had said: {said}" if said else "")
    surprise = "" if visit.as_expected else f"[bold red]should have been {visit.stop.expected.value}[/]: "
    return verdict, duration(execution.wall_seconds), surprise + escape(story)


def _conclude(visits: Sequence[Visit], console: Console, walls: str, seconds: float) -> None:
    ran = [visit for visit in visits if visit.execution]
    surprises = [visit for visit in visits if not visit.as_expected]
    passed_over = len(visits) - len(ran) - sum(1 for visit in visits if visit.failure)
    text = f"{len(ran)} programs in {duration(seconds)}, {walls}"
    if passed_over:
        text += f"; {passed_over} not run"
    if surprises:
        names = ", ".join(visit.stop.title for visit in surprises)
        console.print(f"[bold red]✘ {text}. Ended otherwise than they should: {escape(names)}.[/]")
    else:
        console.print(f"[bold green]✔ {text}. All ended as they should.[/]")
