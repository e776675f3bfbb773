"""Async code for callers that cannot await: one daemon thread with an event loop in each process, and what lives there.

    async def score(text):
        judge = await blocking.kept("judge", CodeJudge)
        return await judge.judge(text, suite)

    result = blocking.run(score(text))          # from any thread, also from one whose own event loop is running

A fork starts without it, since threads do not survive one, and makes its own on first use. It ends with the process:
what is kept is closed, so that no sandbox is left behind.
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
"""More than a sandbox takes at worst. Then the process ends all the same."""

_lock = threading.Lock()
_current: _Thread | None = None
_inherited: list[_Thread] = []
"""Of the processes this one was forked from. Never touched, and never collected: closing them is not for us to do."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, or raises. Blocks this thread, and no other. Interrupted, it cancels `work`.

    Raises:
        RewardError: it was called in the loop that it would wait for, or the process is ending.
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
        # Not by the future that is waited for: the interrupt may have come before it was there.
        interrupted = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs in it
            thread.loop.call_soon_threadsafe(cancel)
        raise


async def kept(key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
    """In work that `run` runs: what `make()` opens, the first time; later the same for the same `key`.

    It is closed at the end of the process, in the task that opened it. If it cannot be opened, whoever asked learns
    why, and the next one tries again.
    """
    # Cancelled, a caller goes and the others still wait for it.
    return await asyncio.shield(_thread(inside=True).residents.of(key, make))


async def let_go(key: Hashable) -> None:
    """In work that `run` runs: close what is kept for `key`, if there is something, and wait for that."""
    await _thread(inside=True).residents.let_go(key)


def close() -> None:
    """Close what is kept, and end the thread. The next one who needs it starts another."""
    global _current
    with _lock:
        thread, _current = _current, None
    if thread is not None:
        thread.close()


class _Thread:
    """The thread, from the outside."""

    def __init__(self) -> None:
        started: Future[tuple[asyncio.AbstractEventLoop, _Residents]] = Future()
        self._thread = threading.Thread(target=self._main, args=[started], name="toolyard-rewards", daemon=True)
        self._thread.start()
        self.loop, self.residents = started.result()
        self.closed = False
        # At the end of the interpreter, and also of multiprocessing's children, which do not get that far.
        self.close = Finalize(None, self._close, exitpriority=0)

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def _main(self, started: Future[tuple[asyncio.AbstractEventLoop, _Residents]]) -> None:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: Future[tuple[asyncio.AbstractEventLoop, _Residents]]) -> None:
        async with asyncio.TaskGroup() as group:
            residents = _Residents(group)
            started.set_result((asyncio.get_running_loop(), residents))
            await residents.leaving.wait()

    def _close(self) -> None:
        self.closed = True
        self.loop.call_soon_threadsafe(self.residents.leave)
        self._thread.join(_CLOSING_SECONDS)


class _Residents:
    """What is open in the loop, each in a task of its own."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.leaving = asyncio.Event()
        self._group = group
        self._open: dict[Hashable, asyncio.Future[Any]] = {}
        self._held: dict[Hashable, tuple[asyncio.Task[None], asyncio.Event]] = {}
        """The task that opened it, and what it waits for before it closes it."""

    def of(self, key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> asyncio.Future[T]:
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = asyncio.get_running_loop().create_future()
            found.add_done_callback(_seen)
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

    async def let_go(self, key: Hashable) -> None:
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
                del self._open[key], self._held[key]  # first: who asks for it while it closes gets another
        except Exception as error:
            # Of opening it, for those who wait. One of closing it has nobody to go to: nobody uses it any more.
            if not opened.done():
                del self._open[key], self._held[key]
                opened.set_exception(error)


def _seen(future: asyncio.Future[Any]) -> None:
    """Or asyncio complains of an error that nobody asked for, where all who waited were cancelled."""
    if not future.cancelled():
        future.exception()


def _thread(*, inside: bool = False) -> _Thread:
    global _current
    with _lock:
        if _current is None:
            _current = _Thread()
        thread = _current
    if thread.closed:
        raise RewardError("no reward is computed any more: the process is ending", whose=OURS)
    if thread.is_current() is not inside:
        raise RewardError(
            "only work that `blocking.run` runs can keep something there"
            if inside
            else "a blocking reward was asked for in the event loop that it would wait for; call it in a thread "
            "(asyncio.to_thread)"
        )
    return thread


def _forget() -> None:
    global _lock, _current
    if _current is not None:
        _inherited.append(_current)
    _lock, _current = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
