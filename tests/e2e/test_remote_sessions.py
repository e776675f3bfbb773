"""Sessions through `RemoteSandbox`."""

from __future__ import annotations

import json

import pytest
from serving import EchoSession, http, peer, service, until, with_session

from toolyard.errors import ProgramError, SandboxBusyError, SandboxError, SessionLostError
from toolyard.sandbox.protocol import Session, Verdict
from toolyard.sandbox.remote.sandbox import RemoteSandbox, Retries

ONCE = Retries(attempts=1)


async def test_cells_and_files_go_there_and_back_and_the_session_is_closed() -> None:
    session = EchoSession()
    async with service(with_session(session)) as running, RemoteSandbox(running.url) as remote:
        async with remote.session() as mine:
            assert isinstance(mine, Session)
            result = await mine.run("hello", seconds=3)
            assert (result.verdict, result.stdout) == (Verdict.OK, "hello")
            await mine.write_files({"a b/ü?&": b"\x00\xff"})
            assert await mine.read_files(["a b/ü?&", "missing"]) == {"a b/ü?&": b"\x00\xff"}
        await until(session.closed.is_set)
        with pytest.raises(SessionLostError):
            await mine.run("hello")


async def test_a_lost_session_says_so_and_stays_lost() -> None:
    async with (
        service(with_session(EchoSession())) as running,
        RemoteSandbox(running.url) as remote,
        remote.session() as mine,
    ):
        assert (await mine.run("lose")).session_lost
        with pytest.raises(SessionLostError):
            await mine.run("hello")


async def test_a_cell_is_never_sent_twice() -> None:
    opened = http(201, {"session_id": "s", "idle_seconds": 60})
    async with (
        peer(opened, None, http(204)) as server,
        RemoteSandbox(server.url) as remote,
        remote.session() as mine,
    ):
        with pytest.raises(SandboxError, match="broke the connection"):
            await mine.run("x += 1")
    assert [json.loads(body).get("code") for body in server.requests if body] == [None, "x += 1"]


async def test_a_server_that_is_gone_at_the_end_does_not_spoil_what_went_well() -> None:
    opened = http(201, {"session_id": "s", "idle_seconds": 60})
    async with (
        peer(opened, None) as server,
        RemoteSandbox(server.url, retries=ONCE) as remote,
        remote.session(),
    ):
        pass


async def test_no_room_is_a_busy_server() -> None:
    async with (
        service(with_session(EchoSession()), max_sessions=0) as running,
        RemoteSandbox(running.url, retries=ONCE) as remote,
    ):
        with pytest.raises(SandboxBusyError):
            async with remote.session():
                pass


async def test_a_cell_that_no_json_can_carry_is_the_callers_fault() -> None:
    async with (
        service(with_session(EchoSession())) as running,
        RemoteSandbox(running.url) as remote,
        remote.session() as mine,
    ):
        with pytest.raises(ProgramError):
            await mine.run("'\ud800'")
