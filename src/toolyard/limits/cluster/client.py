"""A borrower's connection to the lender: reports four times a term, and immediately when poked.

One per limiter and process, on the background thread: even if a caller's event loop is blocked for seconds, the process
loses neither its lease nor its permits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from toolyard.connections import watch_peer
from toolyard.errors import LimiterError
from toolyard.limits.background import background
from toolyard.limits.cluster.borrowing import BorrowingDesk
from toolyard.limits.cluster.channel import PROTOCOL, identity, receive, send
from toolyard.limits.desk import process_name
from toolyard.limits.local import conflict

_CONNECT_SECONDS = 5.0
_ASK_SECONDS = 10.0
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5)
_LEAVE_POLL_SECONDS = 0.02
_REPORT_GAP_SECONDS = 0.001
"""Minimum seconds between two reports: what happens meanwhile goes into one."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    secret: str


class Client:
    """`resolve` finds the lender, again after every lost connection, since a restarted lender has another port."""

    def __init__(
        self, name: str, limit: int | None, *, resolve: Callable[[], Awaitable[Address]], max_hold: float | None = None
    ) -> None:
        self.desk = BorrowingDesk(name, limit or 0, max_hold=max_hold, poke=self._poke)
        self._id = uuid.uuid4().hex
        self._limit = limit
        self._resolve = resolve
        self._background = background()
        self._poked = False
        self._news = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._questions = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: Future[None] = Future()
        self._running: Future[None] | None = None
        self._closing = False
        self._users = 1
        self._last_error = ""
        self.gone = False

    def connect(self, within: float) -> None:
        """Start, and block until the first connection.

        Raises:
            LimitConflictError: the limiter exists with another limit.
            LimiterError: it is unreachable.
        """
        self._running = self._background.run(self._run())
        try:
            self._ready.result(within)
        except TimeoutError:
            self._running.cancel()
            why = f": {self._last_error}" if self._last_error else ""
            raise LimiterError(f"limiter {self.desk.name!r} was unreachable for {within:g} s{why}") from None

    def attach(self, limit: int | None) -> None:
        """Add another user of the same limiter in this process.

        Raises:
            LimitConflictError: it asks for another limit.
        """
        if limit not in (None, self._limit, self.desk.limit):
            raise conflict(self.desk.name, limit, self.desk.limit)
        self._users += 1

    def detach(self) -> int:
        """Remove a user. Return how many are left."""
        self._users -= 1
        return self._users

    async def ask(self, question: str, **details: Any) -> dict[str, Any]:
        """Ask the lender, from any event loop.

        Raises:
            LimiterError: it did not answer.
        """
        return await asyncio.wrap_future(self._background.run(self._ask(question, details)))

    def ask_blocking(self, question: str, **details: Any) -> dict[str, Any]:
        return self._background.run(self._ask(question, details)).result(_ASK_SECONDS + 1)

    def close(self) -> Future[None]:
        """Give everything back and disconnect; done when the last permit in use has come back."""
        self.desk.close()
        return self._background.run(self._leave())

    # --------------------------------------------------------------------------------------- on the background's loop
    def _poke(self) -> None:
        """Called from any thread, and often: only the first call since the last report costs anything."""
        if not self._poked:
            self._poked = True
            self._background.soon(self._news.set)

    async def _run(self) -> None:
        """Until it is closed, whatever happens: if this ended unnoticed, everyone would wait forever."""
        failures = 0
        while not self._closing:
            try:
                address = await self._resolve()
                async with asyncio.timeout(_CONNECT_SECONDS):
                    reader, writer = await asyncio.open_connection(address.host, address.port)
            except Exception as error:
                if isinstance(error, LimiterError) and not error.retryable:
                    self._give_up(error)
                    return
                if not isinstance(error, (OSError, LimiterError)):
                    self._complain()
                self._last_error = str(error)
                await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
                failures += 1
                continue
            failures = 0
            try:
                await self._converse(reader, writer, address)
            except LimiterError as error:
                if not self._ready.done():
                    self._ready.set_exception(error)
                    return
                await asyncio.sleep(_PAUSES[-1])
            except OSError:
                await asyncio.sleep(_PAUSES[0])
            except Exception:
                self._complain()
                await asyncio.sleep(_PAUSES[-1])
            finally:
                self._writer = None
                writer.close()
                for question in self._asked.values():
                    if not question.done():
                        question.set_exception(LimiterError(f"limiter {self.desk.name!r}: the connection broke"))
                self._asked.clear()

    def _complain(self) -> None:
        _log.warning("limiter %r: an error of its client, which connects again", self.desk.name, exc_info=True)

    def _give_up(self, error: LimiterError) -> None:
        """The lender is gone for good: current and future waiters get the error."""
        self.gone = True
        self.desk.close(str(error))
        if not self._ready.done():
            self._ready.set_exception(error)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address) -> None:
        desk = self.desk
        send(writer, {
            "protocol": PROTOCOL, "secret": address.secret, "client": self._id, "process": process_name(),
            "identity": identity(),
            "limit_wanted": self._limit if not self._ready.done() else None, **desk.hello(time.monotonic()),
        })  # fmt: skip
        async with asyncio.timeout(_CONNECT_SECONDS):
            welcome = await receive(reader)
        if "conflict" in welcome:
            raise conflict(desk.name, self._limit or 0, welcome["conflict"])
        if "refused" in welcome:
            raise LimiterError(f"limiter {desk.name!r} refused the connection: {welcome['refused']}")
        watch_peer(writer, welcome["term"])
        desk.max_hold = welcome["max_hold"]
        desk.welcomed(welcome)
        self._writer = writer
        if not self._ready.done():
            self._ready.set_result(None)
        reporting = asyncio.create_task(self._report(writer, welcome["term"] / 4), name=f"report to {desk.name}")
        reporting.add_done_callback(lambda _: writer.close())  # without reports, nothing would ever be granted
        try:
            while True:
                message = await receive(reader)
                if "answer" in message:
                    question = self._asked.pop(message["answer"], None)
                    if question is not None and not question.done():
                        question.set_result(message)
                else:
                    desk.answered(message)
        finally:
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting

    async def _report(self, writer: asyncio.StreamWriter, interval: float) -> None:
        desk = self.desk
        next_full = -math.inf
        next_sweep = time.monotonic() + desk.linger
        while True:
            self._poked = False
            self._news.clear()
            now = time.monotonic()
            if now >= next_sweep:
                desk.give_back_idle()
                next_sweep = math.inf
            full = now >= next_full
            if full:
                next_full = now + interval
            send(writer, desk.report(now, full=full))
            await writer.drain()
            await asyncio.sleep(_REPORT_GAP_SECONDS)
            next_sweep = min(next_sweep, time.monotonic() + desk.linger)
            wait = min(next_full, next_sweep) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait)):
                    await self._news.wait()

    async def _ask(self, question: str, details: Mapping[str, Any]) -> dict[str, Any]:
        if self._writer is None:
            raise LimiterError(f"limiter {self.desk.name!r} is unreachable at the moment")
        number = next(self._questions)
        answer: asyncio.Future[dict[str, Any]] = self._background.loop.create_future()
        self._asked[number] = answer
        try:
            send(self._writer, self.desk.report(time.monotonic(), full=True))  # or the answer would be outdated
            send(self._writer, {"ask": number, "question": question, **details})
            async with asyncio.timeout(_ASK_SECONDS):
                found = await answer
        except ConnectionError:
            raise LimiterError(f"limiter {self.desk.name!r}: the connection broke") from None
        except TimeoutError:
            raise LimiterError(f"limiter {self.desk.name!r} did not answer within {_ASK_SECONDS:g} s") from None
        finally:
            self._asked.pop(number, None)
        if "error" in found:
            raise LimiterError(f"limiter {self.desk.name!r}: {found['error']}")
        return found

    async def _leave(self) -> None:
        while self.desk.give_up():
            self._poke()
            await asyncio.sleep(_LEAVE_POLL_SECONDS)
        self._closing = True
        if self._writer is not None:
            with contextlib.suppress(OSError):
                send(self._writer, self.desk.report(time.monotonic(), full=True))
                send(self._writer, {"bye": True})
                await self._writer.drain()
        if self._running is not None:
            self._running.cancel()
