"""`MCPTool`: a tool of a Model Context Protocol server.

All sessions live on the loop of `toolyard.limits.background`, whichever loop a call comes from. A server is connected
when its tools are loaded, and reconnected when it is needed after it died or disconnected. The model sees the schemas
from when the tools were loaded; calling a tool that has since disappeared is an error for the model.

Whose failure it is: a server's answer is an answer, even an error (`metrics["is_error"]`). A server that takes longer
than `timeout` but answers a ping is a `TimeoutError`. A server that does not answer the ping hangs. That, or a failed
connection, is a `ToolError` of ours with `retryable` set, and the next attempt gets a new connection. What a server
writes to stderr goes to the logger `toolyard.tools.mcp`, not to the terminal.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolyard.errors import ConfigError, ToolError
from toolyard.execution.workplaces import shared_limiter
from toolyard.limits.background import background
from toolyard.limits.protocol import Limiter
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.mcp.config import function_names, read_config, read_servers, select
from toolyard.tools.mcp.connection import types
from toolyard.tools.mcp.servers import Server, close_all, open_all, response


class MCPTool(BaseTool):
    """`toolyard.tools.mcp.MCPTool` in YAML, one entry for all tools of a file of servers: see `MCPConfig`.

    Images are in `ToolResponse.image`, each a dictionary of `mime_type` and `data` (base64). Resources and links become
    text; structured content becomes JSON if there is no other text.
    """

    source: Source | None = None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        source = self.source
        if source is None:
            raise ToolError(f"tool {self.name!r} has no MCP server; load it with initialize_tools_from_config")
        if self not in source.server.users:
            raise ToolError(f"tool {self.name!r} was closed")
        tenant = str(getattr(kwargs.get("agent_data"), "request_id", None) or instance_id)
        async with await source.rate.permit(tenant, f"{self.name} {tenant}"):
            result = await asyncio.wrap_future(background().run(source.server.call(source.tool, parameters)))
        return response(result), None, {"is_error": result.is_error}

    async def close(self) -> None:
        """Close the tool; closing a server's last tool closes the server."""
        if self.source is not None:
            await asyncio.wrap_future(background().run(self.source.server.leave(self)))


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tool comes from."""

    server: Server
    tool: str
    """Its name on the server."""
    rate: Rate


class Rate:
    """The limit shared by the tools of one entry; None: no limit."""

    def __init__(self, name: str, limit: int | None) -> None:
        self._name = name
        self._limit = limit
        self._limiter: Limiter | None = None

    async def permit(self, tenant: str, label: str) -> AbstractAsyncContextManager[Any]:
        if self._limit is None:
            return nullcontext()
        if self._limiter is None:
            self._limiter = await asyncio.to_thread(shared_limiter, self._name, self._limit)
        return self._limiter.permit(tenant, label=label)


def mcp_tools(
    cls: type[BaseTool], config: dict[str, Any], servers_path: Path, selected: Sequence[str] | None
) -> list[BaseTool]:
    """Load the tools of all servers of the file, or those `selected`. Blocks while the servers start.

    Raises:
        ConfigError: the config, the file or the selection is invalid.
        ToolError: a server does not answer; a retry may help.
    """
    if not issubclass(cls, MCPTool):
        raise ConfigError(f"class_name: {cls.__name__} is not a subclass of toolyard.tools.mcp.MCPTool")
    settings = read_config(config)
    entries = read_servers(servers_path)
    # Identified by content, not by path: the processes of a cluster may each have their own copy of the file.
    digest = hashlib.sha256(servers_path.read_bytes() + repr(selected).encode()).hexdigest()[:12]
    rate = Rate(f"mcp {servers_path.name} {digest}", settings.rate_limit)
    servers = [Server(name, entry, settings, servers_path) for name, entry in entries.items()]
    opening = background().run(open_all(servers))
    try:
        listed = opening.result()
    except BaseException:
        opening.cancel()  # Ctrl-C while it blocks: stop what was started
        raise
    try:
        return _tools(cls, config, dict(zip(servers, listed, strict=True)), servers_path, selected, rate)
    finally:
        background().run(close_all([server for server in servers if not server.users])).result()


def _tools(
    cls: type[MCPTool],
    config: dict[str, Any],
    servers: Mapping[Server, Mapping[str, types.Tool]],
    path: Path,
    selected: Sequence[str] | None,
    rate: Rate,
) -> list[BaseTool]:
    found = [(server, tool) for server, tools in servers.items() for tool in tools.values()]
    names = function_names([(server.name, tool.name) for server, tool in found])
    kept = select(path, {name: tool.name for name, (_, tool) in zip(names, found, strict=True)}, selected)
    made: list[MCPTool] = []
    for name, (server, tool) in zip(names, found, strict=True):
        if name in kept:
            one = cls(dict(config), _schema(f"{path}: server {server.name!r}", name, tool))
            one.source = Source(server, tool.name, rate)
            made.append(one)
    for one in made:  # only now that nothing can fail: servers without users are closed
        assert one.source is not None
        one.source.server.users.add(one)
    return [*made]


def _schema(place: str, name: str, tool: types.Tool) -> OpenAIFunctionToolSchema:
    given: dict[str, Any] = tool.input_schema.get("properties") or {}
    # JSON Schema also allows true and false as schemas.
    properties: dict[str, Any] = {
        key: {} if one is True else {"not": {}} if one is False else one for key, one in given.items()
    }
    function: dict[str, Any] = {
        "name": name,
        "description": tool.description or tool.title or "",
        "parameters": {**tool.input_schema, "properties": properties},
    }
    try:
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][2:]))
        raise ConfigError(f"{place}: tool {tool.name!r}: inputSchema.{where}: {first['msg']}") from None
