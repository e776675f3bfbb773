"""One node's sandbox, served to all processes of the cluster until the last of them has left.

A process attaches with a connection of its own beside its requests. The kernel closes it when either side dies, so the
node knows its users and ends their sessions, and a user learns at once that the node's service is gone. The node tells
its users over it how busy it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from toolyard.connections import watch_peer, write
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.service.config import ServiceConfig, Token
from toolyard.sandbox.service.server import RunningService, open_service

WAIT_SECONDS = 3600.0
"""Longest wait for a slot. Long, because users notice a dead node without a deadline."""
_SESSION_IDLE_SECONDS = 3600.0
"""Long, because a session ends with the process that opened it."""
_MANY = 1 << 20
"""For limits that keep strangers in check: all users belong to one cluster."""
_IDLE_SECONDS = 10.0
"""End this long after the last user has left: another run may follow."""
_FIRST_USE_SECONDS = 60.0
"""On a busy machine, whoever asked for the service may take this long to attach."""
_HELLO_SECONDS = 10.0
_PEER_SECONDS = 10.0
"""Notice within this time that the other machine is gone."""
_LOAD_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Address:
    """Where to attach."""

    host: str
    port: int
    secret: str


@dataclass(frozen=True, slots=True)
class Hello:
    """What a user is told when it attaches."""

    url: str
    token: str
    workers: int
    max_cases: int


async def serve_node(
    host: str, workers: int, on_ready: Callable[[Address], None], *, idle_seconds: float = _IDLE_SECONDS
) -> None:
    """Serve a sandbox with `workers` slots on any free port of `host`. Returns `idle_seconds` after the last user left.

    Raises:
        ConfigError: it cannot listen on `host`.
        SandboxError: the sandbox could not be opened.
    """
    secret = secrets.token_hex(16)
    config = ServiceConfig(
        host=host,
        port=0,
        token=secret,
        max_waiting=_MANY,
        max_wait_seconds=WAIT_SECONDS,
        max_in_flight_per_client=_MANY,
        max_sessions=_MANY,
        max_sessions_per_client=_MANY,
        session_idle_seconds=_SESSION_IDLE_SECONDS,
        grace_seconds=0,
    )
    sandbox = LocalSandbox(workers=workers, max_sessions=_MANY, session_idle_seconds=_SESSION_IDLE_SECONDS)
    async with sandbox, open_service(config, sandbox) as service:
        users = _Users(secret, service, workers, config.max_cases)
        server = await asyncio.start_server(users.attend, host, 0)
        try:
            on_ready(Address(host, server.sockets[0].getsockname()[1], secret))
            while users.idle_seconds < idle_seconds:
                now = sandbox.statistics()
                users.tell(now.busy + now.waiting)
                await asyncio.sleep(_LOAD_SECONDS)
        finally:
            server.close()


class _Users:
    def __init__(self, secret: str, service: RunningService, workers: int, max_cases: int) -> None:
        self._secret = secret
        self._service = service
        self._workers, self._max_cases = workers, max_cases
        self._writers: set[asyncio.StreamWriter] = set()
        self._gone_since = _now() + _FIRST_USE_SECONDS
        self._load = 0

    @property
    def idle_seconds(self) -> float:
        return 0.0 if self._writers else _now() - self._gone_since

    def tell(self, load: int) -> None:
        # Also if it has not changed, unless it is idle: a user's own share of it may have.
        if load or self._load:
            self._load = load
            for writer in self._writers:
                self._tell_one(writer)

    def _tell_one(self, writer: asyncio.StreamWriter) -> None:
        if not writer.transport.get_write_buffer_size():  # or it does not read, and gets a later figure
            with contextlib.suppress(ConnectionError):  # `attend` is about to notice
                write(writer, b"%d\n" % self._load)

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One user, from its first word until its connection ends."""
        user = Token(name=secrets.token_hex(8), secret=secrets.token_hex(16))
        try:
            watch_peer(writer, _PEER_SECONDS)
            async with asyncio.timeout(_HELLO_SECONDS):
                said = await reader.readline()
            if not hmac.compare_digest(said.strip(), self._secret.encode()):
                return
            self._writers.add(writer)
            self._service.admit(user)
            hello = Hello(self._service.url, user.secret, self._workers, self._max_cases)
            write(writer, json.dumps(asdict(hello)).encode() + b"\n")
            self._tell_one(writer)
            await reader.read()
        except (OSError, TimeoutError, ValueError):  # it is lost, or no user at all
            return
        finally:
            if writer in self._writers:
                self._writers.discard(writer)
                self._service.dismiss(user.name)
                self._gone_since = _now()
            writer.close()


@asynccontextmanager
async def attach(address: Address) -> AsyncGenerator[tuple[Hello, asyncio.StreamReader]]:
    """Use a node's service inside the block. The reader yields its load, a number per line, until the service ends.

    Raises:
        OSError, TimeoutError: it is gone.
    """
    async with asyncio.timeout(_HELLO_SECONDS):
        reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        watch_peer(writer, _PEER_SECONDS)
        write(writer, address.secret.encode() + b"\n")
        async with asyncio.timeout(_HELLO_SECONDS):
            said = await reader.readline()
        if not said.endswith(b"\n"):
            raise ConnectionError(f"the sandbox service at {address.host}:{address.port} ended")
        yield Hello(**json.loads(said)), reader
    finally:
        writer.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
