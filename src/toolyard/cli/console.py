"""Shared by all commands: consoles, error output, and how the process exits."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from toolyard.cli import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NOT_A_TERMINAL_WIDTH = 120
"""Width of tables in files and logs; 80 columns would wrap every line."""

_THREADS = "toolyard-default"
"""Name prefix of the threads of `asyncio.to_thread`."""
_THREAD_SECONDS = 2.0
"""How long `leave` waits for these threads."""

T = TypeVar("T")


def out() -> Console:
    """Standard output, for results: tables and reports."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _NOT_A_TERMINAL_WIDTH)


def err() -> Console:
    """Standard error, for progress, verdicts and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Escape line breaks, escape sequences of terminals, and lone surrogates, which cannot be encoded. For whatever a
    model, a tool or a dump says."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def marked(text: object) -> str:
    """`text` as it is, for rich: printable, and without markup."""
    from rich.markup import escape

    return escape(printable(str(text)))


def new_table(*titles: str) -> Table:
    """A table of numbers; the first column has names."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, title in enumerate(titles):
        made.add_column(title, justify="right" if index else "left", no_wrap=True)
    return made


def print_json(value: Any) -> None:
    """Print JSON to standard output; values that it does not know become strings."""
    print_text(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_text(text: str) -> None:
    """Print to standard output as it is, on lines of its own; nothing if it is empty. Lone surrogates are escaped: they
    cannot be encoded."""
    if not text:
        return
    sys.stdout.flush()
    sys.stdout.buffer.write((text if text.endswith("\n") else f"{text}\n").encode("utf-8", "backslashreplace"))
    sys.stdout.flush()


def complain(message: object) -> None:
    """Print an error as one red line, joining the lines of the message."""
    err().print(f"toolyard: {' '.join(str(message).split())}", style="bold red", markup=False)


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to completion. Ctrl-C cancels it, waits for it to clean up, and exits with 130."""
    try:
        import asyncio

        return asyncio.run(_run_without_leftovers(work))
    except KeyboardInterrupt:
        err().print("interrupted", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        work.close()  # if interrupted before the loop ran, Python would warn that it was never awaited


def leave(status: object) -> NoReturn:
    """Exit, even if a thread never ends, of a tool or an import: the interpreter would wait for it."""
    import threading

    deadline = time.monotonic() + _THREAD_SECONDS
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                err().print("a thread is still running; exiting without waiting for it", style="yellow")
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status if isinstance(status, int) else int(status is not None))
    raise SystemExit(status)


async def _run_without_leftovers(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, then abandon its leftovers so that `asyncio.run` has nothing to wait for: a tool may have left a
    task that ignores cancellation, or a thread that never ends."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from toolyard.supervision import end_stray_tasks

    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(thread_name_prefix=_THREADS)
    loop.set_default_executor(threads)
    try:
        return await work
    finally:
        for line in await end_stray_tasks():
            err().print(f"a leftover task ignores its cancellation, at {line}", style="yellow")
        loop.set_default_executor(ThreadPoolExecutor(1))  # asyncio.run waits for the default executor's threads
        threads.shutdown(wait=False, cancel_futures=True)
