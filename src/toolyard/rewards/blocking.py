"""Run async code from callers that cannot await: one daemon thread with an event loop per process.

    async def score(text):
        judge = await blocking.kept("judge", CodeJudge)
        return await judge.judge(text, suite)

    result = blocking.run(score(text))          # from any thread, even one with a running event loop

A forked process starts without the thread, since threads do not survive a fork, and creates its own on first use. It
ends with the process: everything kept is closed, so that no sandbox is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from toolyard.errors import OURS, RewardError

T = TypeVar("T")

_CLOSING_SECONDS = 20.0
"""Longer than a sandbox takes at worst. Then the process ends anyway."""

_lock = threading.Lock()
_current: _Thread | None = None
_inherited: list[_Thread] = []
"""Threads of the processes this one was forked from. Never used, never collected: only their owner may close them."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, or raise what it raises. Blocks only this thread. If interrupted, it cancels `work`.

    Raises:
        RewardError: it was called in the loop that it would block, or the process is ending.
    """
    try:
        thread = _thread()
    except BaseException:
        work.close()
        raise
    running: list[asyncio.Task[Any]] = []
    interrupted = False

    async def noted() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append(task)
        if interrupted:
            task.cancel()
        try:
            return await work
        finally:
            running.clear()

    def cancel() -> None:
        for task in running:
            task.cancel()

    try:
        return asyncio.run_coroutine_threadsafe(noted(), thread.loop).result()
    except BaseException:
        # Not through the awaited future: the interrupt may have come before it existed.
        interrupted = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs in it
            thread.loop.call_soon_threadsafe(cancel)
        raise


async def kept(key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
    """In work run by `run`: return what `make()` opens the first time; later the same object for the same `key`.

    It is closed at the end of the process, in the task that opened it. If opening fails, the caller gets the error, and
    the next call tries again.
    """
    # If one caller is cancelled, the others keep waiting.
    return await asyncio.shield(_thread(inside=True).residents.of(key, make))


async def discard(key: Hashable) -> None:
    """In work run by `run`: close what is kept for `key`, if anything, and wait for it."""
    await _thread(inside=True).residents.discard(key)


def close() -> None:
    """Close everything kept, and end the thread. The next use starts another."""
    global _current
    with _lock:
        thread, _current = _current, None
    if thread is not None:
        thread.close()


class _Thread:
    """The thread, seen from outside."""

    def __init__(self) -> None:
        started: Future[tuple[asyncio.AbstractEventLoop, _KeptObjects]] = Future()
        self._thread = threading.Thread(target=self._main, args=[started], name="toolyard-rewards", daemon=True)
        self._thread.start()
        self.loop, self.residents = started.result()
        self.closed = False
        # At the end of the interpreter, and of multiprocessing's children, which do not run atexit hooks.
        self.close = Finalize(None, self._close, exitpriority=0)

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def _main(self, started: Future[tuple[asyncio.AbstractEventLoop, _KeptObjects]]) -> None:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: Future[tuple[asyncio.AbstractEventLoop, _KeptObjects]]) -> None:
        async with asyncio.TaskGroup() as group:
            residents = _KeptObjects(group)
            started.set_result((asyncio.get_running_loop(), residents))
            await residents.leaving.wait()

    def _close(self) -> None:
        self.closed = True
        self.loop.call_soon_threadsafe(self.residents.leave)
        self._thread.join(_CLOSING_SECONDS)


class _KeptObjects:
    """What is open in the loop, each in its own task."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.leaving = asyncio.Event()
        self._group = group
        self._open: dict[Hashable, asyncio.Future[Any]] = {}
        self._held: dict[Hashable, tuple[asyncio.Task[None], asyncio.Event]] = {}
        """The task that opened each, and the event that makes it close."""

    def of(self, key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> asyncio.Future[T]:
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = asyncio.get_running_loop().create_future()
            found.add_done_callback(_mark_retrieved)
            leave = asyncio.Event()
            if self.leaving.is_set():
                leave.set()
            task = self._group.create_task(self._hold(key, make, found, leave), name=f"toolyard keeps {key!r}"[:80])
            self._held[key] = task, leave
        return found

    def leave(self) -> None:
        """Close everything."""
        self.leaving.set()
        for _, leave in self._held.values():
            leave.set()

    async def discard(self, key: Hashable) -> None:
        if key in self._held:
            task, leave = self._held[key]
            leave.set()
            await asyncio.wait([task])

    async def _hold(
        self,
        key: Hashable,
        make: Callable[[], AbstractAsyncContextManager[T]],
        opened: asyncio.Future[T],
        leave: asyncio.Event,
    ) -> None:
        try:
            async with make() as resident:
                opened.set_result(resident)
                await leave.wait()
                del self._open[key], self._held[key]  # first: a request while it closes gets another
        except Exception as error:
            # Errors of opening go to the waiters. An error of closing has no recipient: it is no longer in use.
            if not opened.done():
                del self._open[key], self._held[key]
                opened.set_exception(error)


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Otherwise asyncio logs an error that was never retrieved, if all waiters were cancelled."""
    if not future.cancelled():
        future.exception()


def _thread(*, inside: bool = False) -> _Thread:
    global _current
    with _lock:
        if _current is None:
            _current = _Thread()
        thread = _current
    if thread.closed:
        raise RewardError("no reward can be computed: the process is ending", whose=OURS)
    if thread.is_current() is not inside:
        raise RewardError(
            "`blocking.kept` can only be called in work run by `blocking.run`"
            if inside
            else "a blocking reward was called in the event loop that it would block; call it in a thread "
            "(asyncio.to_thread)"
        )
    return thread


def _forget() -> None:
    global _lock, _current
    if _current is not None:
        _inherited.append(_current)
    _lock, _current = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
