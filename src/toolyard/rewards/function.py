"""A user's function as the final reward."""

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
from toolyard.rewards.explanation import FIELDS, explanation_in
from toolyard.rewards.protocol import FinalReward, FinalScore
from toolyard.supervision import Call

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRACE_CHARS = 10_000
_VALUE_CHARS = 80


def check_call(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check that the function can be called.

    Raises:
        ConfigError: the function does not take verl's arguments or the options.
    """
    if clashing := [key for key in options if key in ARGUMENTS]:
        raise ConfigError(f"option {clashing[0]!r}: this argument comes from the task or the model and cannot be set")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(**dict.fromkeys((*ARGUMENTS, *options)))
    except TypeError as error:
        called = ", ".join((*ARGUMENTS, *options))
        raise ConfigError(
            f"the function takes {signature}, but would be called with the keywords {called}: {error}"
        ) from None


class FunctionReward(FinalReward):
    """A user's function; `options` are keyword arguments of every call.

    An async function runs in the event loop, which it must not block; at the deadline it is cancelled and must end.
    A plain function runs in a thread, at most `max_running` at the same time; waiting for a thread does not count
    toward the deadline. A thread cannot be stopped: at the deadline it is abandoned and runs until the function
    returns. With `max_hung` such threads, further calls are refused until one of them ends.
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
        # Copies: a call's changes must not be visible to the next one or to the trajectory.
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
                raise  # the function's own error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise self._failed(error) from error  # the function's own error
            return await self._supervised(_value_of(returned), seconds) if inspect.isawaitable(returned) else returned

    async def _supervised(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """Await `work` in its own task, so that it cannot cancel the trajectory's."""
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
        if len(trace) > _TRACE_CHARS:  # the end has the cause
            trace = "…" + trace[-_TRACE_CHARS:]
        return RewardError(f"reward {self.name!r}: raised {type(error).__name__}\n{trace}")

    def _read(self, returned: Any) -> FinalScore:
        who = f"reward {self.name!r}"
        score, others = read_returned(returned, who)
        try:
            extras: Any = to_jsonable_python(others, fallback=_nearest, inf_nan_mode="null", bytes_mode="base64")
        except ValueError as error:  # for example a circular reference
            raise RewardError(f"{who}: what it returned besides the score is not JSON: {error}") from None
        return FinalScore(score, {key: extras[key] for key in extras if key not in FIELDS}, explanation_in(extras))


async def _value_of(work: Awaitable[Any]) -> Any:
    return await work


def read_returned(returned: Any, who: str) -> tuple[float, dict[Any, Any]]:
    """Return the score in what a function returned, and its other entries if it is a dict.

    Raises:
        RewardError: it has no finite score. The message names `who`.
    """
    if not isinstance(returned, Mapping):
        return _number(returned, who), {}
    given = cast("Mapping[Any, Any]", returned)
    if "score" not in given:
        keys = ", ".join(map(str, given)) or "none"
        raise RewardError(f"{who}: returned a dict without 'score'; its keys: {_short(keys)}")
    return _number(given["score"], who), {key: value for key, value in given.items() if key != "score"}


def _number(given: Any, who: str) -> float:
    item: Any = getattr(given, "item", None)  # for numpy's and torch's numbers, including arrays of one
    try:
        plain: Any = item() if callable(item) else given
        value = math.nan if isinstance(plain, str | bytes | bytearray) else float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not math.isfinite(value):
        raise RewardError(f"{who}: returned {_short(repr(given))}, which is not a finite number")
    return value


def _nearest(value: Any) -> Any:
    """Convert what JSON cannot express: numpy's to lists and numbers, others to text."""
    as_list = getattr(value, "tolist", None)
    return as_list() if callable(as_list) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _VALUE_CHARS else text[:_VALUE_CHARS] + "…"


# Threads for functions that may hang and cannot be stopped.


T = TypeVar("T")
_CARRIED = (Exception, asyncio.CancelledError)


class Threads:
    """Daemon threads, one per call. The event loop's threads are few and shared, and the interpreter waits for them at
    exit, so a hung function would keep a finished run alive. `what` names the owner in messages.
    """

    def __init__(self, what: str, max_running: int, max_hung: int) -> None:
        self.what = what
        self.max_running = max_running
        self.max_hung = max_hung
        self.hung = 0
        """Abandoned calls that have not returned yet."""
        self._lock = threading.Lock()
        # A semaphore belongs to the loop that first used it; a reward may outlive that loop.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Hold the right to run one call. An abandoned call gives it back: others do not wait for it.

        Raises:
            RewardError: `max_hung` abandoned calls are still running.
        """
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_running)):
            if self.hung >= self.max_hung:
                raise RewardError(
                    f"{self.what}: {self.hung} earlier calls did not finish in time and are still running; "
                    "no more are started until one ends"
                )
            yield

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread. If cancelled, it abandons the thread and counts it as hung."""
        finished: Future[Callable[[], T]] = Future()
        finished.set_running_or_notify_cancel()

        def work() -> None:
            # An error is passed as a value: as the future's exception, asyncio loses the traceback of a TimeoutError,
            # and never wakes up for a StopIteration.
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
    """Wrap SystemExit and the like, which would affect the awaiting code; here they are only a function's result."""
    carrier = RuntimeError(f"the function raised {type(error).__name__}")
    carrier.__cause__ = error
    return carrier


def _raise(error: BaseException) -> NoReturn:
    raise error
