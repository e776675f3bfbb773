"""The host's side of the process tree: a zygote per profile, and the workers it forks."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import marshal
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolyard.errors import IsolationError, SandboxError

from .guest import cgroups, frames
from .isolation import GUEST_MAIN

_START_SECONDS = 60.0
"""For a zygote with large packages to import."""
_SPAWN_SECONDS = 30.0
"""For one worker, others asked for before it included."""
_OVERTIME = 3.0
"""A worker that has not answered this long after its program's limit is broken, and is killed."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's answer: numbers from the header, and the bytes."""

    reason: int
    flags: int
    status: int
    wall: float
    cpu: float
    peak: int
    stdout: bytes
    stderr: bytes
    extra: bytes


class WorkerDiedError(SandboxError):
    """The worker was killed or crashed in mid-run. The program died with it; running it again is safe."""


class Worker:
    """One jail. Takes one request at a time; the pool sees to that."""

    def __init__(self, channel: socket.socket, zygote: Zygote, launcher: int, pid: int, cgroup: str) -> None:
        self.zygote = zygote
        self.pid = pid
        self.runs = 0
        self.alive = True
        self._launcher = launcher
        self._cgroup = cgroup
        self._kills_before = self._kills() if cgroup else 0
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._buffer = bytearray()
        self._answer: asyncio.Future[Reply] | None = None
        self._loop.add_reader(channel.fileno(), self._readable)

    async def request(self, header: bytes, parts: Sequence[bytes], seconds: float) -> Reply:
        """Send one request and wait for its answer; cancelling stops the program and leaves the worker usable.

        Raises:
            WorkerDiedError: it died; nothing of the program is left.
        """
        if not self.alive:
            raise WorkerDiedError("the sandbox worker died before the program started")
        self.runs += 1
        answer = self._answer = self._loop.create_future()
        overdue = self._loop.call_later(seconds + _OVERTIME, self._overdue)
        try:
            await self._send([header, *parts])
            return await answer
        except asyncio.CancelledError:
            await self._cancel(answer)
            raise
        finally:
            overdue.cancel()
            self._answer = None

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
                self._answer = None  # nobody waits for it any more
                self.kill()  # half a request went out: there is no way back to a known state
                raise

    async def _cancel(self, answer: asyncio.Future[Reply]) -> None:
        """Stop the program and wait for the worker to be clean again. A second cancellation kills the worker."""
        if not self.alive or not answer.cancelled():
            return
        # Our cancellation took the awaited future with it; the worker's answer still comes, to this one.
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
        self._buffer += chunk
        if len(self._buffer) < frames.RESPONSE.size:
            return
        header = frames.RESPONSE.unpack_from(self._buffer)
        sizes = header[6:9]
        if len(self._buffer) < frames.RESPONSE.size + sum(sizes):
            return
        at = frames.RESPONSE.size
        parts: list[bytes] = []
        for size in sizes:
            parts.append(bytes(self._buffer[at : at + size]))
            at += size
        self._buffer = bytearray()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Reply(*header[:6], *parts))
        if header[1] & frames.RETIRING:
            self.close()

    def _dead(self) -> None:
        if not self.alive:
            return
        if self._answer is not None and not self._answer.done() and self._kills() > self._kills_before:
            # It went down with its program: then that is a verdict, not our failure.
            self._answer.set_result(Reply(frames.MEMORY_EXCEEDED, 0, 9, 0.0, 0.0, 0, b"", b"", b""))
        self.close()

    def _kills(self) -> int:
        """How often the kernel killed for memory in the worker's group, ever."""
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError), open(f"{self._cgroup}/{name}") as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        return 0

    def _overdue(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(WorkerDiedError("the sandbox worker did not answer in time and was replaced"))
        self.kill()

    def kill(self) -> None:
        """For a worker that may not be listening any more; `close` is enough for one that is."""
        if self.alive:
            self.zygote.kill(self._launcher)
        self.close()

    def close(self) -> None:
        """Let go of the channel: the worker sees it and leaves, and everything in its jail with it.

        Whoever still waits for its answer is told: nothing else would ever wake them.
        """
        if self.alive:
            self.alive = False
            self._loop.remove_reader(self._channel.fileno())
            _hang_up(self._channel)
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(
                    WorkerDiedError("the sandbox worker died in mid-run; the run can be repeated")
                )


def _hang_up(channel: socket.socket) -> None:
    """Also for copies of it that a fork of the host may hold."""
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()


class Zygote:
    """A warm interpreter process with some packages loaded, from which workers are forked."""

    def __init__(self, name: str, python: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self.failed_modules: tuple[str, ...] = ()
        self.alive = False
        self._python = python
        self._config = config
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Any, ...]]] = {}
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Start the process and wait until it is warm.

        Raises:
            SandboxError: it could not be started, or died while importing; the message holds what it printed.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                [self._python, GUEST_MAIN, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._complaints,
                env=self._config["environment"], pass_fds=(theirs.fileno(),), cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._control.close()
            raise SandboxError(f"cannot start the sandbox zygote {self._python!r}: {error.strerror}") from error
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.alive = True
        self._loop.add_reader(self._control.fileno(), self._readable)
        ready: asyncio.Future[tuple[Any, ...]] = self._loop.create_future()
        self._waiting[0] = ready
        try:
            await self._loop.sock_sendall(self._control, marshal.dumps(dict(self._config), 4))
            async with asyncio.timeout(_START_SECONDS):
                failed, error = await ready
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"zygote {self.name!r} was not ready after {_START_SECONDS:.0f} s") from error
            raise
        if error:
            await self.stop()
            raise SandboxError(f"zygote {self.name!r} could not start: {error}")
        self.failed_modules = tuple(failed)

    async def spawn(self) -> Worker:
        """Fork a worker: a new jail, ready for its first request.

        Raises:
            IsolationError: the kernel refused a layer; the message names it.
            SandboxError: the zygote died.
        """
        if not self.alive:
            raise SandboxError(f"zygote {self.name!r} is gone")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ticket = next(self._tickets)
        answer: asyncio.Future[tuple[Any, ...]] = self._loop.create_future()
        self._waiting[ticket] = answer
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
            self._control.sendmsg([marshal.dumps((ticket, 0), 4)], rights)
            async with asyncio.timeout(_SPAWN_SECONDS):
                launcher, pid, cgroup, error = await answer
        except TimeoutError:
            ours.close()
            self._process.kill()  # stopped or stuck: the next one that needs it starts another
            raise SandboxError(f"zygote {self.name!r} made no worker within {_SPAWN_SECONDS:.0f} s") from None
        except OSError as error:
            ours.close()
            raise SandboxError(f"zygote {self.name!r} does not answer: {error}") from error
        except BaseException:
            ours.close()  # whatever was forked meanwhile sees this and leaves
            raise
        finally:
            theirs.close()
            self._waiting.pop(ticket, None)
        if error:
            ours.close()
            raise IsolationError(f"cannot set up a sandbox worker: {error}; see `toolyard doctor`")
        ours.setblocking(False)
        return Worker(ours, self, launcher, pid, cgroup)

    def kill(self, launcher: int) -> None:
        with contextlib.suppress(OSError):
            self._control.send(marshal.dumps((0, launcher), 4))

    def _readable(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dead()
            return
        ticket, *message = marshal.loads(data)
        answer = self._waiting.pop(ticket, None)
        if answer is not None and not answer.done():
            answer.set_result(tuple(message))

    def _dead(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._control.fileno())
        _hang_up(self._control)
        self._complaints.seek(0)
        said = self._complaints.read()[-2000:].decode(errors="replace").strip()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                reason = f": {said}" if said else ""
                answer.set_exception(SandboxError(f"the sandbox zygote {self.name!r} died{reason}"))

    async def stop(self) -> None:
        """End the process and all its workers, and wait until they are gone."""
        self._dead()
        handle = os.pidfd_open(self.pid) if self._process.poll() is None else None
        if handle is not None:
            gone: asyncio.Future[None] = self._loop.create_future()
            self._loop.add_reader(handle, lambda: gone.done() or gone.set_result(None))
            try:
                async with asyncio.timeout(10):
                    await gone
            except TimeoutError:
                self._process.kill()
            finally:
                self._loop.remove_reader(handle)
                os.close(handle)
        self._process.wait()
        if self._config["cgroup"]:
            cgroups.sweep(self._config["cgroup"][1], self.pid)  # in case it was killed before it could tidy up
        self._complaints.close()
