"""The parent's side of child processes that each run one function at a time. The child's side is `child`.

They communicate over a socket pair, so that nothing a function prints gets in between. A request is its length and a
cloudpickle; the child replies with a byte when it has received all of it, and then with the outcome. It also sends such
a byte at the start, when it is ready.

A child leads a process group, which dies with it: whatever a function started ends with its process, unless it moved to
another session. If the parent dies, even by SIGKILL, the lifeline closes and the kernel kills the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from toolyard.errors import ExecutionWorkerDiedError, LimiterError
from toolyard.limits.pool.child import HERE, LOST, REPLY, REQUEST, RETURNED, dumps, serve
from toolyard.limits.pool.threads import Outcome


class OutcomeLostError(LimiterError):
    """The function ended, but its result or exception cannot be sent to the caller. The message names its type."""

    retryable = False


class Processes:
    """Child processes: started on first use, reused, and replaced if they die. For one event loop."""

    def __init__(self) -> None:
        self._idle: list[_Child] = []

    def pack(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        return dumps((fn, args, kwargs))

    def worker(self) -> _ChildForOneCall:
        return _ChildForOneCall(self._idle)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().end()


class _ChildForOneCall:
    """A child for one function. It becomes idle again afterwards, unless it died."""

    def __init__(self, idle: list[_Child]) -> None:
        self._idle = idle

    async def __aenter__(self) -> Callable[[bytes], Awaitable[Outcome]]:
        while self._idle:
            self._child = self._idle.pop()
            if self._child.alive:
                return self._run
            await self._child.end()
        self._child = await _Child.start()
        return self._run

    async def __aexit__(self, *_: object) -> None:
        if self._child.alive:
            self._idle.append(self._child)
        else:
            await self._child.end()

    async def _run(self, work: bytes) -> Outcome:
        for again in (True, False):
            child = self._child
            try:
                kind, payload = await child.run(work)
            except _NotStartedError:
                await child.end()
                if again:  # it died while idle, which is not this caller's failure
                    self._child = await _Child.start()
            except ConnectionError:
                await child.end()
                break
            except BaseException:
                await child.end()
                raise
            else:
                return _unpack(kind, payload, child.pid)
        return None, ExecutionWorkerDiedError(f"the process that ran the function died: {self._child.ending}")


class _NotStartedError(Exception):
    """The child died before it received the whole request."""


class _Child:
    def __init__(self) -> None:
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            self._socket, channel = socket.socketpair()
            undo.callback(self._socket.close)
            theirs.callback(channel.close)
            lifeline, self._lifeline = os.pipe()
            undo.callback(os.close, self._lifeline)
            theirs.callback(os.close, lifeline)
            # It uses our module search path, but does not import our main module: there may be none to import.
            main = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]}; from {serve.__module__} "
            main += f"import serve; serve({channel.fileno()}, {lifeline}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", main],
                stdin=subprocess.DEVNULL,
                pass_fds=[channel.fileno(), lifeline],
                start_new_session=True,
            )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.pid = self._process.pid
            # Its end is detected by this, not by the socket's end: a grandchild may keep the socket open.
            self._handle = os.pidfd_open(self.pid)
            undo.pop_all()
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._reap)
        self._gone = asyncio.Event()

    @classmethod
    async def start(cls) -> _Child:
        try:
            child = cls()
        except OSError as error:
            raise ExecutionWorkerDiedError(f"cannot start a worker process: {error}") from error
        try:
            await child._receive(len(HERE))
        except ConnectionError:
            await child.end()
            raise ExecutionWorkerDiedError(f"a worker process did not start: {child.ending}") from None
        except BaseException:
            await child.end()
            raise
        return child

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    @property
    def ending(self) -> str:
        status = self._process.returncode
        return f"killed by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exit status {status}"

    async def run(self, request: bytes) -> tuple[int, bytearray]:
        try:
            await self._loop.sock_sendall(self._socket, REQUEST.pack(len(request)))
            await self._loop.sock_sendall(self._socket, request)
            await self._receive(len(HERE))
        except ConnectionError as error:
            raise _NotStartedError from error
        kind, length = REPLY.unpack(await self._receive(REPLY.size))
        return kind, await self._receive(length)

    async def _receive(self, length: int) -> bytearray:
        received = bytearray(length)
        rest = memoryview(received)
        while rest:
            count = await self._loop.sock_recv_into(self._socket, rest)
            if not count:
                raise ConnectionResetError
            rest = rest[count:]
        return received

    def kill(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # if the host ignores SIGCHLD, the kernel has reaped it
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it and wait until it is gone, however often we are cancelled: until then it may still be working."""
        self.kill()
        cancelled: asyncio.CancelledError | None = None
        while self.alive:
            try:
                await self._gone.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        self._socket.close()
        if cancelled is not None:
            raise cancelled

    def _reap(self) -> None:
        """It is dead but still in the process table, so its pid is not reused yet."""
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        os.close(self._lifeline)
        self.kill()
        self._process.wait()
        self._gone.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # data that has arrived can still be read


def _unpack(kind: int, payload: bytearray, pid: int) -> Outcome:
    if kind == RETURNED:
        try:
            return pickle.loads(payload), None  # noqa: S301  # from our own child
        except BaseException as error:
            return None, OutcomeLostError(f"the function's result cannot be unpickled here: {error!r}")
    name, text, pickled = pickle.loads(payload)  # noqa: S301
    if kind == LOST:
        return None, _noted(OutcomeLostError(f"the function's result, of type {name}, cannot be pickled"), pid, text)
    try:
        error = pickle.loads(pickled)  # noqa: S301
    except BaseException:
        error = None
    if not isinstance(error, BaseException):
        error = OutcomeLostError(f"the function raised {name}, which cannot be pickled")
    return None, _noted(error, pid, text)


def _noted(error: BaseException, pid: int, text: str) -> BaseException:
    with contextlib.suppress(Exception):  # the exception may be frozen
        error.add_note(f"In worker process {pid}:\n{text.rstrip()}")
    return error
