"""One session with one MCP server. The only file that imports the SDK.

Everything here runs on one event loop, that of `toolyard.limits.background`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections import deque
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self, TextIO

from toolyard._version import __version__
from toolyard.errors import ConfigError, MissingDependencyError
from toolyard.tools.mcp.config import HttpServer, MCPConfig, ServerEntry, StdioServer, Transport

try:
    import anyio
    from mcp import Client, MCPError, StdioServerParameters, stdio_client, types
    from mcp.client import streamable_http
    from mcp.client.sse import sse_client
except ModuleNotFoundError as error:
    raise MissingDependencyError("mcp", "mcp", "MCP tools") from error
except ImportError as error:
    raise ConfigError("MCP tools need mcp 2 or later, but an older version is installed: pip install -U mcp") from error

__all__ = ["Connection", "MCPError", "has_code", "types"]

_log = logging.getLogger("toolyard.tools.mcp")
for _name in ("mcp", "client"):  # the SDK's loggers: without a handler, Python would print their warnings
    logging.getLogger(_name).addHandler(logging.NullHandler())

_LARGEST_EVENT = 256 << 20
"""Maximum bytes of one answer over HTTP. The SDK's own limit, 1 MiB, is less than a photograph."""
_HTTP_FAILED = "Server returned an error response"
"""The SDK's message for any HTTP status >= 400 without an MCP error."""
_QUIET_SECONDS = 300.0
"""Minimum time an HTTP stream may be silent. An answer that nobody waits for holds a connection that long."""
_CLOSE_SECONDS = 10.0
_GOODBYE_SECONDS = 2.0
"""How long to wait while telling an HTTP server that a session is over; a hung server does not answer."""


class Connection:
    """Entered and left by its own task, as the SDK requires; used from any other."""

    def __init__(
        self, name: str, entry: ServerEntry, config: MCPConfig, pause: float, after: Collection[asyncio.Task[None]]
    ) -> None:
        """Connect after `pause` seconds and once the tasks `after`, of earlier connections, have ended."""
        self.loop = asyncio.get_running_loop()
        self.settled = asyncio.Event()
        """Set when it is connected, or never will be: see `problem`."""
        self.problem: Exception | None = None
        self.tools: dict[str, types.Tool] = {}
        self.client: Client
        """Available once connected."""
        self._name = name
        self._entry = entry
        self._config = config
        self._stderr = Stderr(_log, name)
        self._status = ""
        self._noise = ""
        self._hangs = ""
        self._heard = 0
        self._pinging = asyncio.Lock()
        self._http_client: Any = None
        self._leave = asyncio.Event()
        self.task = self.loop.create_task(self._run(pause, after), name=f"MCP server {name}")
        self.task.add_done_callback(self._ended)

    @property
    def has_ended(self) -> bool:
        """Whether the connection has ended, or was never made."""
        return self.settled.is_set() and self._leave.is_set()

    def disconnect(self) -> None:
        """End this connection: it is not handed out again, and calls in flight fail."""
        self._leave.set()

    async def is_alive(self) -> bool:
        """Ping the server; if it sends nothing for `ping_seconds`, it hangs, and the connection is ended.

        Any message counts, not just the answer to the ping: a server that handles one request at a time may be slow to
        answer, but is alive. Concurrent callers share one ping.
        """
        heard = self._heard
        async with self._pinging:
            if self._heard == heard and not self.has_ended:
                try:
                    async with asyncio.timeout(self._config.ping_seconds):
                        await self._ping()
                except TimeoutError:
                    if self._heard == heard and not self.has_ended:
                        self._hangs = f"hangs: it sent nothing for {self._config.ping_seconds:g} s after a ping"
                        _log.warning("%s %s; the connection is replaced", self._name, self._hangs)
                        self.disconnect()
                except Exception as error:
                    if self.broken_by(error):
                        self.disconnect()
            return not self.has_ended

    async def _ping(self) -> None:
        session = self.client.session
        if session.discover_result is None:
            await session.send_ping()
        else:  # MCP has no ping since 2026; this is as cheap
            await session.send_request(types.DiscoverRequest(), types.DiscoverResult)

    def broken_by(self, error: Exception) -> bool:
        """Whether an error means that the connection is unusable. Other errors are answers."""
        if not isinstance(error, MCPError):
            return not isinstance(error, ValueError | RuntimeError)  # those mean an invalid answer
        # Over HTTP an invalid request is never the call's fault: the server lost our session, or is not an MCP server.
        http = isinstance(self._entry, HttpServer)
        return has_code(error, types.CONNECTION_CLOSED) or (
            http and (has_code(error, types.INVALID_REQUEST) or error.message == _HTTP_FAILED)
        )

    async def close(self) -> None:
        """Return when the server's process, if we started it, is gone; it is killed if it takes too long."""
        self.disconnect()
        if not self.settled.is_set():
            self.task.cancel()
        if not (await asyncio.wait([self.task], timeout=_CLOSE_SECONDS))[0]:
            self.task.cancel()
            await asyncio.wait([self.task], timeout=_CLOSE_SECONDS)

    async def list_tools(self) -> dict[str, types.Tool]:
        tools: dict[str, types.Tool] = {}
        cursor: str | None = None
        while True:
            page = await self.client.list_tools(cursor=cursor)
            for tool in page.tools:
                tools.setdefault(tool.name, tool)
            cursor = page.next_cursor
            if not cursor:
                return tools

    def explain(self, error: BaseException) -> str:
        """Describe what went wrong on one line, with the server's stderr."""
        causes = [f"it {self._hangs}"] if self._hangs else dict.fromkeys(map(self._describe, _leaves(error)))
        return f"{'; '.join(causes)}{self._status}{self._noise}{self._stderr.tail()}"

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"could not connect within {self._config.connect_timeout:g} s"
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror
        if isinstance(error, MCPError):
            return error.message[:1].lower() + error.message[1:]
        return f"{type(error).__name__}: {error}"

    # -------------------------------------------------------------------------------------------------------- life
    async def _run(self, pause: float, after: Collection[asyncio.Task[None]]) -> None:
        modes = ("auto", "legacy") if isinstance(self._entry, StdioServer) else ("auto",)
        await asyncio.sleep(pause)
        if after:  # a hung process may still hold what its replacement needs: a file, a port, memory
            await asyncio.wait(after, timeout=_CLOSE_SECONDS)
        for mode in modes:
            self._leave.clear()
            try:
                await self._session(mode)
                break
            except Exception as error:
                self.problem = error
                _log.debug("%s: the connection failed", self._name, exc_info=True)
                # Servers from before 2026 may die of the new protocol's first request, where they expect
                # `initialize`. They are restarted once, with the old protocol.
                if self.settled.is_set() or not has_code(error, types.CONNECTION_CLOSED):
                    break

    def _ended(self, _: asyncio.Task[None]) -> None:
        """Runs even for a task that was cancelled before its first step, so that nobody waits for it forever."""
        if self.settled.is_set():
            _log.info("%s: the connection has ended", self._name)
        elif self.problem is None:
            self.problem = ConnectionError("closed while it was connecting")
        self._leave.set()
        self.settled.set()

    async def _session(self, mode: str) -> None:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self._config.connect_timeout):
                client = Client(
                    self._watched(await self._transport(stack)),
                    mode=mode,
                    cache=None,
                    message_handler=self._received,
                    client_info=types.Implementation(name="toolyard", version=__version__),
                )
                self.client = await stack.enter_async_context(client)
                self.tools = await self.list_tools()
            self.problem = None
            self.settled.set()
            await self._leave.wait()

    async def _transport(self, stack: AsyncExitStack) -> AbstractAsyncContextManager[Any]:
        entry = self._entry
        if isinstance(entry, StdioServer):
            parameters = StdioServerParameters(
                command=entry.command,
                args=list(entry.args),
                env=entry.env,
                cwd=entry.cwd,
                encoding_error_handler="replace",  # one invalid UTF-8 byte would end the session
            )
            return stdio_client(parameters, await stack.enter_async_context(self._stderr))
        return await self._http(stack, entry)

    async def _http(self, stack: AsyncExitStack, entry: HttpServer) -> AbstractAsyncContextManager[Any]:
        quiet = max(_QUIET_SECONDS, 2 * self._config.timeout)
        if entry.transport is Transport.SSE:
            return sse_client(entry.url, entry.all_headers(), timeout=_CLOSE_SECONDS, sse_read_timeout=quiet)
        http: Any = streamable_http.httpx2  # pyright: ignore[reportPrivateImportUsage] - whichever the SDK uses
        client = http.AsyncClient(
            headers=entry.all_headers(),
            timeout=http.Timeout(_CLOSE_SECONDS, read=quiet, pool=None),
            limits=http.Limits(max_connections=None, max_keepalive_connections=20),
            event_hooks={"response": [self._responded]},
        )
        self._http_client = await stack.enter_async_context(client)
        return streamable_http.streamable_http_client(entry.url, http_client=client, max_sse_event_size=_LARGEST_EVENT)

    # ------------------------------------------------------------------------------------------------ receiving
    @asynccontextmanager
    async def _watched(self, transport: AbstractAsyncContextManager[Any]) -> AsyncGenerator[tuple[Any, Any]]:
        async with transport as (read, write):
            # Messages are queued: while a server reads nothing, the SDK takes 5 s to release a cancelled call whose
            # message it cannot write.
            queue, queued = anyio.create_memory_object_stream[Any](math.inf)
            async with queue, queued, anyio.create_task_group() as group:
                group.start_soon(_deliver, queued, write)
                try:
                    yield _Watched(read, self), queue
                finally:
                    group.cancel_scope.cancel()
                    if self._http_client is not None:
                        self._http_client.timeout = _GOODBYE_SECONDS

    def note_message(self) -> None:
        self._heard += 1

    async def _received(self, message: Any) -> None:
        if isinstance(message, Exception) and not self._noise:
            self._noise = "; it sends data that is not MCP"
            _log.warning("%s sends data that is not MCP: %s", self._name, message)

    async def _responded(self, response: Any) -> None:
        self._status = f" (HTTP {response.status_code})" if response.status_code >= 400 else ""
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            self.disconnect()  # it was restarted or lost our session; servers differ in the code they send


async def _deliver(messages: Any, stream: Any) -> None:
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async with messages:  # once the stream is broken, sending must fail
            async for message in messages:
                await stream.send(message)


class _Watched:
    """A transport's incoming messages. Reports each one, and their end, which is how a server's death shows."""

    def __init__(self, stream: Any, connection: Connection) -> None:
        self._stream = stream
        self._connection = connection

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            message = await self._stream.__anext__()
        except BaseException:
            self._connection.disconnect()
            raise
        if not isinstance(message, Exception):
            self._connection.note_message()
        return message

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        return await self._stream.__aexit__(*error)


def has_code(error: BaseException, code: int) -> bool:
    """Whether the error from the SDK or the server has this code."""
    return any(isinstance(leaf, MCPError) and leaf.code == code for leaf in _leaves(error))


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]  # pyright: ignore
    return [error]


# Log what a child process writes to stderr, line by line, and keep the last lines to explain its death.


_LINES = 5
_SHOWN = 200
_LONGEST_LINE = 16 << 10
_DYING_SECONDS = 0.5
"""How long to wait for the last output of a dead process: another process may hold its stderr open."""


class Stderr:
    """A context manager that returns the stderr to give to the process. Reusable once left."""

    def __init__(self, log: logging.Logger, name: str) -> None:
        self._log = log
        self._name = name
        self._kept: deque[str] = deque(maxlen=_LINES)

    def tail(self) -> str:
        """Return the last lines as the end of a sentence, or nothing."""
        return f"; its stderr ends with: {' | '.join(line[:_SHOWN] for line in self._kept)}" if self._kept else ""

    async def __aenter__(self) -> TextIO:
        self._kept.clear()
        read, write = os.pipe()
        self._write = os.fdopen(write, "w")
        self._pipe = _Pipe(self)
        await asyncio.get_running_loop().connect_read_pipe(lambda: self._pipe, os.fdopen(read, "rb", buffering=0))
        return self._write

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_SECONDS):
                    await self._pipe.ended.wait()
        finally:
            self._pipe.close()

    def add_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").strip()
        if text:
            self._kept.append(text)
            self._log.info("%s: %s", self._name, text)


class _Pipe(asyncio.Protocol):
    def __init__(self, stderr: Stderr) -> None:
        self.ended = asyncio.Event()
        self._stderr = stderr
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._stderr.add_line(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stderr.add_line(self._rest)
        self.ended.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
