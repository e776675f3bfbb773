"""What `toolyard sandbox tour` does: run the stops one by one, then print a table of how each ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from toolyard.cli.doctor.remedies import toolchain_remedy
from toolyard.cli.outcomes import duration, ending, summary_line
from toolyard.cli.sandbox.tour_programs import STOPS, TourStop
from toolyard.errors import ToolchainMissingError, ToolyardError
from toolyard.sandbox import languages
from toolyard.sandbox.isolation import Level
from toolyard.sandbox.local import LocalSandbox, SandboxConfig
from toolyard.sandbox.protocol import Execution, Verdict

if TYPE_CHECKING:
    from rich.console import Console

_COLORS = {Verdict.OK: "green", Verdict.FAILED: "yellow", Verdict.SIGNALED: "yellow", Verdict.COMPILE_FAILED: "yellow"}
_STOPPED = "magenta"


@dataclass(frozen=True, slots=True)
class Visit:
    """A stop and its outcome."""

    stop: TourStop
    accepted: frozenset[Verdict] = frozenset()
    """The verdicts that are correct here."""
    execution: Execution | None = None
    skipped: str = ""
    """Why it was skipped: no toolchain, or too little isolation."""
    failure: str = ""
    """Why the sandbox failed to run it."""

    @property
    def as_expected(self) -> bool:
        if self.execution is None:
            return bool(self.skipped)
        return self.execution.verdict in self.accepted


async def take_tour(config: SandboxConfig, console: Console, stops: Sequence[TourStop] = STOPS) -> int:
    """Run the stops and print how they ended. Returns the exit status: 1 if one did not end as expected."""
    started = time.monotonic()
    visits: list[Visit] = []
    with console.status("starting the sandbox") as status:
        async with LocalSandbox(config) as sandbox:
            opened = time.monotonic() - started
            level, memory_limit = sandbox.level, sandbox.grants.memory_limit
            console.print(f"[bold]A tour of the sandbox[/]: ready in {duration(opened)}, isolation [bold]{level}[/].\n")
            for number, stop in enumerate(stops, 1):
                status.update(f"{number} of {len(stops)}: {escape(stop.title)}")
                visits.append(await _visit(sandbox, stop))
                console.print(f"{_mark(visits[-1])} [bold]{escape(stop.title)}[/]  [dim]{escape(stop.story)}[/]")
    console.print()
    console.print(_table(visits))
    _conclude(visits, console, f"isolation {level}, memory limited by {memory_limit}", time.monotonic() - started)
    return 0 if all(visit.as_expected for visit in visits) else 1


async def _visit(sandbox: LocalSandbox, stop: TourStop, attempts: int = 3) -> Visit:
    if stop.harmful and sandbox.level not in (Level.FULL, Level.NAMESPACES):
        return Visit(stop, skipped=f"skipped: isolation {sandbox.level} could not contain it")
    try:
        execution = await sandbox.run(stop.program, stop.limits)
        return Visit(stop, accepted_verdicts(stop, sandbox.grants.memory_limit), execution)
    except ToolchainMissingError:
        language = languages.find_language(stop.program.language)
        return Visit(stop, skipped=f"no toolchain here: {toolchain_remedy(language)}")
    except ToolyardError as error:
        if error.retryable and attempts > 1:  # the machine was too busy for a verdict, for example
            return await _visit(sandbox, stop, attempts - 1)
        return Visit(stop, failure=str(error))


def accepted_verdicts(stop: TourStop, memory_limit: str) -> frozenset[Verdict]:
    """The verdicts to accept. With a memory limit per process, allocations fail and the program ends by itself."""
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
    table.add_column("Outcome", overflow="fold")
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
        if visit.skipped:
            return "[dim]not run[/]", "", f"[dim]{escape(visit.skipped)}[/]"
        return "[bold red]sandbox failure[/]", "", escape(visit.failure)
    color = _COLORS.get(execution.verdict, _STOPPED) if visit.as_expected else "bold red"
    verdict = f"[{color}]{execution.verdict.value}[/]"
    line = summary_line(execution)
    if execution.verdict in (Verdict.OK, Verdict.FAILED, Verdict.COMPILE_FAILED):
        outcome = line or ending(execution, visit.stop.limits)
    else:
        outcome = ending(execution, visit.stop.limits) + (f"; printed: {line}" if line else "")
    surprise = "" if visit.as_expected else f"[bold red]expected {visit.stop.expected.value}[/]: "
    return verdict, duration(execution.wall_seconds), surprise + escape(outcome)


def _conclude(visits: Sequence[Visit], console: Console, isolation: str, seconds: float) -> None:
    ran = [visit for visit in visits if visit.execution]
    surprises = [visit for visit in visits if not visit.as_expected]
    skipped = len(visits) - len(ran) - sum(1 for visit in visits if visit.failure)
    text = f"{len(ran)} programs in {duration(seconds)}, {isolation}"
    if skipped:
        text += f"; {skipped} not run"
    if surprises:
        names = ", ".join(visit.stop.title for visit in surprises)
        console.print(f"[bold red]✘ {text}. Did not end as expected: {escape(names)}.[/]")
    else:
        console.print(f"[bold green]✔ {text}. All ended as expected.[/]")
