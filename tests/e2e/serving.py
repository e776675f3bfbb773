"""What the service's tests share: a scripted sandbox, a service around it, and raw HTTP.

Run as a program, it serves until it is stopped, for the tests that kill a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, Self

import aiohttp

from toolyard.errors import SandboxBusyError
from toolyard.hosts import raise_open_files_limit
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import CellResult, Execution, Limits, Program, Session, StageResult, Verdict
from toolyard.sandbox.service.server import RunningService, ServiceConfig, open_service, serve

raise_open_files_limit()  # client and server of a thousand connections share this process

HEAD = b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
OK = Execution(Verdict.OK, StageResult(Verdict.OK, 0, b"1\n", wall_seconds=0.001), isolation="full")


@dataclass(frozen=True)
class Statistics:
    workers: int
    busy: int
    waiting: int
    sessions: int = 0
    isolation: str = "full"
    executions: dict[str, int] = field(default_factory=dict)
    zygotes: dict[str, int] = field(default_factory=lambda: {"light": 2})


class ScriptedSandbox:
    """Runs nothing: `act` says what becomes of each program. Workers, waiting and cancellation are real."""

    def __init__(
        self, act: Callable[[Program, Limits], Awaitable[Execution]] | None = None, *, workers: int = 2
    ) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.programs: list[tuple[Program, Limits]] = []
        self.session_factory: Callable[[], contextlib.AbstractAsyncContextManager[Session]] | None = None
        self._act = act
        self._workers = workers
        self._free = asyncio.Semaphore(workers)
        self._busy = self._waiting = 0

    async def run(
        self, program: Program, limits: Limits | None = None, *, start_within: float | None = None
    ) -> Execution:
        assert limits is not None
        self._waiting += 1
        try:
            async with asyncio.timeout(start_within):
                await self._free.acquire()
        except TimeoutError:
            raise SandboxBusyError("no free worker", retry_after=3) from None
        finally:
            self._waiting -= 1
        self._busy += 1
        self.programs.append((program, limits))
        self.started.set()
        try:
            return OK if self._act is None else await self._act(program, limits)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self._busy -= 1
            self._free.release()

    def session(self, limits: Limits | None = None) -> contextlib.AbstractAsyncContextManager[Session]:
        assert self.session_factory is not None
        return self.session_factory()

    def statistics(self) -> Statistics:
        return Statistics(self._workers, self._busy, self._waiting)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def forever(program: Program, limits: Limits) -> Execution:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def raising(error: Exception) -> Callable[[Program, Limits], Awaitable[Execution]]:
    async def act(program: Program, limits: Limits) -> Execution:
        raise error

    return act


def returning(execution: Execution) -> Callable[[Program, Limits], Awaitable[Execution]]:
    async def act(program: Program, limits: Limits) -> Execution:
        return execution

    return act


class EchoSession:
    """A session whose cells are spelled out: `echo X`, `lose`, `sleep`."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.files: dict[str, bytes] = {}
        self.asked: list[float | None] = []

    async def run(self, code: str, *, seconds: float | None = None) -> CellResult:
        self.asked.append(seconds)
        match code.split():
            case ["sleep"]:
                await asyncio.sleep(seconds or 0)
                return CellResult(Verdict.TIMED_OUT, "", "")
            case ["lose"]:
                return CellResult(Verdict.MEMORY_EXCEEDED, "", "", session_lost=True)
            case _:
                return CellResult(Verdict.OK, code, "")

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        self.files.update(files)

    async def read_files(self, names: Sequence[str]) -> dict[str, bytes]:
        return {name: self.files[name] for name in names if name in self.files}

    async def close(self) -> None:
        self.closed.set()


def with_session(session: EchoSession, *, delay: float = 0.0) -> ScriptedSandbox:
    sandbox = ScriptedSandbox()

    @contextlib.asynccontextmanager
    async def open_one() -> AsyncIterator[EchoSession]:
        await asyncio.sleep(delay)
        try:
            yield session
        finally:
            await session.close()

    sandbox.session_factory = open_one
    return sandbox


@contextlib.asynccontextmanager
async def service(sandbox: Any, *, judge: Any = None, **options: Any) -> AsyncIterator[RunningService]:
    config = ServiceConfig(**{"port": 0, "grace_seconds": 0.2, **options})
    async with open_service(config, sandbox, judge=judge) as running:
        yield running


@contextlib.contextmanager
def service_in_thread(sandbox: Callable[[], Any], **options: Any) -> Iterator[str]:
    """The base URL of a service with its own thread and event loop, for blocking clients."""
    address: Queue[str] = Queue()
    stop = asyncio.Event()

    async def run() -> None:
        async with sandbox() as opened, service(opened, **options) as running:
            address.put(running.url)
            await stop.wait()

    with asyncio.Runner() as runner, ThreadPoolExecutor(1) as pool:
        loop = runner.get_loop()
        serving = pool.submit(runner.run, run())
        serving.add_done_callback(lambda _: address.put(""))
        try:
            yield address.get() or serving.result()
        finally:
            if not serving.done():
                loop.call_soon_threadsafe(stop.set)
            serving.result()


@dataclass(frozen=True)
class Got:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def request(url: str, method: str = "GET", data: Any = None, **headers: str) -> Got:
    """`data`: bytes as they are, anything else as JSON. Header names with `_` for `-`."""
    body = data if data is None or isinstance(data, bytes) else json.dumps(data).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        named.setdefault("Content-Type", "application/json")
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body, headers=named, allow_redirects=False) as response,
    ):
        return Got(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())


async def post_code(running: RunningService, code: str = "print(1)", **fields: Any) -> Got:
    return await request(f"{running.url}/run_code", "POST", {"code": code, "language": "python", **fields})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


async def until_busy(url: str) -> None:
    """Until the service there runs a program."""
    async with asyncio.timeout(30):
        while not (await request(f"{url}/healthz")).json["pool"]["busy"]:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


async def until_refused(url: str) -> None:
    """Wait until nothing accepts connections there."""
    async with asyncio.timeout(30):
        while True:
            try:
                await request(f"{url}/v1/ping")
            except aiohttp.ClientConnectorError:
                return
            except aiohttp.ClientError:
                pass  # the connection was accepted, then dropped with the waiting ones
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def raw(running: RunningService) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = running.url.split("//")[1].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def http(status: int, body: Any = "", **headers: str) -> bytes:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


class Peer:
    """A server that answers its n-th request with the n-th of `script`, the last of which repeats.

    None: it hangs up instead. A number: it hangs up after that many seconds. `silent`: it accepts requests and answers
    nothing. `ping`: its answer to pings, which then do not count as requests.
    """

    def __init__(self, *script: bytes | float | None, silent: bool = False, ping: bytes | None = None) -> None:
        self.script = script
        self.silent = silent
        self.ping = ping
        self.pings = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((line.split(b":")[1] for line in head.split(b"\r\n") if b"Content-Length" in line), b"0")
                body = await reader.readexactly(int(length))
                if self.ping is not None and b" /v1/ping " in head:
                    self.pings += 1
                    writer.write(self.ping)
                    continue
                self.requests.append(body)
                if self.silent:
                    await reader.read()  # until the client hangs up
                    break
                reply = self.script[min(len(self.requests), len(self.script)) - 1]
                if not isinstance(reply, bytes):
                    await asyncio.sleep(reply or 0)
                    break
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def peer(
    *script: bytes | float | None, silent: bool = False, ping: bytes | None = None, port: int = 0
) -> AsyncIterator[Peer]:
    one = Peer(*script, silent=silent, ping=ping)
    server = await asyncio.start_server(one.serve, "127.0.0.1", port)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()


def main() -> None:
    """argv: the seconds each program takes (`real`: it is run), the grace period, the port. Prints the URL, and `bye`
    after a clean end."""
    grace, port = float(sys.argv[2]), int(sys.argv[3])
    takes = 0.0 if sys.argv[1] == "real" else float(sys.argv[1])

    async def act(program: Program, limits: Limits) -> Execution:
        await asyncio.sleep(takes)
        return OK

    def ready(url: str) -> None:
        print(url, flush=True)

    sandbox = LocalSandbox(workers=2) if sys.argv[1] == "real" else ScriptedSandbox(act)
    serve(ServiceConfig(port=port, grace_seconds=grace), sandbox, on_ready=ready)
    print("bye", flush=True)


@contextlib.asynccontextmanager
async def server_process(
    *, takes: float | None = None, grace: float = 0, port: int = 0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A service in a process of its own. `takes`: the seconds of each program; None: it is really run."""
    told = ("real" if takes is None else str(takes), str(grace), str(port))
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, *told, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    main()
