"""The host's end of a worker: sends requests and receives replies in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from toolyard.errors import SandboxError
from toolyard.sandbox.guest import frames
from toolyard.sandbox.host.door import Door

_OVERTIME = 3.0
"""A worker that has not replied this long after its program's limit is broken and gets killed."""
_AHEAD = 8 << 20
"""Bytes of replies buffered for a slow consumer; beyond it, the worker has to wait."""


before_request: ContextVar[Callable[[int], None] | None] = ContextVar("before_request", default=None)
"""Called with the pid of a worker that is about to get a request. For fault injection: it may kill the worker."""


class WorkerReply(NamedTuple):
    """A worker's reply: numbers from the header, and the bytes."""

    reason: int
    flags: int
    status: int
    wall: float
    cpu: float
    starved: float
    peak: int
    stdout: bytes
    stderr: bytes
    extra: bytes

    @property
    def size(self) -> int:
        return len(self.stdout) + len(self.stderr) + len(self.extra)


class WorkerDiedError(SandboxError):
    """The worker crashed or was killed mid-run. The program died with it; running it again is safe."""


class Parent(Protocol):
    """The zygote that forked a worker: it lives as long as its workers, and kills those that do not reply."""

    alive: bool

    def kill(self, launcher: int, /) -> None: ...


class Worker:
    """One jail. Takes one request at a time, which the pool ensures."""

    def __init__(
        self, channel: socket.socket, zygote: Parent, launcher: int, pid: int, cgroup: str, door: Door | None = None
    ) -> None:
        self.zygote = zygote
        self._door = door
        self.pid = pid
        self.runs = 0
        self.alive = True
        self._launcher = launcher
        self._cgroup = cgroup
        self._kills_before = self._kills() if cgroup else 0
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._buffer = bytearray()
        self._answer: asyncio.Future[WorkerReply] | None = None
        self._buffered: deque[WorkerReply] | None = None
        """Replies that arrived before they were asked for; None if the request has only one reply."""
        self._buffered_bytes = 0
        self._retired = False
        """It exited after a reply, either as announced or killed by the kernel's OOM killer."""
        self._loop.add_reader(channel.fileno(), self._readable)

    async def request(self, header: bytes, parts: Sequence[bytes], seconds: float) -> WorkerReply:
        """Send one request and wait for its reply. Cancelling stops the program and leaves the worker usable.

        Raises:
            WorkerDiedError: it died; nothing of the program is left.
        """
        if not self.alive:
            raise WorkerDiedError("the sandbox worker died before the program started")
        self.runs += 1
        answer = self._answer = self._loop.create_future()
        overdue = self._loop.call_later(seconds + frames.patience(seconds) + _OVERTIME, self._overdue)
        try:
            if (notify := before_request.get()) is not None:
                notify(self.pid)
            await self._send([header, *parts])
            return await answer
        except asyncio.CancelledError:
            await self._cancel(answer)
            raise
        finally:
            overdue.cancel()
            self._answer = None

    async def request_each(
        self, header: bytes, parts: Sequence[bytes], seconds: float, count: int
    ) -> AsyncGenerator[WorkerReply]:
        """Send one request and yield its `count` replies, or fewer if the worker retires.

        Closing the generator early stops the program and leaves the worker usable.

        Raises:
            WorkerDiedError: it died; nothing of the program is left.
        """
        if not self.alive:
            raise WorkerDiedError("the sandbox worker died before the program started")
        self.runs += 1
        self._buffered = deque()
        try:
            await self._send([header, *parts])
            while count:
                # A case whose parent process dies is run again from the start.
                reply = await self._next(2 * (seconds + frames.patience(seconds)) + _OVERTIME)
                count -= 1
                yield reply
                if self._retired and not self._buffered:
                    return
        finally:
            if count and self.alive:
                await self._abandon(count)
            self._buffered = None
            self._buffered_bytes = 0

    async def _next(self, seconds: float) -> WorkerReply:
        assert self._buffered is not None
        if self._buffered:
            reply = self._buffered.popleft()
            if self._buffered_bytes > _AHEAD >= self._buffered_bytes - reply.size and self.alive:
                self._loop.add_reader(self._channel.fileno(), self._readable)
            self._buffered_bytes -= reply.size
            return reply
        if not self.alive:
            raise WorkerDiedError("the sandbox worker died mid-run; the run can be repeated")
        answer = self._answer = self._loop.create_future()
        overdue = self._loop.call_later(seconds, self._overdue)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                # It arrived at the same moment: abandoning the batch still has to count it.
                self._buffered.appendleft(answer.result())
                self._buffered_bytes += answer.result().size
            raise
        finally:
            overdue.cancel()
            self._answer = None

    async def _abandon(self, count: int) -> None:
        """Stop the running case, forget the others, and wait for the worker to be clean again."""
        try:
            self._channel.send(frames.REQUEST.pack(frames.CANCEL, 0, 0, *[0] * 12))
            async with asyncio.timeout(_OVERTIME):
                while count and (await self._next(_OVERTIME)).reason != frames.CANCELLED:
                    count -= 1
        except (OSError, TimeoutError, SandboxError):
            self.kill()
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _send(self, parts: list[bytes]) -> None:
        try:
            sent = self._channel.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._dead()
            return
        total = sum(map(len, parts))
        if sent < total:
            try:
                await self._loop.sock_sendall(self._channel, memoryview(b"".join(parts))[sent:])
            except OSError:
                self._dead()
            except asyncio.CancelledError:
                self._answer = None  # no one is waiting for it anymore
                self.kill()  # half a request was sent: the worker's state is unknown
                raise

    async def _cancel(self, answer: asyncio.Future[WorkerReply]) -> None:
        """Stop the program and wait for the worker to be clean again. A second cancellation kills the worker."""
        if not self.alive or not answer.cancelled():
            return
        # Cancelling also cancelled the awaited future; the worker's reply arrives at this new one.
        answer = self._answer = self._loop.create_future()
        try:
            self._channel.send(frames.REQUEST.pack(frames.CANCEL, 0, 0, *[0] * 12))
            async with asyncio.timeout(_OVERTIME):
                await answer
        except (OSError, TimeoutError, SandboxError, asyncio.CancelledError):
            self._answer = None
            self.kill()

    def _readable(self) -> None:
        try:
            chunk = self._channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._dead()
            return
        if self._buffer:
            self._buffer += chunk
            del self._buffer[: self._take(self._buffer)]
        else:
            self._buffer += chunk[self._take(chunk) :]

    def _take(self, content: bytes | bytearray) -> int:
        """Dispatch the complete replies in `content`; returns their size in bytes."""
        at = 0
        while len(content) - at >= frames.RESPONSE.size:
            reason, flags, status, wall, cpu, starved, peak, out, err, extra = frames.RESPONSE.unpack_from(content, at)
            at_out = at + frames.RESPONSE.size
            at_err, at_extra, end = at_out + out, at_out + out + err, at_out + out + err + extra
            if len(content) < end:
                break
            parts = (bytes(content[at_out:at_err]), bytes(content[at_err:at_extra]), bytes(content[at_extra:end]))
            self._arrived(WorkerReply(reason, flags, status, wall, cpu, starved, peak, *parts))
            at = end
            if flags & frames.RETIRING:
                self._retired = True
                self.close()
                break
        return at

    def _arrived(self, reply: WorkerReply) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)
        elif self._buffered is not None:
            self._buffered.append(reply)
            self._buffered_bytes += reply.size
            if self._buffered_bytes > _AHEAD:
                self._loop.remove_reader(self._channel.fileno())

    def _dead(self) -> None:
        if not self.alive:
            return
        if (self._answer is not None or self._buffered is not None) and self._kills() > self._kills_before:
            # The OOM killer hit the worker along with its program: that is a verdict, not our failure.
            self._arrived(WorkerReply(frames.MEMORY_EXCEEDED, 0, 9, 0.0, 0.0, 0.0, 0, b"", b"", b""))
            self._retired = True
        self.close()

    def _kills(self) -> int:
        """How often the OOM killer has struck in the worker's cgroup."""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError), open(f"{self._cgroup}/{name}") as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        return 0

    def _overdue(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(WorkerDiedError("the sandbox worker did not reply in time and was replaced"))
        self.kill()

    def kill(self) -> None:
        """Kill a worker that may be stuck; `close` is enough for one that still listens."""
        if self.alive:
            self.zygote.kill(self._launcher)
        self.close()

    def close(self) -> None:
        """Close the channel: the worker notices and exits, along with everything in its jail.

        A caller still waiting for a reply gets an error, since nothing else would wake it.
        """
        if self.alive:
            self.alive = False
            self._loop.remove_reader(self._channel.fileno())
            hang_up(self._channel)
            if self._door is not None:
                self._door.close()
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(WorkerDiedError("the sandbox worker died mid-run; the run can be repeated"))


def hang_up(channel: socket.socket) -> None:
    """Shut the channel down as well, since a fork of the host may hold copies of it."""
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()
