"""A uvicorn server within bounds, and its socket. Knows nothing of sandboxes: the gateway uses it as well."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from toolyard.errors import ConfigError
from toolyard.sandbox.service.connection import connection_class

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that the client closes them and no request hits a closing one."""
_RESPONSE_SECONDS = 5
"""After the grace period: time for the responses to cancelled work to reach their clients."""


class Server(uvicorn.Server):
    """uvicorn, but we handle signals, and work that outlives the grace period is cancelled with a response.

    uvicorn would re-raise the signal when it is done, and what the application holds would never be closed.
    """

    def __init__(
        self,
        app: Any,
        stop: Callable[[], None],
        *,
        request_seconds: float,
        max_unwanted_bytes: int,
        grace_seconds: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`stop` cancels all work. `request_seconds`, `max_unwanted_bytes`: see `Connection`."""
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(request_seconds, max_unwanted_bytes),
                ws="none",
                lifespan="off",
                log_config=None,
                # Its warnings are about malformed requests: anyone could fill the log with them.
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # or anyone on this machine could impersonate another client
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(grace_seconds) + _RESPONSE_SECONDS,
            )
        )
        self.config.load()
        self.config.ssl = tls
        self.ready = asyncio.Event()
        self._stop = stop
        self._grace_seconds = grace_seconds

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        patience = asyncio.get_running_loop().call_later(self._grace_seconds, self._stop)
        try:
            await super().shutdown(sockets)
        finally:
            patience.cancel()


def listen_on(host: str, port: int, *, open_to_all: str | None) -> socket.socket:
    """Return a listening socket, so that a bind error comes before anything is started. `open_to_all`: what anyone
    could do who reaches the address from another machine; None if that is prevented or allowed.

    Raises:
        ConfigError: the address is in use or cannot be bound, or is reachable from other machines.
    """
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot resolve host {host!r}: {error.strerror}") from error
    # IPv4 first if a name has both: clients can always reach "localhost" over it.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    if open_to_all is not None and not ipaddress.ip_address(address[0]).is_loopback:
        raise ConfigError(
            f"{where} is reachable from other machines, where anyone could {open_to_all} without a token: "
            "set a token, or allow it explicitly"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another port, or 0 for any") from error
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
