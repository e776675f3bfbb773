"""`ExecutionPool`: runs functions in threads or child processes of this process, a fixed number at once.

A call is a task on the pool's own event loop, since a caller's loop may be blocked, or end while its calls run. It
waits for a worker, first come, first served, and only then for its permit, so that no permit is held idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar

from toolyard.errors import ConfigError, LimiterClosedError, LimiterError
from toolyard.limits.pool.threads import Outcome, Threads
from toolyard.limits.protocol import Limiter, Permit

T = TypeVar("T")
P = ParamSpec("P")


class PoolMode(Enum):
    ThreadMode = "thread"
    """Cheap, and shares this process's memory. A running function cannot be stopped, only waited for."""
    ProcessMode = "process"
    """Each worker is a child process. A function may crash or hang there: cancelling its call kills the process."""


class Call(Generic[T]):
    """A pending or running function call. Await it in any event loop, or block for its `result` in any thread.

    Cancelling a task that awaits the call cancels the call. A task cancelled before its first step never awaited it.
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        try:
            await _wait_for(self._future)
        except BaseException:
            self.cancel()
            raise
        if self._future.cancelled():
            raise asyncio.CancelledError
        return self._future.result()

    def result(self, timeout: float | None = None) -> T:
        """Block for the result. Raises what the function raised.

        Raises:
            TimeoutError: it did not finish within `timeout` seconds; it keeps running.
            concurrent.futures.CancelledError: it was cancelled.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> bool:
        """A call that has not started never will. A running one is killed in process mode; in thread mode it keeps its
        worker and its permit until it ends by itself. Return False if it has already ended."""
        return self._future.cancel()


class _Execute:
    """`pool.execute`. `pool.execute.remote` is the same, so that code written for a Ray actor runs without Ray."""

    def __init__(self, submit: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Call[Any]]) -> None:
        self._submit = submit

    def __call__(self, fn: Callable[P, T], /, *fn_args: P.args, **fn_kwargs: P.kwargs) -> Call[T]:
        return self._submit(fn, fn_args, fn_kwargs)

    remote = __call__


class _Ping:
    """`pool.ping`, also callable as `pool.ping.remote`."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __call__(self) -> Call[bool]:
        self._check()
        answer: Future[bool] = Future()
        answer.set_result(True)
        return Call(answer)

    remote = __call__


class ExecutionPool:
    """Runs functions, `num_workers` at once, each under a permit of `limiter` if there is one.

    Threads and processes start with the first call. `close`, or leaving a `with` or `async with` block, ends them all,
    but not the limiter, which others share. Calls that have not finished get a `LimiterClosedError`. In thread mode
    closing waits for running functions, so no function may close its own pool. A pool works only in the process that
    created it; pickling one, as part of a tool, gives a copy that raises an error when used.
    """

    def __init__(
        self,
        num_workers: int,
        limiter: Limiter | None = None,
        *,
        mode: PoolMode = PoolMode.ThreadMode,
        tenant: str = "",
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers={num_workers!r} is not a positive number of workers")
        self._pid = os.getpid()
        self._limiter = limiter
        self._tenant = tenant
        self._workers = _make_workers(mode, num_workers)
        self._slots = asyncio.Semaphore(num_workers)
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stopped: Future[None] = Future()

    @property
    def execute(self) -> _Execute:
        """`execute(fn, *args, **kwargs)` starts a `Call`. In process mode, function and arguments are pickled now.

        Raises:
            LimiterClosedError: the pool is closed.
            TypeError, pickle.PicklingError: in process mode, the function or an argument cannot be pickled.
        """
        return _Execute(self._submit)

    @property
    def ping(self) -> _Ping:
        """`ping()` is a `Call` that returns True immediately, without a permit.

        Raises:
            LimiterClosedError: the pool is closed.
        """
        return _Ping(self._check)

    def close(self) -> None:
        """Wait until nothing is left: no thread, no process, no file descriptor."""
        if (thread := self._begin_to_close()) is not None:
            thread.join()

    async def aclose(self) -> None:
        if (thread := self._begin_to_close()) is not None:
            await _wait_for(self._stopped)
            thread.join()

    def _begin_to_close(self) -> threading.Thread | None:
        if os.getpid() != self._pid:
            return None
        with self._lock:
            if self._thread is not None and not self._closed:
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._closed = True
        return self._thread

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise LimiterError("this execution pool is a copy from another process: create one here, or use Ray")
        if self._closed:
            raise LimiterClosedError("the execution pool is closed")

    def _submit(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
        self._check()
        work = self._workers.pack(fn, args, kwargs)
        label = getattr(fn, "__qualname__", type(fn).__qualname__)
        future: Future[Any] = Future()
        with self._lock:
            self._check()
            if self._thread is None:
                self._start()
            self._loop.call_soon_threadsafe(self._begin, future, work, label)
        return Call(future)

    def _start(self) -> None:
        started: Future[None] = Future()
        thread = threading.Thread(target=self._main, args=[started], name="toolyard-pool", daemon=True)
        thread.start()
        self._thread = thread
        started.result()

    # ---------------------------------------------------------------------------------------- in the pool's own thread
    def _main(self, started: Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._serve(started))
        finally:
            self._stopped.set_result(None)

    async def _serve(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = self._loop.create_future()
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.TaskGroup() as self._group:
                started.set_result(None)
                await self._serving  # cancelled by `close`, and all calls with it
        await self._workers.close()

    def _begin(self, future: Future[Any], work: Any, label: str) -> None:
        task = self._group.create_task(self._run(future, work, label), name=label)

        def stop(done: Future[Any]) -> None:
            if done.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        # Even if it is already cancelled, the task takes its first step before `stop` runs, and so always finishes.
        future.add_done_callback(stop)

    async def _run(self, future: Future[Any], work: Any, label: str) -> None:
        value: Any = None
        error: BaseException | None = LimiterClosedError(f"the execution pool was closed before {label} ended")
        try:
            async with self._slots, self._workers.worker() as run, self._permit(label):
                if future.cancelled():
                    return
                value, error = await run(work)
                if error is not None:
                    raise error  # through the permit, which must see it
        except asyncio.CancelledError:
            pass
        except BaseException as raised:
            error = raised
        _settle(future, value, error)

    def _permit(self, label: str) -> Permit | contextlib.nullcontext[None]:
        if self._limiter is None:
            return contextlib.nullcontext()
        return self._limiter.permit(self._tenant, label=label)

    def __getstate__(self) -> dict[str, Any]:
        return {"_pid": 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _settle(future: Future[Any], value: Any, error: BaseException | None) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled, or settled already
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


async def _wait_for(future: Future[Any]) -> None:
    """Wait in the current event loop. Cancelling the wait does not cancel the future."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # that loop is closed, so no one is waiting
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(wake)
    await ended.wait()


class _Workers(Protocol):
    def pack(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def worker(self) -> AbstractAsyncContextManager[Callable[[Any], Awaitable[Outcome]]]:
        """A ready worker, which runs packed work. When cancelled, it returns only after the work has stopped."""
        ...

    async def close(self) -> None: ...


def _make_workers(mode: PoolMode, count: int) -> _Workers:
    if mode is PoolMode.ThreadMode:
        return Threads(count)
    from toolyard.limits.pool.process import Processes

    return Processes()
