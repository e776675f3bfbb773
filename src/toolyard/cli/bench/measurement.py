"""What `toolyard bench` does: run the same program in several ways, as often as possible in a given time."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from toolyard.cli.console import print_json
from toolyard.cli.outcomes import duration
from toolyard.errors import SandboxError
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Program, Verdict

if TYPE_CHECKING:
    from rich.console import Console

_CODE = "print(1)"


@dataclass(frozen=True, slots=True)
class Row:
    way: str
    in_flight: int
    per_second: float
    p50_seconds: float
    times: float
    """Its rate relative to plain subprocesses with the same number in flight."""


async def measure(seconds: float, console: Console) -> list[Row]:
    """Measure all rows, in the order in which they are printed.

    Raises:
        SandboxError: a program did not end with OK.
    """
    rows: list[Row] = []
    async with LocalSandbox() as sandbox:

        async def embedded() -> None:
            execution = await sandbox.run(Program(_CODE))
            if execution.verdict is not Verdict.OK:
                raise SandboxError(f"print(1) ended with verdict {execution.verdict.value}")

        with console.status("warming up") as status:
            await asyncio.gather(*(embedded() for _ in range(8)))
            for in_flight in (1, 4 * len(os.sched_getaffinity(0))):
                status.update(f"plain subprocesses, {in_flight} in flight")
                plain_rate, plain_p50 = await _timed(_plain, in_flight, seconds)
                status.update(f"LocalSandbox, {in_flight} in flight")
                rate, p50 = await _timed(embedded, in_flight, seconds)
                rows.append(Row("python -c, no isolation", in_flight, plain_rate, plain_p50, 1.0))
                rows.append(Row(f"LocalSandbox, isolation {sandbox.level}", in_flight, rate, p50, rate / plain_rate))
    return rows


async def _plain() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CODE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    await process.communicate()


async def _timed(run: Callable[[], Awaitable[None]], in_flight: int, seconds: float) -> tuple[float, float]:
    """Runs per second, and the median seconds of a run."""
    took: list[float] = []
    began = time.perf_counter()

    async def keep_running() -> None:
        while time.perf_counter() - began < seconds:
            start = time.perf_counter()
            await run()
            took.append(time.perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(keep_running())
    return len(took) / (time.perf_counter() - began), statistics.median(took)


def print_rows(rows: Sequence[Row], console: Console | None) -> None:
    """Print a table to `console`, or JSON to stdout if it is None."""
    if console is None:
        print_json([asdict(row) for row in rows])
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{_CODE}, Python {sys.version.split()[0]}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("runner")
    for title in ("in flight", "per second", "p50", "ratio"):
        table.add_column(title, justify="right")
    for row in rows:
        times = "" if row.times == 1.0 else f"{row.times:.1f} ×"
        table.add_row(row.way, str(row.in_flight), f"{row.per_second:.0f}", duration(row.p50_seconds), times)
    console.print(table)
