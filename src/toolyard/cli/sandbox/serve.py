"""What `toolyard sandbox serve` prints: its address, and at the end what it ran."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.table import Table

from toolyard.cli.outcomes import duration
from toolyard.rewards.code.submissions import SubmissionJudge
from toolyard.sandbox.service.server import ServiceConfig, serve

if TYPE_CHECKING:
    from rich.console import Console

    from toolyard.sandbox.local import LocalSandbox


def serve_with_summary(config: ServiceConfig, sandbox: LocalSandbox, console: Console) -> None:
    """Serve until SIGINT or SIGTERM. `toolyard.sandbox.service.serve` says what it raises."""
    started = time.monotonic()

    def ready(url: str) -> None:
        now = sandbox.statistics()
        access = "token required" if config.all_tokens else "no token required"
        console.print(f"[bold green]Toolyard sandbox[/] at [bold cyan]{url}[/]")
        console.print(
            f"{now.workers} workers, isolation {now.isolation}, memory limited by {now.memory_limit}, {access}"
        )
        console.print("Ctrl-C to stop; Ctrl-C again to quit without waiting for running programs")

    serve(config, sandbox, judge=SubmissionJudge(), on_ready=ready)
    executions = sandbox.statistics().executions
    table = Table(title=f"Served for {duration(time.monotonic() - started)}", title_justify="left")
    table.add_column("Verdict")
    table.add_column("Programs", justify="right")
    for verdict, count in sorted(executions.items(), key=lambda entry: -entry[1]):
        table.add_row(verdict, str(count))
    table.add_row("[bold]total[/]", f"[bold]{sum(executions.values())}[/]")
    console.print(table)
