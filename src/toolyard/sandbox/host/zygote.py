"""The host's side of the process tree: a zygote per profile, and the workers it forks."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import logging
import marshal
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from toolyard.errors import IsolationError, SandboxError
from toolyard.sandbox.guest import cgroups, frames
from toolyard.sandbox.host.door import open_door
from toolyard.sandbox.host.worker import Worker, hang_up
from toolyard.sandbox.host.worker import WorkerReply as WorkerReply
from toolyard.sandbox.isolation import GUEST_MAIN

_log = logging.getLogger(__name__)
_START_SECONDS = 60.0
"""Long enough for a zygote that imports large packages."""
_SPAWN_SECONDS = 30.0
"""For one worker, including those requested before it."""


_EAGER_BINDING = {"LD_BIND_NOW": "1"}
"""Otherwise every child resolves the same library functions again and copies the pages that record them."""


class Zygote:
    """A warm interpreter process with some packages loaded, from which workers are forked."""

    def __init__(
        self, name: str, python: str, config: Mapping[str, Any], reachable: tuple[str, int] | None = None
    ) -> None:
        self.name = name
        self._reachable = reachable
        self.alive = False
        self._python = python
        self._config = config
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Any, ...]]] = {}
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Start the process and wait until it is warm.

        Raises:
            SandboxError: it could not be started, or died while importing; the message contains its output.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            self._process = subprocess.Popen(
                [self._python, GUEST_MAIN, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._complaints,
                env={**self._config["environment"], **_EAGER_BINDING}, pass_fds=(theirs.fileno(),), cwd="/",
                start_new_session=True,
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
        if failed:
            _log.warning(
                "programs of profile %r start more slowly, since not imported: %s", self.name, "; ".join(failed)
            )

    async def spawn(self) -> Worker:
        """Fork a worker: a new jail, ready for its first request.

        Raises:
            IsolationError: the kernel refused a layer; the message names it.
            SandboxError: the zygote died, or the worker died before it was ready.
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
            self._process.kill()  # stopped or stuck: the next caller starts another
            raise SandboxError(f"zygote {self.name!r} did not fork a worker within {_SPAWN_SECONDS:.0f} s") from None
        except OSError as error:
            ours.close()
            raise SandboxError(f"zygote {self.name!r} does not answer: {error}") from error
        except BaseException:
            ours.close()  # a worker forked meanwhile notices and exits
            raise
        finally:
            theirs.close()
            self._waiting.pop(ticket, None)
        if error:
            ours.close()
            if error in (frames.LAUNCHER_DIED, frames.LAUNCHER_LATE):
                raise SandboxError(f"cannot start a sandbox worker: {error}; try again")
            raise IsolationError(f"cannot set up a sandbox worker: {error}; see `toolyard doctor`")
        door = None
        if self._reachable is not None:
            _, (handle,), _, _ = socket.recv_fds(ours, 1, 1)  # sent before it reported that it was ready
            door = await open_door(socket.socket(fileno=handle), *self._reachable)
        ours.setblocking(False)
        return Worker(ours, self, launcher, pid, cgroup, door)

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
        hang_up(self._control)
        self._complaints.seek(0)
        said = self._complaints.read()[-2000:].decode(errors="replace").strip()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                reason = f": {said}" if said else ""
                answer.set_exception(SandboxError(f"the sandbox zygote {self.name!r} died{reason}"))

    async def stop(self) -> None:
        """Stop the process and all its workers, and wait until they are gone."""
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
            cgroups.sweep(self._config["cgroup"][1], self.pid)  # in case it was killed before it could clean up
        self._complaints.close()
