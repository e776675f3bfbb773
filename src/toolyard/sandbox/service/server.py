"""`toolyard sandbox serve`: a sandbox behind SandboxFusion's HTTP API.

`serve` is the command: it binds, opens the sandbox, runs until SIGINT or SIGTERM and stops gracefully. `open_service`
does the same for a program that already has an event loop, and for tests.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Protocol, Self

from toolyard.errors import ConfigError, MissingDependencyError
from toolyard.hosts import raise_open_files_limit

try:
    import uvicorn
    import uvloop

    from toolyard.sandbox.service.app import Judge, SandboxService, ServedSandbox
    from toolyard.sandbox.service.config import ServiceConfig, Token, read_tokens
    from toolyard.sandbox.service.connection import connection_class
    from toolyard.sandbox.service.sessions import host_sessions
except ImportError as error:
    raise MissingDependencyError(error.name or "uvicorn", "server", "the sandbox service") from error

__all__ = [
    "Judge",
    "OpenableSandbox",
    "RunningService",
    "ServedSandbox",
    "ServiceConfig",
    "Token",
    "listen",
    "new_event_loop",
    "open_service",
    "read_tokens",
    "serve",
]

new_event_loop = uvloop.new_event_loop
"""For a loop that serves."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that the client closes them and no request hits a closing one."""
_RESPONSE_SECONDS = 5
"""After the grace period: time for the responses to cancelled programs to reach their clients."""


class OpenableSandbox(ServedSandbox, Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def serve(
    config: ServiceConfig,
    sandbox: OpenableSandbox,
    *,
    judge: Judge | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; a second signal cancels running programs. Opens and closes `sandbox`.

    `judge` answers `/submit`. `on_ready` is called once with the base URL, when the service accepts requests.

    Raises:
        ConfigError: the address is in use or cannot be bound, or is reachable from other machines without a token; or
            settings contradict each other.
        SandboxError: the sandbox could not be opened.
    """
    listener = listen(config)
    raise_open_files_limit()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve_until_signalled(config, sandbox, listener, judge, on_ready))
    finally:
        listener.close()


async def _serve_until_signalled(
    config: ServiceConfig,
    sandbox: OpenableSandbox,
    listener: socket.socket,
    judge: Judge | None,
    on_ready: Callable[[str], None] | None,
) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        async with sandbox, open_service(config, sandbox, judge=judge, listener=listener) as running:
            if on_ready is not None:
                on_ready(running.url)
            await stopping.wait()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, running.cancel_all)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class RunningService:
    """A service that is accepting requests."""

    def __init__(self, url: str, service: SandboxService) -> None:
        self.url = url
        self.admit = service.admit
        self.dismiss = service.dismiss
        self._service = service

    def cancel_all(self) -> None:
        """Cancel running programs; their clients get a 503. Use it to cut the grace period short."""
        self._service.running.stop()


@asynccontextmanager
async def open_service(
    config: ServiceConfig, sandbox: ServedSandbox, *, judge: Judge | None = None, listener: socket.socket | None = None
) -> AsyncGenerator[RunningService]:
    """Serve `sandbox`, which must be open, while inside the block. `judge` answers `/submit`.

    Leaving the block stops accepting, lets running programs finish for up to `config.grace_seconds`, then cancels them.

    Raises:
        ConfigError: as for `serve`.
    """
    listener = listener or listen(config)
    failure: Exception | None = None
    async with host_sessions(
        sandbox,
        max_sessions=config.max_sessions,
        max_per_client=config.max_sessions_per_client,
        idle_seconds=config.session_idle_seconds,
    ) as sessions:
        service = SandboxService(config, sandbox, sessions, judge)
        server = _Server(service, config)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            await server.ready.wait()
            try:
                yield RunningService(_url(listener, "http" if config.tls_cert is None else "https"), service)
            except Exception as error:
                # Raised again outside: the task group would wrap the caller's own error in an exception group.
                failure = error
            finally:
                server.should_exit = True
    if failure is not None:
        raise failure


class _Server(uvicorn.Server):
    """uvicorn, but we handle signals, and programs that outlive the grace period are cancelled with a response.

    uvicorn would re-raise the signal when it is done, and the sandbox would never be closed.
    """

    def __init__(self, service: SandboxService, config: ServiceConfig) -> None:
        super().__init__(
            uvicorn.Config(
                service,
                http=connection_class(config.max_request_seconds, 2 * config.max_request_bytes),
                ws="none",
                lifespan="off",
                log_config=None,
                # Its warnings are about malformed requests: anyone could fill the log with them.
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # or anyone on this machine could impersonate another client
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(config.grace_seconds) + _RESPONSE_SECONDS,
            )
        )
        self.config.load()
        self.config.ssl = config.tls_context()
        self.ready = asyncio.Event()
        self._service = service
        self._grace_seconds = config.grace_seconds

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        patience = asyncio.get_running_loop().call_later(self._grace_seconds, self._service.running.stop)
        try:
            await super().shutdown(sockets)
        finally:
            patience.cancel()


def listen(config: ServiceConfig) -> socket.socket:
    """Return a listening socket on the configured address, so that a bind error comes before anything is started.

    Raises:
        ConfigError: see `serve`.
    """
    config.check()
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot resolve host {config.host!r}: {error.strerror}") from error
    # IPv4 first if a name has both: clients can always reach "localhost" over it.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    if not ipaddress.ip_address(address[0]).is_loopback and not config.all_tokens and not config.allow_remote:
        raise ConfigError(
            f"{where} is reachable from other machines, where anyone could run programs without a token: "
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


def _url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
