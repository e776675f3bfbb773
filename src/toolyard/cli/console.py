"""What the commands share: where they print, and how they end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from toolyard.cli import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

_NOT_A_TERMINAL_WIDTH = 120
"""Of tables in files and logs, where nobody can widen the window and 80 columns would fold every line."""

_THREADS = "toolyard-default"
"""Those of asyncio.to_thread, by name."""
_THREAD_SECONDS = 2.0

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
    try:
        import asyncio

        return asyncio.run(_leaving_nothing(work))
    except KeyboardInterrupt:
        err().print("interrupted", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        work.close()  # interrupted before the loop ran: or Python warns that it was never awaited


def leave(status: object) -> NoReturn:
    """End the process. The interpreter would wait for threads of tools that never end."""
    import threading

    deadline = time.monotonic() + _THREAD_SECONDS
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                err().print("a thread that a tool left behind does not end; it is left alone", style="yellow")
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status if isinstance(status, int) else int(status is not None))
    raise SystemExit(status)


async def _leaving_nothing(work: Coroutine[Any, Any, T]) -> T:
    """`work`, after which `asyncio.run` has nothing to wait for: a tool may have left a task that ignores cancellation,
    or a thread that never ends."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from toolyard.supervision import end_stray_tasks

    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(thread_name_prefix=_THREADS)
    loop.set_default_executor(threads)
    try:
        return await work
    finally:
        for line in await end_stray_tasks():
            err().print(f"a task that somebody left behind ignores its cancellation, at {line}", style="yellow")
        loop.set_default_executor(ThreadPoolExecutor(1))  # asyncio.run waits for the threads of this one
        threads.shutdown(wait=False, cancel_futures=True)
