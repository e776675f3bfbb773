"""Sessions over HTTP: each lives in a task of its own, which opens it, waits for its end and closes it.

Requests come and go, each in its own task; a session's `async with` must be left in the task that entered it. So the
requests only borrow it from here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from toolyard.errors import SandboxBusyError, SandboxError, SessionLostError, ToolyardError
from toolyard.sandbox.protocol import Limits, Session

_log = logging.getLogger("toolyard.sandbox.service")


class TooManySessionsError(SandboxBusyError):
    """As many are open as the server, or this client, may have."""


class SessionSource(Protocol):
    def session(self, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]: ...


class HostedSession:
    """An open session, its last use, and the way to end it."""

    def __init__(self, client: str, idle_seconds: float) -> None:
        self.client = client
        self.id = secrets.token_urlsafe(18)
        self.idle_seconds = idle_seconds
        self.session: Session | None = None
        self.failure: ToolyardError | None = None
        self.settled = asyncio.Event()
        """Set once it is open, or once it is clear that it will not be."""
        self.ending = asyncio.Event()
        self.ended = asyncio.Event()
        # A session has one interpreter: cells sent at once run one after the other.
        self.turn = asyncio.Lock()
        self.touch()

    def touch(self) -> None:
        self._used_at = asyncio.get_running_loop().time()

    async def until_over(self) -> None:
        """Return when it was ended, or stood idle for `idle_seconds`."""
        while not self.ending.is_set():
            idle = 0.0 if self.turn.locked() else asyncio.get_running_loop().time() - self._used_at
            if idle >= self.idle_seconds:
                # Set, so that a request already waiting for its turn sees that it came too late.
                self.ending.set()
                return
            try:
                async with asyncio.timeout(self.idle_seconds - idle):
                    await self.ending.wait()
            except TimeoutError:
                continue


class SessionHost:
    """Opens, lends and ends sessions. Made by `host_sessions`."""

    def __init__(
        self,
        sandbox: SessionSource,
        group: asyncio.TaskGroup,
        *,
        max_sessions: int,
        max_per_client: int,
        idle_seconds: float,
    ) -> None:
        self._sandbox = sandbox
        self._group = group
        self._max_sessions = max_sessions
        self._max_per_client = max_per_client
        self._idle_seconds = idle_seconds
        self._open: dict[str, HostedSession] = {}

    async def open(
        self, limits: Limits, *, client: str, idle_seconds: float | None, start_within: float
    ) -> HostedSession:
        """A new session of `client`, which lives until `end`, or until it stood idle for too long.

        Raises:
            TooManySessionsError: too many are open, in all or of this client.
            SandboxBusyError: it could not be opened within `start_within` seconds.
            SandboxError: it could not be opened at all.
        """
        if len(self._open) >= self._max_sessions:
            raise TooManySessionsError(f"{self._max_sessions} sessions are open, which is the most this server allows")
        if sum(hosted.client == client for hosted in self._open.values()) >= self._max_per_client:
            most = f"{self._max_per_client} sessions open, which is the most this server allows for each client"
            raise TooManySessionsError(f"client {client} has {most}")
        hosted = HostedSession(client, min(idle_seconds or self._idle_seconds, self._idle_seconds))
        self._open[hosted.id] = hosted
        keeper = self._group.create_task(self._keep(hosted, limits))
        try:
            async with asyncio.timeout(start_within):
                await hosted.settled.wait()
        except BaseException as error:
            # Nobody knows its id yet, so nobody else will ever end it. A task cancelled before its first step
            # never reaches its own clean-up, so the entry goes here.
            keeper.cancel()
            self._open.pop(hosted.id, None)
            if isinstance(error, TimeoutError):
                raise SandboxBusyError(f"no session could be opened within {start_within:g} s") from None
            raise
        if hosted.failure is not None:
            raise hosted.failure
        return hosted

    @asynccontextmanager
    async def lend(self, session_id: str) -> AsyncGenerator[Session]:
        """The session, for this caller alone.

        Raises:
            SessionLostError: there is none of that id, or no more.
        """
        hosted = self._open.get(session_id)
        if hosted is None or hosted.session is None:
            raise _lost(session_id)
        async with hosted.turn:
            if hosted.ending.is_set():
                raise _lost(session_id)
            try:
                yield hosted.session
            finally:
                hosted.touch()

    async def end(self, session_id: str) -> None:
        """Return when it is closed. Ending one that is gone is no error: the outcome is the one asked for."""
        hosted = self._open.get(session_id)
        if hosted is not None:
            hosted.ending.set()
            await hosted.ended.wait()

    def end_all(self) -> None:
        for hosted in self._open.values():
            hosted.ending.set()

    async def _keep(self, hosted: HostedSession, limits: Limits) -> None:
        try:
            async with self._sandbox.session(limits) as session:
                hosted.session = session
                hosted.touch()
                hosted.settled.set()
                await hosted.until_over()
        except ToolyardError as error:
            hosted.failure = error
        except Exception as error:
            # In a task group, one session's surprise would take all the others down with it.
            _log.exception("a session broke")
            hosted.failure = SandboxError(f"the session broke: {error!r}")
        finally:
            self._open.pop(hosted.id, None)
            hosted.ending.set()
            hosted.settled.set()
            hosted.ended.set()


@asynccontextmanager
async def host_sessions(
    sandbox: SessionSource, *, max_sessions: int, max_per_client: int, idle_seconds: float
) -> AsyncGenerator[SessionHost]:
    """All sessions opened here are closed when the block is left."""
    async with asyncio.TaskGroup() as group:
        host = SessionHost(
            sandbox, group, max_sessions=max_sessions, max_per_client=max_per_client, idle_seconds=idle_seconds
        )
        try:
            yield host
        finally:
            host.end_all()


def _lost(session_id: str) -> SessionLostError:
    return SessionLostError(f"there is no session {session_id!r}: it was closed, lost or idle for too long")
