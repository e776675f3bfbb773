"""What the commands share: where they print, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells count."""

_NOT_A_TERMINAL_WIDTH = 120
"""Of tables in files and logs, where nobody can widen the window and 80 columns would fold every line."""

T = TypeVar("T")


def out() -> Console:
    """For what was asked for: tables and reports."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _NOT_A_TERMINAL_WIDTH)


def err() -> Console:
    """For what is said about it: progress, verdicts, errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def complain(message: object) -> None:
    """One red line, however many lines the message has."""
    err().print(f"toolyard: {' '.join(str(message).split())}", style="bold red", markup=False)


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end. Ctrl-C cancels it, waits for it to clean up, and exits with 130."""
    import asyncio

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        err().print("interrupted", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
