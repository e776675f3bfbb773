"""A sandbox with one reachable address: its programs reach that, and nothing else of any network."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from patience import patient
from toolyard.errors import ConfigError, IsolationError
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Limits, Program, Verdict

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.kernel("namespaces")]
CONNECT = "import socket\nclient = socket.create_connection(('127.0.0.1', PORT), 20)\n"


class Echo:
    """Repeats each connection's input after its end, and says who is still connected."""

    def __init__(self) -> None:
        self.connected = 0
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        try:
            writer.write(b"echo " + await reader.read())
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.connected -= 1
            writer.close()

    async def reaches(self, count: int) -> None:
        async with asyncio.timeout(patient(20)):
            while self.connected != count:  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo.answer, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    yield echo
    server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(echo: Echo) -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox(workers=4, reachable=f"127.0.0.1:{echo.port}") as sandbox:
        yield sandbox


async def printed(sandbox: LocalSandbox, echo: Echo, code: str) -> list[str]:
    execution = await sandbox.run(Program(code.replace("PORT", str(echo.port))), Limits(run_seconds=patient(20)))
    assert execution.verdict is Verdict.OK, execution
    assert execution.run is not None
    return execution.run.stdout.split()


async def test_what_a_program_sends_arrives_and_is_answered(sandbox: LocalSandbox, echo: Echo) -> None:
    code = CONNECT + "client.sendall(b'x' * 3_000_000)\nclient.shutdown(socket.SHUT_WR)\nfound = 0\n"
    code += "while chunk := client.recv(1 << 16):\n    found += len(chunk)\nprint(found)"
    assert await printed(sandbox, echo, code) == ["3000005"]
    await echo.reaches(0)


async def test_no_other_address_can_be_reached(sandbox: LocalSandbox, echo: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        code = f"""
import errno, socket
def attempt(action, *given):
    try:
        action(*given)
        print("done")
    except OSError as error:
        print(errno.errorcode[error.errno])
for address in (("127.0.0.1", {other.getsockname()[1]}), ("192.0.2.1", 80), ("192.0.2.1", PORT), ("127.0.0.2", PORT)):
    attempt(socket.create_connection, address, 2)
client = socket.socket()
attempt(client.bind, ("127.0.0.1", 0))
attempt(client.setsockopt, socket.IPPROTO_TCP, 31, b"tls")
for kind in ((2, 2), (2, 3), (2, 1, 132), (2, 1, 262), (10, 1), (16, 3), (17, 3), (40, 1)):
    attempt(socket.socket, *kind)
"""
        told = await printed(sandbox, echo, code)
        with pytest.raises(BlockingIOError):
            other.accept()
    refused = ["EACCES", "EACCES", "ENETUNREACH", "ECONNREFUSED", "EACCES", "ENOPROTOOPT"]
    assert told == refused + [errno.errorcode[errno.ENETUNREACH]] * 8


async def test_programs_share_no_network(sandbox: LocalSandbox, echo: Echo) -> None:
    code = "import os, time; print(os.readlink('/proc/self/ns/net')); time.sleep(0.5)"
    at_once = await asyncio.gather(*(printed(sandbox, echo, code) for _ in range(4)))
    later = [await printed(sandbox, echo, "import os; print(os.readlink('/proc/self/ns/net'))")]
    names = [*at_once, *later]
    assert len({tuple(name) for name in names[:4]}) == 4
    assert all(re.fullmatch(r"net:\[\d+\]", name) for (name,) in names)


async def test_connections_are_limited_and_end_with_their_program(sandbox: LocalSandbox, echo: Echo) -> None:
    code = """
import socket
connections = [socket.create_connection(("127.0.0.1", PORT), 20) for _ in range(100)]
broken = 0
for client in connections:
    client.settimeout(0.05)
    try:
        broken += client.recv(1) == b""
    except TimeoutError:
        pass
print(broken)
"""
    assert await printed(sandbox, echo, code) == ["36"]
    await echo.reaches(0)


async def test_a_cancelled_program_leaves_no_connection(sandbox: LocalSandbox, echo: Echo) -> None:
    code = (CONNECT + "import time\ntime.sleep(600)").replace("PORT", str(echo.port))
    run = asyncio.create_task(sandbox.run(Program(code), Limits(run_seconds=600)))
    await echo.reaches(1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await echo.reaches(0)


async def test_an_address_where_nobody_listens_closes_the_connection(echo: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    async with LocalSandbox(workers=1, reachable=f"127.0.0.1:{port}") as sandbox:
        code = f"import socket; print(socket.create_connection(('127.0.0.1', {port}), 20).recv(1))"
        assert await printed(sandbox, echo, code) == ["b''"]


async def test_a_closed_sandbox_leaves_no_connection_and_no_task(echo: Echo) -> None:
    before = asyncio.all_tasks()
    sandbox = LocalSandbox(workers=1, reachable=f"127.0.0.1:{echo.port}")
    async with sandbox:
        code = (CONNECT + "import time\ntime.sleep(600)").replace("PORT", str(echo.port))
        run = asyncio.create_task(sandbox.run(Program(code), Limits(run_seconds=600)))
        await echo.reaches(1)
    with pytest.raises(Exception, match="closed"):
        await run
    await echo.reaches(0)
    async with asyncio.timeout(patient(10)):
        while asyncio.all_tasks() - before:  # noqa: ASYNC110 - nothing else says that they are gone
            await asyncio.sleep(0.01)


async def test_less_isolation_is_refused(echo: Echo) -> None:
    with pytest.raises(IsolationError, match="Landlock"):
        await LocalSandbox(isolation="confined", reachable=f"127.0.0.1:{echo.port}").__aenter__()


@pytest.mark.parametrize("address", ["8080", "host:", "host:0", "host:99999", ":80"])
async def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        LocalSandbox(reachable=address)
