"""A function of the user's as the final reward."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import math
import threading
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, ClassVar, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

from pydantic_core import to_jsonable_python

from toolyard.errors import ConfigError, RewardError
from toolyard.rewards.protocol import FinalReward, FinalScore
from toolyard.supervision import Call

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRACE_CHARS = 10_000
_VALUE_CHARS = 80


def check_call(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: the function does not take verl's arguments, or not the options.
    """
    if clashing := [key for key in options if key in ARGUMENTS]:
        raise ConfigError(f"option {clashing[0]!r}: that argument is the task's or the model's, and cannot be set")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some builtins nobody knows it
        return
    try:
        signature.bind(**dict.fromkeys((*ARGUMENTS, *options)))
    except TypeError as error:
        called = ", ".join((*ARGUMENTS, *options))
        raise ConfigError(
            f"the function takes {signature}, and would be called with the keywords {called}: {error}"
        ) from None


class FunctionReward(FinalReward):
    """A function of the user's; `options` are keyword arguments of every call.

    An async one runs in the event loop, which it must not block; when it is late it is cancelled, and has to end then.
    Another one runs in a thread, at most `max_running` at the same time; waiting for a thread does not count towards
    the deadline. A thread cannot be stopped: one that is late is abandoned and goes on until the function returns. With
    `max_hung` such threads, further calls are refused until one of them ends.
    """

    reads_the_task: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        *,
        max_running: int = 32,
        max_hung: int = 32,
    ) -> None:
        self.name = name
        self._function = function
        self._options = dict(options or {})
        self._threads = Threads(f"reward {name!r}", max_running, max_hung)
        called: Any = getattr(function, "__call__", None)  # noqa: B004  (an object may have an async one)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

    async def score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        *,
        deadline_seconds: float,
    ) -> FinalScore:
        try:
            return self._read(
                await self._call(deadline_seconds, data_source, solution_str, ground_truth, dict(extra_info))
            )
        except RewardError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    async def _call(self, seconds: float, *values: Any) -> Any:
        # Copies: what one call does to them must not be seen by the next, or by the trajectory.
        arguments = copy.deepcopy(dict(zip(ARGUMENTS, values, strict=True)) | self._options)
        if self._is_async:
            return await self._supervised(self._function(**arguments), seconds)
        async with self._threads.slot():
            late = asyncio.timeout(seconds)
            try:
                async with late:
                    returned = await self._threads.run(lambda: self._function(**arguments))
            except TimeoutError:
                if late.expired():
                    raise self._late(seconds) from None
                raise  # the function's own
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise self._failed(error) from error  # the function's own doing
            return await self._supervised(_value_of(returned), seconds) if inspect.isawaitable(returned) else returned

    async def _supervised(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """What it returns. It runs in a task of its own, and so cannot cancel the trajectory's."""
        call = Call(work, f"reward {self.name!r}", seconds=seconds)
        await call.ended()
        if call.expired:
            raise self._late(seconds, ", and ignores its cancellation" if call.abandoned else "")
        if isinstance(call.error, RewardError):
            raise call.error
        if call.error is not None:
            raise self._failed(call.error) from call.error
        return call.value

    def _late(self, seconds: float, more: str = "") -> RewardError:
        return RewardError(f"reward {self.name!r}: did not finish within {seconds:g} s{more}")

    def _failed(self, error: BaseException) -> RewardError:
        trace = "".join(traceback.format_exception(error))
        if len(trace) > _TRACE_CHARS:  # its end says what happened
            trace = "…" + trace[-_TRACE_CHARS:]
        return RewardError(f"reward {self.name!r}: raised {type(error).__name__}\n{trace}")

    def _read(self, returned: Any) -> FinalScore:
        who = f"reward {self.name!r}"
        score, others = read_returned(returned, who)
        try:
            extras: Any = to_jsonable_python(others, fallback=_nearest, inf_nan_mode="null", bytes_mode="base64")
        except ValueError as error:  # it contains itself, say
            raise RewardError(f"{who}: what it returned with the score is no JSON: {error}") from None
        return FinalScore(score, extras)


async def _value_of(work: Awaitable[Any]) -> Any:
    return await work


def read_returned(returned: Any, who: str) -> tuple[float, dict[Any, Any]]:
    """The score in what a function returned, and what else is in it, if that is a dict.

    Raises:
        RewardError: it holds no finite number. The message names `who`.
    """
    if not isinstance(returned, Mapping):
        return _number(returned, who), {}
    given = cast("Mapping[Any, Any]", returned)
    if "score" not in given:
        keys = ", ".join(map(str, given)) or "none"
        raise RewardError(f"{who}: returned a dict without 'score'; its keys: {_short(keys)}")
    return _number(given["score"], who), {key: value for key, value in given.items() if key != "score"}


def _number(given: Any, who: str) -> float:
    item: Any = getattr(given, "item", None)  # of numpy's and torch's numbers, also in an array of one
    try:
        plain: Any = item() if callable(item) else given
        value = math.nan if isinstance(plain, str | bytes | bytearray) else float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        raise RewardError(f"{who}: returned {_short(repr(given))}, which is not a finite number")
    return value


def _nearest(value: Any) -> Any:
    """What JSON has no word for: numpy's as lists and numbers, others as text."""
    as_list = getattr(value, "tolist", None)
    return as_list() if callable(as_list) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _VALUE_CHARS else text[:_VALUE_CHARS] + "…"


# Threads for functions that may hang, which no one can stop.


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
