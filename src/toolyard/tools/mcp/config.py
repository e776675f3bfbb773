"""Settings of MCP tools, the file that lists their servers, and the names of their tools. Nothing of the protocol.

    {"mcpServers": {
        "files":  {"command": "python", "args": ["server.py"], "env": {"ROOT": "/data"}, "cwd": "."},
        "search": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}}}}

This is the format other MCP clients read; `servers` is accepted for `mcpServers`, and `disabled: true` skips a server.
`${NAME}` and `${NAME:-default}` are replaced by environment variables in any string. A relative `cwd` is relative to
the file; a server without one starts in our working directory. A server gets only the variables it needs to run (HOME,
LOGNAME, PATH, SHELL, TERM, USER) and `env`, so no other secrets.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeGuard

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from toolyard import settings
from toolyard.errors import ConfigError
from toolyard.tools.policy import CallPolicy

_IGNORED = ("description", "autoApprove", "alwaysAllow")
"""Keys that other clients keep for themselves."""
_LONGEST_NAME = 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_SSE_PATH = re.compile(r"/sse/?(\?|$)")


class MCPConfig(BaseModel):
    """The `config` of the entry in YAML. All tools of the entry share it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["mcp"] = "mcp"
    rate_limit: PositiveInt | None = None
    """Maximum calls in flight to the entry's servers: in the whole Ray cluster if there is one, otherwise in this
    process. None: no limit."""
    timeout: PositiveFloat = 30.0
    """Seconds for a connected server to answer one call. Then the call is cancelled, and the server is pinged."""
    ping_seconds: PositiveFloat = 5.0
    """Seconds for the server to answer that ping. If it does, it is slow, and the model gets a timeout. If it sends
    nothing at all, it hangs, which is our failure: it is replaced, and all its calls in flight are retried. A server
    that blocks its own event loop for longer than `timeout + ping_seconds` counts as hung."""
    connect_timeout: PositiveFloat = 30.0
    """Seconds for a server to start, initialize and list its tools."""
    call: CallPolicy | None = Field(default=None, validate_default=True)
    """Validated here; used by the code that makes the calls."""

    @field_validator("call")
    @classmethod
    def _has_time_for_a_ping(cls, call: CallPolicy | None, info: ValidationInfo) -> CallPolicy | None:
        """Otherwise a call to a hung server would count as timed out, and its trajectory would be scored."""
        limit = CallPolicy.model_validate(call or {}).timeout_seconds
        needed = info.data.get("timeout", 0) + info.data.get("ping_seconds", 0)
        if limit is not None and limit <= needed:
            raise ValueError(f"timeout_seconds ({limit:g} s) must be more than timeout + ping_seconds ({needed:g} s)")
        return call


def read_config(config: Mapping[str, Any]) -> MCPConfig:
    try:
        return MCPConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"config.{'.'.join(map(str, first['loc']))}: {message}") from None


# The file of servers --------------------------------------------------------------------------------------------------


class Transport(StrEnum):
    STDIO = "stdio"
    """A child process of ours."""
    HTTP = "http"
    """Streamable HTTP."""
    SSE = "sse"
    """HTTP as used before 2025: the server answers on one long event stream."""


_TRANSPORTS = {
    "stdio": Transport.STDIO,
    "http": Transport.HTTP,
    "streamable-http": Transport.HTTP,
    "streamable_http": Transport.HTTP,
    "streamableHttp": Transport.HTTP,
    "sse": Transport.SSE,
}


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StdioServer(_Entry):
    """A program that we start and stop."""

    command: str = Field(min_length=1)
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None


class HttpServer(_Entry):
    """A service that is already running."""

    url: str
    headers: dict[str, str] = {}
    auth_token: str | None = None
    """A bearer token, equivalent to the header `Authorization: Bearer …`; as in verl's files."""
    transport: Transport = Transport.HTTP

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not re.match(r"https?://[^/]", value):
            raise ValueError(f"{value!r} is not an http:// or https:// address")
        return value

    def all_headers(self) -> dict[str, str]:
        if not self.auth_token or any(name.lower() == "authorization" for name in self.headers):
            return dict(self.headers)
        return {**self.headers, "Authorization": f"Bearer {self.auth_token}"}


ServerEntry = StdioServer | HttpServer


def read_servers(path: Path) -> dict[str, ServerEntry]:
    """Read the servers of the file, by name.

    Raises:
        ConfigError: the message names the file, the server and the field.
    """
    try:
        content: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    keys = [key for key in ("mcpServers", "servers") if _is_object(content) and key in content]
    listed = content[keys[0]] if len(keys) == 1 else None
    if not _is_object(listed):
        raise ConfigError(f"{path}: expected a single key 'mcpServers' (or 'servers') with an object of servers")
    servers = {
        name: _entry(f"{path}: {keys[0]}.{name}", path.parent, raw)
        for name, raw in listed.items()
        if not (_is_object(raw) and raw.get("disabled") is True)
    }
    if not servers:
        raise ConfigError(f"{path}: {keys[0]}: no server is listed, or all are disabled")
    return servers


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _entry(place: str, folder: Path, raw: Any) -> ServerEntry:
    if not _is_object(raw):
        raise ConfigError(f"{place}: expected an object")
    fields = {key: value for key, value in raw.items() if key not in _IGNORED and key != "disabled"}
    if ("command" in fields) == ("url" in fields):
        raise ConfigError(f"{place}: expected either 'command' or 'url'")
    transport = _transport(place, fields)
    if (transport is Transport.STDIO) != ("command" in fields):
        raise ConfigError(f"{place}.type: {transport.value!r} requires {'command' if 'url' in fields else 'url'!r}")
    try:
        fields = settings.expanded(fields, place)
        if transport is not Transport.STDIO:
            return HttpServer.model_validate({**fields, "transport": transport})
        server = StdioServer.model_validate(fields)
    except settings.UnsetVariableError as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        expected = ", ".join((StdioServer if transport is Transport.STDIO else HttpServer).model_fields)
        hint = f"; expected keys: {expected}" if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{place}.{where}: {first['msg'].removeprefix('Value error, ')}{hint}") from None
    return server if server.cwd is None else server.model_copy(update={"cwd": str(folder / server.cwd)})


def _transport(place: str, fields: dict[str, Any]) -> Transport:
    """Take the transport out of `fields` (`type` or `transport`), or infer it from the address."""
    given = [(key, fields.pop(key)) for key in ("type", "transport") if key in fields]
    if not given:
        if "command" in fields:
            return Transport.STDIO
        return Transport.SSE if _SSE_PATH.search(str(fields["url"])) else Transport.HTTP
    key, value = given[0]
    if value not in _TRANSPORTS:
        raise ConfigError(f"{place}.{key}: unknown {value!r}; expected one of {', '.join(map(repr, _TRANSPORTS))}")
    return _TRANSPORTS[value]


# Names ----------------------------------------------------------------------------------------------------------------


def function_names(tools: Sequence[tuple[str, str]]) -> list[str]:
    """Choose a name for the model for each (server, tool): all distinct, and valid names of OpenAI functions.

    A tool keeps its own name if no other server has it; otherwise it becomes `server_tool`. Invalid characters become
    `_`; names that then collide or are too long end in a digest. The same tools get the same names, in any order.
    """
    owners = Counter(tool for _, tool in tools)
    wanted = [tool if owners[tool] == 1 else f"{server}_{tool}" for server, tool in tools]
    allowed = [_NOT_IN_NAMES.sub("_", name) or "_" for name in wanted]
    count = Counter(allowed)
    return [
        name
        if len(name) <= _LONGEST_NAME and (count[name] == 1 or name == tool)
        else f"{name[: _LONGEST_NAME - 9]}_{hashlib.sha256(repr((server, tool)).encode()).hexdigest()[:8]}"
        for (server, tool), name in zip(tools, allowed, strict=True)
    ]


def select(path: Path, names: Mapping[str, str], selected: Sequence[str] | None) -> set[str]:
    """Return which of `names` (model's name: server's name) to keep. `selected` may use either; None selects all.

    Raises:
        ConfigError: a selected tool does not exist.
    """
    if selected is None:
        return set(names)
    missing = [one for one in selected if one not in names and one not in names.values()]
    if missing:
        there = ", ".join(names) or "none"
        raise ConfigError(f"{path}: tool_selected_list: no server has {missing[0]!r}; available: {there}")
    return {name for name, own in names.items() if name in selected or own in selected}
