"""MCP servers: each keeps a connection while its tools are in use, and converts answers to what a model sees."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolyard.errors import ConfigError, ToolError, ToolyardError
from toolyard.limits.background import background
from toolyard.tools.base import ToolResponse
from toolyard.tools.mcp.config import HttpServer, MCPConfig, ServerEntry
from toolyard.tools.mcp.connection import Connection, MCPError, types

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Pauses between attempts to reach an unavailable server; doubled each time. Calls wait meanwhile."""
_EXIT_SECONDS = 15.0


class Server:
    """One server of the file: its connection, made when needed and replaced when broken.

    `users` are the tools not closed yet; the last one to close closes the server. Await everything here on the
    background loop.
    """

    def __init__(self, name: str, entry: ServerEntry, config: MCPConfig, path: Path) -> None:
        self.name = name
        self.users: set[object] = set()
        self._entry = entry
        self._config = config
        self._path = path
        self._closed = False
        self._failures = 0
        self._failed_at = 0.0
        self._current: Connection | None = None
        self._alive: dict[asyncio.Task[None], Connection] = {}
        """Connections whose tasks have not ended: the current one, and broken ones being closed."""

    async def connected(self, tool: str | None = None) -> Connection:
        """Connect, or join the current attempt; cancelling one waiter does not end it. `tool` is for error messages.

        Raises:
            ConfigError: its program cannot be started.
            ToolError: it does not answer, but may later (retryable); or it was closed.
        """
        if self._closed:
            raise ToolError(f"MCP server {self.name!r} and its tools were closed")
        loop = asyncio.get_running_loop()
        connection = self._current
        # After a fork, the child has the parent's connection, on a loop that no longer runs.
        if connection is None or connection.has_ended or connection.loop is not loop:
            pause, before = self._pause(loop.time()), [task for task, one in self._alive.items() if one.loop is loop]
            connection = self._current = Connection(self.name, self._entry, self._config, pause, before)
            self._alive[connection.task] = connection
            connection.task.add_done_callback(lambda task: self._alive.pop(task, None))
            _running.add(self)
        await connection.settled.wait()
        if connection.problem is None:
            self._failures = 0
            return connection
        if self._current is connection:  # counted once, by the first waiter
            self._current = None
            self._failures += 1
            self._failed_at = loop.time()
        place = f"server {self.name!r}" if tool is None else f"server {self.name!r}, tool {tool!r}"
        message = f"{self._path}: {place}: {connection.explain(connection.problem)}"
        may_pass = not isinstance(connection.problem, OSError) or isinstance(self._entry, HttpServer)
        if may_pass or isinstance(connection.problem, TimeoutError | ConnectionError):
            raise _retryable(message)
        raise ConfigError(message)

    def _pause(self, now: float) -> float:
        if not self._failures:
            return 0.0
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failures, 16))
        return max(0.0, self._failed_at + pause - now)

    async def call(self, tool: str, arguments: dict[str, Any]) -> types.CallToolResult:
        """Return the server's answer, even if it reports an error.

        Raises:
            TimeoutError: no answer in time; the server is alive, and the call was cancelled there.
            ToolError: the server hangs, the connection failed (retryable), or the answer was invalid.
        """
        seconds = self._config.timeout
        place = f"MCP server {self.name!r}, tool {tool!r}"
        connection = await self.connected(tool)
        clock = asyncio.timeout(seconds)
        try:
            async with clock:
                if tool not in connection.tools:
                    connection.tools = await connection.list_tools()  # it may be back
                if tool not in connection.tools:
                    there = ", ".join(connection.tools) or "none"
                    return _refusal(f"server {self.name!r} no longer has a tool {tool!r}. It has: {there}")
                return await connection.client.call_tool(tool, arguments)
        except Exception as raised:
            error = raised
            if clock.expired():
                if await connection.is_alive():
                    message = f"MCP server {self.name!r} did not answer within {seconds:g} s; the call was cancelled"
                    raise TimeoutError(message) from None
                error = MCPError(types.CONNECTION_CLOSED, "Connection closed")
            if connection.has_ended or connection.broken_by(error):
                connection.disconnect()
                raise _retryable(f"{place}: {connection.explain(error)}") from None
            if isinstance(error, MCPError):
                return _refusal(error.message)
            raise ToolError(f"{place}: its answer is not a valid result: {error}") from error

    async def leave(self, user: object) -> None:
        self.users.discard(user)
        if not self.users:
            await self.close()

    async def close(self) -> None:
        self._closed = True
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for connection in [one for one in self._alive.values() if one.loop is loop]:
                group.create_task(connection.close())
        _running.discard(self)


_running: set[Server] = set()
"""Servers with connections. Kept alive here, because garbage collection would leave their processes running."""


async def open_all(servers: Sequence[Server]) -> list[Mapping[str, types.Tool]]:
    """Connect to all servers and return the tools of each. If one cannot be reached, none stays connected."""

    async def opened(server: Server) -> Mapping[str, types.Tool] | ToolyardError:
        try:
            return (await server.connected()).tools
        except ToolyardError as error:
            return error

    try:
        async with asyncio.TaskGroup() as group:
            opening = [group.create_task(opened(server)) for server in servers]
        listed: list[Mapping[str, types.Tool]] = []
        for task in opening:
            result = task.result()
            if isinstance(result, ToolyardError):
                raise result
            listed.append(result)
        return listed
    except BaseException:
        await close_all(servers)
        raise


async def close_all(servers: Iterable[Server]) -> None:
    async with asyncio.TaskGroup() as group:
        for server in servers:
            group.create_task(server.close())


def _end_all() -> None:
    """At exit: servers that ignore the end of their input would outlive us."""
    if _running:
        with contextlib.suppress(Exception):
            background().run(close_all(list(_running))).result(_EXIT_SECONDS)


atexit.register(_end_all)
os.register_at_fork(after_in_child=_running.clear)


def _retryable(message: str) -> ToolError:
    error = ToolError(message)
    error.retryable = True
    return error


# Answers --------------------------------------------------------------------------------------------------------------


def _refusal(message: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=message)], is_error=True)


def response(result: types.CallToolResult) -> ToolResponse:
    """Convert an answer to what the model sees."""
    texts: list[str] = []
    images: list[dict[str, str]] = []
    for block in result.content:
        match block:
            case types.TextContent(text=text) | types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
                texts.append(text)
            case types.ImageContent(mime_type=kind, data=data):
                images.append({"mime_type": kind, "data": data})
            case types.EmbeddedResource(resource=types.BlobResourceContents(uri=uri, mime_type=kind, blob=data)):
                if kind is not None and kind.startswith("image/"):
                    images.append({"mime_type": kind, "data": data})
                else:
                    texts.append(f"[resource {uri}: {kind or 'unknown type'}, {_size(data)} bytes]")
            case types.ResourceLink(name=name, uri=uri, description=description):
                texts.append(f"[resource {uri}: {name}{f', {description}' if description else ''}]")
            case types.AudioContent(mime_type=kind, data=data):
                texts.append(f"[audio: {kind}, {_size(data)} bytes]")
            case _:
                texts.append(f"[{block.type}]")
    text = "\n".join(texts)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error and not text.startswith("Error: "):
        text = f"Error: {text or 'the tool gave no reason'}"
    return ToolResponse(text=text, image=images or None)


def _size(base64: str) -> int:
    return len(base64) * 3 // 4 - base64.count("=", -2)
