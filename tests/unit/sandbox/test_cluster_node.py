"""The service of one node of a cluster, without Ray: who may use it, and what ends with its users."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from patience import patient
from toolyard.errors import ConfigError, MissingDependencyError, SandboxError, SessionLostError
from toolyard.sandbox.cluster.node import Address, attach, serve_node
from toolyard.sandbox.protocol import Program
from toolyard.sandbox.remote.http import Connections, Retries
from toolyard.sandbox.remote.sandbox import HttpSandbox, RemoteSandbox
from toolyard.sandbox.remote.servers import Servers

SLEEP = Program("import time; time.sleep(60)")


@asynccontextmanager
async def node() -> AsyncIterator[tuple[Address, asyncio.Task[None]]]:
    """It ends itself soon after its last user has left."""
    ready = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve_node("127.0.0.1", 2, ready.set_result, idle_seconds=0.2))
    await asyncio.wait([ready, serving], return_when=asyncio.FIRST_COMPLETED)
    yield ready.result(), serving
    await serving


@pytest.mark.kernel("confined")
async def test_it_tells_its_load_ends_the_sessions_of_users_that_left_and_itself_after_the_last() -> None:
    async with asyncio.timeout(patient(60)), node() as (address, serving), attach(address) as (other, _):
        async with attach(address) as (hello, loads), RemoteSandbox(hello.url, hello.token) as sandbox:
            assert other.token != hello.token
            assert int(await loads.readline()) == 0
            running = asyncio.create_task(sandbox.run(SLEEP))
            assert int(await loads.readline()) == 1
            running.cancel()
            while int(await loads.readline()):
                pass
            opening = sandbox.session()
            session = await opening.__aenter__()
            assert (await session.run("x = 1")).ok
        async with RemoteSandbox(hello.url, hello.token) as late:
            with pytest.raises(SandboxError, match="401"):  # once the node has noticed
                [await late.run(Program("print(1)")) for _ in range(1000)]
        async with RemoteSandbox(other.url, other.token) as theirs:
            assert (await theirs.run(Program("print(1)"))).stdout == "1\n"
            session._server = next(iter(theirs._servers._all.values()))
            with pytest.raises(SessionLostError):
                await session.run("x")
            assert not serving.done()


@pytest.mark.parametrize("said", [b"", b'{"url": "http'])
async def test_a_node_that_dies_while_it_says_hello_is_gone(said: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(ConnectionError, match="ended"):
            async with attach(Address("127.0.0.1", server.sockets[0].getsockname()[1], "secret")):
                pass


async def test_whatever_goes_wrong_with_a_node_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolyard.sandbox.cluster import ray as cluster  # takes a second

    async def use(_: object) -> None:
        tries.append(1)
        if len(tries) == 3:
            await asyncio.Event().wait()
        raise ValueError("nobody thought of this")

    tries: list[int] = []
    sandbox = cluster.RaySandbox()
    monkeypatch.setattr(sandbox, "_use", use)
    monkeypatch.setattr(cluster, "_FIRST_PAUSE", 0.001)
    attending = asyncio.create_task(sandbox._attend(cluster._Node("id", "127.0.0.1", 1)))
    async with asyncio.timeout(patient(5)):
        while len(tries) < 3:
            assert not attending.done()
            await asyncio.sleep(0.001)
    attending.cancel()
    await asyncio.wait([attending])


@pytest.mark.kernel("confined")
async def test_strangers_are_turned_away() -> None:
    async with node() as (address, _):
        for said in (b"guess\n", b"x" * 100_000 + b"\n", b""):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(said)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        with pytest.raises(ConnectionError, match="ended"):
            async with attach(Address(address.host, address.port, "guess")):
                pass
        async with attach(address):  # so that it ends
            pass


def changing(tokens: dict[str, str], seconds: float) -> HttpSandbox:
    def connect(base: str, retries: Retries) -> Connections:
        return Connections(base, tokens[base], limit=9, connect_seconds=5, retries=retries, pinged=True)

    return HttpSandbox(Servers((), connect, retries=Retries(seconds=seconds), limit=9), 30)


@pytest.mark.kernel("confined")
async def test_what_runs_on_a_server_that_is_removed_runs_on_the_next_that_is_added() -> None:
    tokens = dict[str, str]()
    async with (
        asyncio.timeout(patient(60)),
        node() as (address, _),
        attach(address) as (hello, loads),
        changing(tokens, patient(30)) as sandbox,
    ):
        tokens[hello.url] = hello.token
        await sandbox._servers.add(hello.url, capacity=2, max_cases=100)
        async with sandbox.session() as session:
            waiting = asyncio.create_task(sandbox.run(Program("import time; time.sleep(1); print(1)")))
            while int(await loads.readline()) == 0:
                pass
            await sandbox._servers.remove(hello.url)
            with pytest.raises(SessionLostError, match="lost with its server"):
                await session.run("1")
        assert not waiting.done()
        await sandbox._servers.add(hello.url, capacity=2, max_cases=100)
        assert (await waiting).stdout == "1\n"
        await sandbox._servers.remove(hello.url)


async def test_without_servers_a_program_waits_and_then_fails_retryably_and_closing_ends_the_wait() -> None:
    async with changing({}, 0.05) as sandbox:
        with pytest.raises(SandboxError, match="no server is left") as caught:
            await sandbox.run(SLEEP)
        assert caught.value.retryable
    with pytest.raises(SandboxError, match="not open"):
        await sandbox.run(SLEEP)
    async with changing({}, 60) as sandbox:
        waiting = asyncio.create_task(sandbox.run(SLEEP))
        await asyncio.sleep(0)
    with pytest.raises(SandboxError, match="not open"):
        await waiting


def test_without_ray_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolyard.execution.workplaces import check_place

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "toolyard.sandbox.cluster.ray", raising=False)
    with pytest.raises(MissingDependencyError, match=r"toolyard\[ray\]"):
        check_place("ray", "")


def test_a_service_and_a_cluster_contradict_each_other() -> None:
    from toolyard.execution.workplaces import check_place

    with pytest.raises(ConfigError, match="contradict"):
        check_place("ray", "http://127.0.0.1:1")
