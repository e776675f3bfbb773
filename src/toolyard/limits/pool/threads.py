"""Threads that each run one function at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Outcome = tuple[Any, BaseException | None]
"""What a function returned, and what it raised."""


class Threads:
    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="toolyard-worker")

    def pack(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        return functools.partial(fn, *args, **kwargs)

    def worker(self) -> contextlib.nullcontext[Callable[[Callable[[], Any]], Awaitable[Outcome]]]:
        return contextlib.nullcontext(self._run)

    async def _run(self, work: Callable[[], Any]) -> Outcome:
        running = asyncio.get_running_loop().run_in_executor(self._threads, _outcome, work)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                # A thread cannot be stopped. If its permit were given back now, the limit would be exceeded.
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return running.result()

    async def close(self) -> None:
        self._threads.shutdown()


def _outcome(work: Callable[[], Any]) -> Outcome:
    try:
        return work(), None
    except BaseException as error:  # including sys.exit(), which is meant for the caller
        return None, error
