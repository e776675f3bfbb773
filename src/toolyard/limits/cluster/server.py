"""The lender's TCP server, on asyncio. Anyone who has the secret may borrow."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from toolyard.connections import watch_peer
from toolyard.limits.cluster.channel import PROTOCOL, identity, is_dead, receive, send
from toolyard.limits.cluster.lending import Borrower, Lender
from toolyard.limits.cluster.roster import Roster

_log = logging.getLogger(__name__)
_HELLO_SECONDS = 10.0
_FAILED_SECONDS = 0.1
_DYING_SECONDS = 2.0
"""How long to watch a process whose connection broke for signs of death: its sockets close a moment before it dies."""
_MISSING_SECONDS = 0.05
"""Seconds between checks whether the processes that a restarted lender waits for have died."""
_CLEAN_UP_SECONDS = 1.0


class LenderServer:
    def __init__(self, lender: Lender, secret: str, roster: Roster | None = None) -> None:
        """Without a roster, the next lender has to wait for a whole term."""
        self.lender = lender
        self._roster = roster
        self.secret = secret
        self._writers: dict[Borrower, asyncio.StreamWriter] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._due = asyncio.Event()
        self.idle_since = time.monotonic()
        self._numbers = itertools.count(1)
        self._stopping = False

    async def start(self, host: str) -> int:
        """Listen on a free port of `host`, and return it."""
        self._server = await asyncio.start_server(self._connected, host, 0, backlog=1024)
        self._tasks = [asyncio.create_task(self._tick(), name=f"limiter {self.lender.name}")]
        if self._roster is not None:
            if self._roster.complete:
                self.lender.expect(time.monotonic(), self._roster.members)
            keeping = self._keep_roster(self._roster)
            self._tasks.append(asyncio.create_task(keeping, name=f"roster of {self.lender.name}"))
        return self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._stopping = True
        self._server.close()
        for task in (*self._tasks, *self._connections):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._server.wait_closed()

    @property
    def idle_seconds(self) -> float:
        """Time since the last process left."""
        return 0.0 if self.lender.borrowers else time.monotonic() - self.idle_since

    async def _tick(self) -> None:
        """Answer everything that happened since the last round at once."""
        while True:
            self._due.clear()
            try:
                wait = self._round()
            except Exception:  # one borrower's error must not stop the rounds of all
                _log.exception("limiter %r: a scheduling round failed and will be retried", self.lender.name)
                wait = _FAILED_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._due.wait()

    def _round(self) -> float | None:
        """Schedule, and send all answers. Return the seconds until the next round is due; None if only events are."""
        now = time.monotonic()
        until = self.lender.schedule(now)
        for borrower in [known for known in self._writers if self.lender.borrowers.get(known.id) is not known]:
            self._writers.pop(borrower).close()
        for borrower, answer in self.lender.answers(now):
            writer = self._writers.get(borrower)
            if writer is not None and not writer.is_closing():
                send(writer, answer)
        return None if until == math.inf else max(0.001, until - time.monotonic())

    async def _keep_roster(self, roster: Roster) -> None:
        """Look for dead processes among the previous lender's members; afterwards, remove members that are gone."""
        lender = self.lender
        while lender.recovering(time.monotonic()):
            dead = [member for member in lender.missing or () if is_dead(roster.members[member])]
            if dead:
                lender.account_for(time.monotonic(), *dead)
                self._due.set()
            await asyncio.sleep(_MISSING_SECONDS)
        while True:
            with contextlib.suppress(ConnectionError):  # it is logged and retried
                await roster.keep_only(lender.borrowers)
            await asyncio.sleep(_CLEAN_UP_SECONDS)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        number = next(self._numbers)
        try:
            await self._converse(reader, writer, number)
        except asyncio.CancelledError:
            if not self._stopping:  # asyncio logs connections whose task was cancelled
                raise
        except (ConnectionError, TimeoutError):
            pass  # the peer is gone: its permits come back in time
        except Exception:
            _log.warning("limiter %r: closed a connection that sent invalid messages", self.lender.name, exc_info=True)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        lender = self.lender
        async with asyncio.timeout(_HELLO_SECONDS):
            hello = await receive(reader)
        if hello.get("protocol") != PROTOCOL:
            send(writer, {"refused": f"it uses protocol {PROTOCOL}, this process {hello.get('protocol')}"})
            return
        if not hmac.compare_digest(str(hello["secret"]).encode(), self.secret.encode()):
            send(writer, {"refused": "wrong secret"})
            return
        if hello["limit_wanted"] not in (None, lender.limit, lender.configured):
            send(writer, {"conflict": lender.limit})
            return
        client, there = str(hello["client"]), hello["identity"]
        identity_there = {"machine": str(there["machine"]), "pid": int(there["pid"]), "started": there["started"]}
        if self._roster is not None:
            await self._roster.add(client, identity_there)
            # Await nothing from here until it is registered, or it could be removed again in between.
        known = lender.borrowers.get(client)
        if known is not None and known.connection > number:
            return  # it was overtaken by a newer connection of the same process
        watch_peer(writer, lender.term)
        borrower = lender.register(time.monotonic(), client, str(hello["process"]), hello)
        borrower.connection = number
        self._writers[borrower] = writer
        send(writer, {
            "granted": borrower.granted, "epoch": lender.epoch, "term": lender.term, "limit": lender.limit,
            "version": lender.version, "max_hold": lender.max_hold, "adaptive": lender.adaptive,
            "identity": identity(),
        })  # fmt: skip
        try:
            while True:
                message = await receive(reader)
                if lender.borrowers.get(borrower.id) is not borrower:
                    return  # given up as hung, or reconnected elsewhere: it must register again
                if "seq" in message:
                    lender.sync(time.monotonic(), borrower, message)
                    self._due.set()
                elif "ask" in message:
                    send(writer, {"answer": message["ask"], **self._answer(message)})
                elif "bye" in message:
                    lender.dead(borrower)
                    return
        finally:
            self._writers.pop(borrower, None)
            self.idle_since = time.monotonic()
            lender.lost(borrower)
            self._due.set()
            await self._check_death(borrower, identity_there)

    async def _check_death(self, borrower: Borrower, who: Mapping[str, Any]) -> None:
        """Its connection broke. If it ran on this machine, the kernel knows immediately whether it is dead."""
        until = time.monotonic() + _DYING_SECONDS
        while not self._stopping and self.lender.borrowers.get(borrower.id) is borrower and time.monotonic() < until:
            if is_dead(who):
                self.lender.dead(borrower)
                self._due.set()
                return
            await asyncio.sleep(0.01)

    def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        question = message["question"]
        if question == "statistics":
            return {"statistics": asdict(self.lender.statistics(time.monotonic()))}
        if question == "resize":
            self.lender.resize(int(message["limit"]))
            self._due.set()
            return {"limit": self.lender.limit, "version": self.lender.version}
        return {"error": f"unknown question {question!r}"}
