"""The interpreter that a trajectory keeps between its calls, and its replacement when it is lost."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

from toolyard.errors import SandboxBusyError, SandboxClosedError, SandboxError, SessionLostError
from toolyard.sandbox.protocol import CellResult, Limits, Sandbox, Session


class TrajectorySession:
    """Opened by the first cell, and reopened by the next cell after a loss. Ignores `create_kwargs`."""

    def __init__(self, **create_kwargs: Any) -> None:
        self.turn = asyncio.Lock()
        """Held while a cell runs, and taken before any permit: a call that waits for another call of its own
        trajectory must not keep others from running."""
        self._session: Session | None = None
        self._opened: AbstractAsyncContextManager[Session] | None = None
        self._used = False
        """Whether a cell has finished, so that there is state to lose."""
        self._lost = False
        self._closed = False

    async def run(self, sandbox: Sandbox, limits: Limits, code: str, seconds: float) -> tuple[CellResult, bool]:
        """Run a cell. Also return whether the state of earlier cells is gone and the model does not know yet.

        Raises:
            SandboxError: the cell may have run in part. The session is discarded, so retrying is safe.
            SandboxBusyError: the cell did not start, and the session is unchanged.
        """
        cell = await self._run(sandbox, limits, code, seconds)
        state_lost, self._lost, self._used = self._lost, False, True
        if cell.session_lost:  # the result already says so
            await self._leave()
        return cell, state_lost

    async def _run(self, sandbox: Sandbox, limits: Limits, code: str, seconds: float) -> CellResult:
        while True:
            fresh = self._session is None
            session = self._session or await self._open(sandbox, limits)
            try:
                return await session.run(code, seconds=seconds)
            except SandboxBusyError:
                raise
            except SessionLostError as error:  # expired, or killed between two calls: the cell has not started
                await self._lose()
                if fresh:
                    raise SandboxError(f"a new session was lost before its first cell: {error}") from error
            except BaseException:
                await self._lose()
                raise

    async def close(self) -> None:
        """Close it permanently."""
        self._closed = True
        await self._leave()

    async def _open(self, sandbox: Sandbox, limits: Limits) -> Session:
        if self._closed:  # it would never be closed
            raise SandboxClosedError("the trajectory of this session has ended")
        opening = sandbox.session(limits)
        session = await opening.__aenter__()
        self._session, self._opened, self._used = session, opening, False
        if self._closed:  # meanwhile
            await self._leave()
            raise SandboxClosedError("the trajectory of this session has ended")
        return session

    async def _lose(self) -> None:
        self._lost = self._lost or self._used
        await self._leave()

    async def _leave(self) -> None:
        opened, self._opened, self._session = self._opened, None, None
        if opened is not None:
            await opened.__aexit__(None, None, None)
