"""Threads for functions that may hang, which no one can stop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from toolyard.errors import RewardError

T = TypeVar("T")
_CARRIED = (Exception, asyncio.CancelledError)


class Threads:
    """Daemon threads, one a call: those of the event loop are few and everybody's, and the interpreter waits for them
    at its end, so that a function that hangs would keep a finished run alive. `what` is whose they are, for messages.
    """

    def __init__(self, what: str, max_running: int, max_hung: int) -> None:
        self.what = what
        self.max_running = max_running
        self.max_hung = max_hung
        self.hung = 0
        """Calls that were given up and have not returned yet."""
        self._lock = threading.Lock()
        # A semaphore belongs to the loop it was first waited for in; a reward may outlive one.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """The right to run one call. A call that is given up gives it back: the others are not made to wait for it.

        Raises:
            RewardError: `max_hung` calls have been given up and still run.
        """
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_running)):
            if self.hung >= self.max_hung:
                raise RewardError(
                    f"{self.what}: {self.hung} earlier calls did not finish in time and still run; "
                    "no more are begun until one ends"
                )
            yield

    async def run(self, call: Callable[[], T]) -> T:
        """Of `call`, in a thread. Cancelled, it leaves the thread behind and counts it as hung."""
        finished: Future[Callable[[], T]] = Future()
        finished.set_running_or_notify_cancel()

        def work() -> None:
            # An error travels as a value: as the future's own, asyncio loses the traceback of a TimeoutError, and never
            # wakes up for a StopIteration.
            try:
                returned = call()
            except BaseException as error:
                raised = error if isinstance(error, _CARRIED) else _carrier(error)
                finished.set_result(lambda: _raise(raised))
            else:
                finished.set_result(lambda: returned)

        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(work,), name="toolyard reward", daemon=True).start()
        try:
            outcome = await asyncio.wrap_future(finished)
        except asyncio.CancelledError:
            if not finished.done():
                self._give_up(finished)
            raise
        return outcome()

    def _give_up(self, finished: Future[Any]) -> None:
        with self._lock:
            self.hung += 1
        finished.add_done_callback(self._came_back)

    def _came_back(self, finished: object) -> None:
        with self._lock:
            self.hung -= 1


def _carrier(error: BaseException) -> RuntimeError:
    """SystemExit and the like mean something to whoever awaits; here they are only what a function did."""
    carrier = RuntimeError(f"the function raised {type(error).__name__}")
    carrier.__cause__ = error
    return carrier


def _raise(error: BaseException) -> NoReturn:
    raise error
