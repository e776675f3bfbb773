"""Runs third-party code in a task of its own.

Its effects stay there: its task groups cancel only its own task, and what it raises is a value, including `SystemExit`
and `GeneratorExit`. If it ignores cancellation, it is abandoned after a grace period. Only Ctrl-C passes through.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from toolyard.supervision.clock import LoopClock, loop_clock
from toolyard.supervision.places import suspended_at

T = TypeVar("T")

_log = logging.getLogger("toolyard.supervision")

GRACE_SECONDS = 5.0
"""How long cancelled code may take to finish."""

_running: dict[asyncio.Task[Any], Call] = {}
_disowned: set[asyncio.Task[Any]] = set()
"""Strong references: the event loop has only weak ones, and a collected task would run its `finally` at any time."""


class Call:
    """Starts in the next iteration of the event loop. One task waits for it with `ended`."""

    __slots__ = (
        "_clock", "_grace", "_has_begun", "_is_cancelled", "_seconds", "_waiter", "_work", "abandoned", "error",
        "expired", "of", "over", "task", "value", "what", "when",
    )  # fmt: skip

    def __init__(
        self,
        work: Coroutine[Any, Any, Any],
        what: str,
        of: str = "",
        *,
        seconds: float | None = None,
        grace: float = GRACE_SECONDS,
        clock: LoopClock | None = None,
    ) -> None:
        """Args:
        what: A readable name: `tool 'search': execute`.
        of: The request it belongs to.
        seconds: How long it may take from its first step until it is cancelled; None: no limit.
        grace: How long it may take to finish after that, before it is abandoned.
        clock: The running loop's clock, if at hand.
        """
        self.what = what
        self.of = of
        self.over = False
        """It has ended, or was abandoned."""
        self.value: Any = None
        self.error: BaseException | None = None
        """What it raised. A `CancelledError` that neither `expired` nor our cancellation caused is its own failure."""
        self.expired = False
        """It took too long and was cancelled."""
        self.abandoned = False
        """It ignored its cancellation and may still be running."""
        self._seconds = seconds
        self._grace = grace
        self._clock = clock or loop_clock()
        self.when = 0.0
        self._has_begun = self._is_cancelled = False
        self._work = work
        self._waiter: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._contain(), name=what)
        _running[self.task] = self

    async def ended(self, *, cancelling: bool = True) -> None:
        """Wait until it is over. If the waiter is cancelled, the cancellation is raised afterwards; `cancelling` says
        whether the call is cancelled too."""
        cancelled = False
        while not self.over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                cancelled = True
                if cancelling:
                    self.cancel()
        if cancelled:
            raise asyncio.CancelledError

    def cancel(self) -> None:
        if self.over or self._is_cancelled:  # a second cancellation would only disturb its cleanup
            return
        self._is_cancelled = True
        self.task.cancel()
        if not self._has_begun:
            self._work.close()
            self.error = asyncio.CancelledError()
            self._conclude()
            return
        self._clock.watch(self, self._grace)

    def expire(self) -> None:
        """Its time is up, or its grace period if it was cancelled."""
        if self._is_cancelled:
            self._abandon()
        else:
            self.expired = True
            self.cancel()

    async def _contain(self) -> None:
        self._has_begun = True
        if self._seconds is not None:  # not earlier: in a busy loop a call could expire before it starts
            self._clock.watch(self, self._seconds)
        try:
            self.value = await self._work
        except KeyboardInterrupt as error:
            self.error = error
            raise
        except BaseException as error:
            self.error = error
        finally:
            self._conclude()

    def _abandon(self) -> None:
        self.abandoned = True
        _log.warning("%s%s ignores its cancellation and is abandoned at %s", self.what, self._owner, self.place)
        _disown(self.task)
        self._conclude()

    def _conclude(self) -> None:
        _running.pop(self.task, None)
        self._clock.forget(self)
        self.over = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def _owner(self) -> str:
        return f" of request {self.of}" if self.of else ""

    @property
    def place(self) -> str:
        """The line where it is waiting."""
        return suspended_at(self._work)

    def __str__(self) -> str:
        return f"{self.what}{self._owner}"


def call_of(task: asyncio.Task[Any] | None) -> Call | None:
    """The call that runs in this task."""
    return None if task is None else _running.get(task)


async def uninterrupted(*calls: Call) -> None:
    """Wait for calls that must finish. Cancellations that arrive meanwhile are raised afterwards."""
    cancelled = False
    for call in calls:
        try:
            await call.ended(cancelling=False)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


async def end_stray_tasks(grace: float = GRACE_SECONDS) -> list[str]:
    """Cancel every other task of the loop, and disown those that ignore it: `asyncio.run` would wait for them forever.
    Returns the lines where they hang."""
    stray = asyncio.all_tasks() - {asyncio.current_task()}
    for task in stray:
        task.cancel()
    left = (await asyncio.wait(stray, timeout=grace))[1] if stray else set[asyncio.Task[Any]]()
    for task in left:
        _disown(task)
    return [suspended_at(task.get_coro()) for task in left]


def _disown(task: asyncio.Task[Any]) -> None:
    """Keep `asyncio.run` from waiting for the task, and the interpreter from complaining about it."""
    _disowned.add(task)
    task.add_done_callback(_disowned.discard)
    asyncio._unregister_task(task)  # pyright: ignore  # noqa: SLF001 - documented in "Extending asyncio"
    task._log_destroy_pending = False  # pyright: ignore  # noqa: SLF001


async def run_in_thread(call: Callable[[], T], name: str = "toolyard call") -> T:
    """Like `asyncio.to_thread`, but in a separate daemon thread.

    The loop has few threads for everyone, and hanging calls would use them up. The interpreter also waits for those at
    exit, so that Ctrl-C could not end a run whose tool hangs.
    """
    finished: Future[T] = Future()
    finished.set_running_or_notify_cancel()

    def run() -> None:
        try:
            finished.set_result(call())
        except StopIteration as error:  # a future cannot carry it: the waiter would never wake up
            problem = RuntimeError("the function raised StopIteration")
            problem.__cause__ = error
            finished.set_exception(problem)
        except BaseException as error:
            finished.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    return await asyncio.wrap_future(finished)
