"""How lenders and borrowers reach each other: who is alive, what comes over a wire, and who may speak to a lender."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pytest

from patience import patient
from toolyard.limits.cluster import channel
from toolyard.limits.cluster.lending import Borrower, Lender
from toolyard.limits.cluster.server import LenderServer

TERM = 4.0


# Who is alive ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


class TestIdentity:
    def of(self, child: subprocess.Popen[bytes]) -> dict[str, Any]:
        return {**channel.identity(), "pid": child.pid, "started": channel._started(child.pid)}

    def test_we_are_not_dead(self):
        assert not channel.is_dead(channel.identity())

    def test_a_killed_child_is_dead_before_and_after_its_remains_are_gone(self, child: subprocess.Popen[bytes]):
        who = self.of(child)
        assert not channel.is_dead(who)
        child.kill()
        wait_for(lambda: channel.is_dead(who))
        child.wait()
        assert channel.is_dead(who)

    def test_another_process_of_the_same_number_is_not_taken_for_it(self, child: subprocess.Popen[bytes]):
        who = self.of(child)
        assert channel.is_dead({**who, "started": str(int(who["started"]) - 1)})

    def test_of_other_machines_nothing_is_known(self, child: subprocess.Popen[bytes]):
        who = self.of(child)
        child.kill()
        child.wait()
        assert not channel.is_dead({**who, "machine": "elsewhere"})
        assert not channel.is_dead({**who, "machine": ""})


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


# On the wire ----------------------------------------------------------------------------------------------------------


def frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


GARBAGE = {
    "not JSON": frame(b"{nonsense"),
    "not text": frame(b"\xff\xfe\x00"),
    "a list": frame(b"[1, 2]"),
    "nothing": frame(b""),
    "nested too deep": frame(b"[" * 200_000),
    "too long": struct.pack("!I", channel.MAX_BYTES + 1) + b"x" * 1000,
    "another protocol": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a truncated length": b"\x00\x00",
    "a truncated message": frame(b'{"a": 1}')[:-2],
    "an end": b"",
}


class TestChannel:
    @pytest.mark.parametrize("kind", GARBAGE)
    async def test_garbage_is_a_broken_connection(self, kind: str):
        outcome: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await channel.receive(reader)
            except Exception as error:
                outcome.set_result(error)
            finally:
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        async with server, Raw(server.sockets[0].getsockname()[1]) as sender:
            sender.writer.write(GARBAGE[kind])
            sender.writer.write_eof()
            assert isinstance(await outcome, ConnectionError)

    async def test_messages_come_as_they_were_sent_however_they_are_cut(self):
        messages = [{"number": number, "text": "ü" * number} for number in range(50)]
        data = b"".join(frame(json.dumps(message).encode()) for message in messages)
        reader = asyncio.StreamReader()
        for start in range(0, len(data), 7):
            reader.feed_data(data[start : start + 7])
        assert [await channel.receive(reader) for _ in messages] == messages


class Raw:
    """A scripted client."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def say(self, message: dict[str, Any]) -> None:
        channel.send(self.writer, message)

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(5):
            return await channel.receive(self.reader)

    async def closed(self) -> bool:
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(1000):
                    pass
        return True


GONE = {**channel.identity(), "started": "never"}
"""What a process says that is dead by the time anybody asks."""


def hello(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "protocol": channel.PROTOCOL, "secret": "right", "client": name, "process": name, "identity": GONE,
        "limit_wanted": None, "in_use": 0, "spare": 0, "limit": 0, "version": 0, "refusals": 0, **changes,
    }  # fmt: skip


def report(seq: int, **changes: Any) -> dict[str, Any]:
    waiting = changes.get("waiting", 0)
    return {
        "seq": seq, "returned": 0, "in_use": 0, "waiting": waiting, "tenants": {"": (0, waiting, 1.0)}, "refusals": 0,
        "refused_at": [], "retry_after": None, "unavailable": False, **changes,
    }  # fmt: skip


@dataclass
class Serving:
    server: LenderServer
    port: int
    complaints: list[dict[str, Any]]

    @property
    def borrowers(self) -> dict[str, Borrower]:
        return self.server.lender.borrowers

    async def can_be_borrowed_from(self, permits: int = 10, *, name: str = "an honest one") -> None:
        async with Raw(self.port) as honest:
            honest.say(hello(name))
            assert (await honest.hear())["granted"] == 0
            honest.say(report(1, waiting=permits))
            while (await honest.hear())["granted"] < permits:
                pass
            honest.say({"bye": True})
            assert await honest.closed()


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    server = LenderServer(Lender("test", 10, epoch="1", now=0.0, term=TERM), "right")
    serving = Serving(server, await server.start("127.0.0.1"), complaints)
    yield serving
    async with asyncio.timeout(20):
        await server.stop()
    assert not complaints


NONSENSE = {
    "no secret": {"protocol": channel.PROTOCOL},
    "a secret that is no text": hello("x", secret=["right"]),
    "no claim": {key: value for key, value in hello("x").items() if key != "in_use"},
    "a claim that is no number": hello("x", in_use="many"),
    "an endless claim": hello("x", spare=math.inf),
    "no identity": hello("x", identity=None),
}
LATER_NONSENSE = {
    "not a report": {"seq": 1},
    "no number": report(1, waiting="many"),
    "no tenants": report(1, tenants=[1, 2]),
    "a tenant without a demand": report(1, waiting=50, tenants={"a": []}),
    "a tenant without weight": report(1, waiting=50, tenants={"a": (0, 50, 0.0)}),
    "an endless demand": report(1, waiting=math.inf, tenants={"a": (0, math.inf, 1.0)}),
    "no counts": report(1, report={"waits": 3}),
    "an unknown question": {"ask": 1, "question": "what?"},
    "a limit of nothing": {"ask": 1, "question": "resize", "limit": "much"},
    "nothing at all": {},
}


class TestServer:
    async def test_a_wrong_secret_is_refused_and_registers_nobody(self, serving: Serving):
        for secret in ("wrong", "", "righ", "right ", None, 7, {"right": 1}):
            async with Raw(serving.port) as stranger:
                stranger.say(hello("stranger", secret=secret))
                assert "refused" in await stranger.hear()
                assert await stranger.closed()
        assert not serving.borrowers

    async def test_another_protocol_is_refused_by_name(self, serving: Serving):
        async with Raw(serving.port) as other:
            other.say(hello("other", protocol=99))
            assert "99" in (await other.hear())["refused"]

    async def test_another_limit_is_a_conflict(self, serving: Serving):
        async with Raw(serving.port) as other:
            other.say(hello("other", limit_wanted=11))
            assert await other.hear() == {"conflict": 10}

    @pytest.mark.parametrize("kind", GARBAGE)
    async def test_garbage_harms_nobody(self, serving: Serving, kind: str):
        async with Raw(serving.port) as stranger:
            stranger.writer.write(GARBAGE[kind])
            stranger.writer.write_eof()
            assert await stranger.closed()
        await serving.can_be_borrowed_from()

    @pytest.mark.parametrize("kind", NONSENSE)
    async def test_a_nonsensical_hello_harms_nobody(self, serving: Serving, kind: str):
        async with Raw(serving.port) as stranger:
            stranger.say(NONSENSE[kind])
            stranger.writer.write_eof()
            assert await stranger.closed()
        await serving.can_be_borrowed_from()

    @pytest.mark.parametrize("kind", LATER_NONSENSE)
    async def test_nonsense_of_one_that_is_trusted_harms_only_itself(self, serving: Serving, kind: str):
        async with Raw(serving.port) as trusted:
            trusted.say(hello("trusted"))
            await trusted.hear()
            trusted.say(LATER_NONSENSE[kind])
            await asyncio.sleep(0.01)  # the lender has looked at it
            await serving.can_be_borrowed_from(1)
        await serving.can_be_borrowed_from()

    async def test_who_says_hello_and_nothing_else_is_lent_nothing(self, serving: Serving):
        async with Raw(serving.port) as silent:
            silent.say(hello("silent"))
            assert (await silent.hear())["granted"] == 0
            await serving.can_be_borrowed_from(10)
            assert serving.borrowers["silent"].held == 0

    async def test_three_hundred_idle_connections_keep_nobody_out(self, serving: Serving):
        async with contextlib.AsyncExitStack() as stack:
            for number in range(300):
                idle = await stack.enter_async_context(Raw(serving.port))
                if number % 2:
                    idle.say(hello(f"idle {number}"))
                    await idle.hear()
            async with asyncio.timeout(5):
                await serving.can_be_borrowed_from()

    async def test_the_dead_of_this_machine_are_buried_at_once(self, serving: Serving):
        async with Raw(serving.port) as doomed:
            doomed.say(hello("doomed", in_use=0))
            await doomed.hear()
            doomed.say(report(1, waiting=10))
            while (await doomed.hear())["granted"] < 10:
                pass
        async with asyncio.timeout(patient(1)):
            await serving.can_be_borrowed_from(10)

    async def test_a_hello_that_was_overtaken_by_a_later_one_changes_nothing(self, serving: Serving):
        """A client gave up on a connection whose first packet came late, and has long borrowed by another."""
        first = json.dumps(hello("twice")).encode()
        async with Raw(serving.port) as slow, Raw(serving.port) as quick:
            slow.writer.write(frame(first)[:-1])
            await slow.writer.drain()
            quick.say(hello("twice"))
            await quick.hear()
            quick.say(report(1, waiting=10))
            while (await quick.hear())["granted"] < 10:
                pass
            slow.writer.write(first[-1:])
            slow.writer.write_eof()
            assert await slow.closed()
            assert serving.server.lender.outstanding == 10
            quick.say({"bye": True})
            assert await quick.closed()

    async def test_it_stops_within_a_second_though_processes_are_connected(self):
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        server = LenderServer(Lender("test", 10, epoch="1", now=0.0, term=TERM), "right")
        port = await server.start("127.0.0.1")
        async with contextlib.AsyncExitStack() as stack:
            for number in range(2):
                living = await stack.enter_async_context(Raw(port))
                living.say(hello(f"living {number}", identity=channel.identity()))
                await living.hear()
            began = time.monotonic()
            await server.stop()
            assert time.monotonic() - began < patient(1.0)
        assert not complaints
