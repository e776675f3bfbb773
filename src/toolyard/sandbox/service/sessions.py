"""Sessions over HTTP: a task per session opens it, waits for its end and closes it.

Requests run in tasks of their own, but a session's `async with` must be left in the task that entered it. So requests
only borrow the session from here.
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
    """The server, or this client, has the maximum number of sessions open."""


class SessionSource(Protocol):
    def session(self, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]: ...


class HostedSession:
    """An open session and when it was last used."""

    def __init__(self, client: str, idle_seconds: float) -> None:
        self.client = client
        self.id = secrets.token_urlsafe(18)
        self.idle_seconds = idle_seconds
        self.session: Session | None = None
        self.failure: ToolyardError | None = None
        self.settled = asyncio.Event()
        """Set when it is open, or when opening failed."""
        self.ending = asyncio.Event()
        self.ended = asyncio.Event()
        # A session has one interpreter: concurrent cells run one after the other.
        self.turn = asyncio.Lock()
        self.touch()

    def touch(self) -> None:
        self._used_at = asyncio.get_running_loop().time()

    async def wait_for_end(self) -> None:
        """Return when it is ended, or was idle for `idle_seconds`."""
        while not self.ending.is_set():
            idle = 0.0 if self.turn.locked() else asyncio.get_running_loop().time() - self._used_at
            if idle >= self.idle_seconds:
                # Set it, so that a request already waiting for its turn sees that it is too late.
                self.ending.set()
                return
            try:
                async with asyncio.timeout(self.idle_seconds - idle):
                    await self.ending.wait()
            except TimeoutError:
                continue


class SessionHost:
    """Opens, lends and ends sessions. Created by `host_sessions`."""

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
        """Open a session for `client`. It lives until `end`, or until it was idle for too long.

        Raises:
            TooManySessionsError: too many are open, in total or for this client.
            SandboxBusyError: it could not be opened within `start_within` seconds.
            SandboxError: it could not be opened at all.
        """
        if len(self._open) >= self._max_sessions:
            raise TooManySessionsError(f"{self._max_sessions} sessions are open, the most this server allows")
        if sum(hosted.client == client for hosted in self._open.values()) >= self._max_per_client:
            most = f"{self._max_per_client} sessions open, the most this server allows per client"
            raise TooManySessionsError(f"client {client} has {most}")
        hosted = HostedSession(client, min(idle_seconds or self._idle_seconds, self._idle_seconds))
        self._open[hosted.id] = hosted
        keeper = self._group.create_task(self._keep(hosted, limits))
        try:
            async with asyncio.timeout(start_within):
                await hosted.settled.wait()
        except BaseException as error:
            # Nobody else has its id yet, so nobody else can end it. A task cancelled before its first step
            # never reaches its own cleanup, so the entry is removed here.
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
        """Lend the session to this caller exclusively.

        Raises:
            SessionLostError: there is no open session with this id.
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
        """Return when it is closed. Ending a session that is already gone is not an error."""
        hosted = self._open.get(session_id)
        if hosted is not None:
            hosted.ending.set()
            await hosted.ended.wait()

    def end_all(self, client: str | None = None) -> None:
        """`client`: only those of this client."""
        for hosted in self._open.values():
            if client in (None, hosted.client):
                hosted.ending.set()

    async def _keep(self, hosted: HostedSession, limits: Limits) -> None:
        try:
            async with self._sandbox.session(limits) as session:
                hosted.session = session
                hosted.touch()
                hosted.settled.set()
                await hosted.wait_for_end()
        except ToolyardError as error:
            hosted.failure = error
        except Exception as error:
            # In a task group, one session's unexpected error would take all the others down.
            _log.exception("a session failed unexpectedly")
            hosted.failure = SandboxError(f"the session failed unexpectedly: {error!r}")
        finally:
            self._open.pop(hosted.id, None)
            hosted.ending.set()
            hosted.settled.set()
            hosted.ended.set()


@asynccontextmanager
async def host_sessions(
    sandbox: SessionSource, *, max_sessions: int, max_per_client: int, idle_seconds: float
) -> AsyncGenerator[SessionHost]:
    """Host sessions inside the block; all of them are closed when it is left."""
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
