"""A permit of a desk: waiting for it, in a loop or in a thread, holding it, and giving it back whatever happens."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from toolyard.errors import LimiterError, LimiterTimeoutError, PermitExpiredError, SandboxBusyError

if TYPE_CHECKING:
    from .desk import Desk

NEW, WAITING, HELD, REVOKED, DONE = range(5)
HARD_STOP = 1.0
"""Seconds an execution has to heed its cancellation before its permit is taken back all the same."""


class DeskPermit:
    """See `protocol.Permit`."""

    __slots__ = (
        "_desk", "_event", "_future", "_loop", "_timeout", "asked", "error", "grace", "label", "since", "state",
        "tenant", "timeout", "weight",
    )  # fmt: skip

    def __init__(self, desk: Desk, tenant: str, weight: float, timeout: float | None, label: str) -> None:
        self._desk = desk
        self.tenant = tenant
        self.weight = weight
        self.timeout = timeout
        self.label = label
        self.state = NEW
        self.asked = self.since = 0.0
        self.error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._future: asyncio.Future[None] | None = None
        self._event: threading.Event | None = None
        self._timeout: asyncio.Timeout | None = None
        self.grace = 0.0
        """Seconds beyond `max_hold` until the permit is taken by force."""

    async def __aenter__(self) -> Self:
        desk = self._desk
        if not desk.take(self):
            await self._wait()
        if desk.max_hold is not None:
            self.grace = HARD_STOP
            self._timeout = asyncio.timeout(desk.max_hold)
            await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._note(error)
        revoked = self.state == REVOKED
        self._desk.give_back(self)
        if self._timeout is None:
            return
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            error = late
        late = self._timeout.expired()
        if late and not revoked:
            self._desk.count_expired()
        if (late or revoked) and (error is None or isinstance(error, TimeoutError)):
            raise _expired(self) from error

    def __enter__(self) -> Self:
        if not self._desk.take(self):
            self._block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._note(error)
        revoked = self.state == REVOKED
        self._desk.give_back(self)
        if revoked and error is None:
            raise _expired(self)

    def refused(self, retry_after: float | None = None, *, unavailable: bool = False) -> None:
        self._desk.refuse(retry_after, unavailable=unavailable)

    def _note(self, error: BaseException) -> None:
        if isinstance(error, SandboxBusyError):
            self._desk.refuse(error.retry_after, unavailable=False)

    async def _wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()
        if self._desk.line_up(self):
            return
        try:
            if self.timeout is None:
                await self._future
            else:
                async with asyncio.timeout(self.timeout):
                    await self._future
        except BaseException as error:
            # Granted in the same moment as we gave up: pass it on, or it is lost for ever.
            self._desk.give_back(self)
            if isinstance(error, TimeoutError) and not isinstance(error, LimiterError):
                raise _late(self) from None
            raise

    def _block(self) -> None:
        self._event = threading.Event()
        if self._desk.line_up(self):
            return
        try:
            in_time = self._event.wait(self.timeout)
        except BaseException:
            self._desk.give_back(self)
            raise
        if not in_time:
            self._desk.give_back(self)
            raise _late(self)
        if self.error is not None:
            raise self.error

    def wake(self, here: asyncio.AbstractEventLoop | None) -> bool:
        """Outside the lock. False if nobody is there any more to be woken."""
        if self._event is not None:
            self._event.set()
            return True
        assert self._loop is not None
        if self._loop is here:
            self.resolve()
            return True
        try:
            self._loop.call_soon_threadsafe(self.resolve)
        except RuntimeError:  # the loop was closed with us still waiting
            return False
        return True

    def resolve(self) -> None:
        future = self._future
        if future is not None and not future.done():  # a cancelled one gives its permit back by itself
            if self.error is None:
                future.set_result(None)
            else:
                future.set_exception(self.error)


def _late(permit: DeskPermit) -> LimiterTimeoutError:
    desk = permit._desk  # pyright: ignore  # noqa: SLF001
    return LimiterTimeoutError(
        f"limiter {desk.name!r}: no permit for tenant {permit.tenant!r} within {permit.timeout:g} s "
        f"({desk.in_use} of {desk.limit} in flight, {desk.waiting} waiting)"
    )


def _expired(permit: DeskPermit) -> PermitExpiredError:
    desk = permit._desk  # pyright: ignore  # noqa: SLF001
    return PermitExpiredError(
        f"limiter {desk.name!r}: {permit.label or 'an execution'} of tenant {permit.tenant!r} held its permit longer "
        f"than max_hold_seconds={desk.max_hold:g}"
    )
