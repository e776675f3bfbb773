"""`toolyard sandbox serve`: a sandbox behind SandboxFusion's HTTP API.

`serve` is the command: it binds, opens the sandbox, runs until SIGINT or SIGTERM and stops gracefully. `open_service`
does the same for a program that already has an event loop, and for tests.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Protocol, Self

from toolyard.errors import MissingDependencyError
from toolyard.hosts import raise_open_files_limit

try:
    import uvloop

    from toolyard.sandbox.service.app import Judge, SandboxService, ServedSandbox
    from toolyard.sandbox.service.config import ServiceConfig, Token, read_tokens
    from toolyard.sandbox.service.serving import Server, listen_on, url_of
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
        server = Server(
            service,
            service.running.stop,
            request_seconds=config.max_request_seconds,
            max_unwanted_bytes=2 * config.max_request_bytes,
            grace_seconds=config.grace_seconds,
            tls=config.tls_context(),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            await server.ready.wait()
            try:
                yield RunningService(url_of(listener, "http" if config.tls_cert is None else "https"), service)
            except Exception as error:
                # Raised again outside: the task group would wrap the caller's own error in an exception group.
                failure = error
            finally:
                server.should_exit = True
    if failure is not None:
        raise failure


def listen(config: ServiceConfig) -> socket.socket:
    """Return a listening socket on the configured address.

    Raises:
        ConfigError: see `serve`.
    """
    config.check()
    is_open = not config.all_tokens and not config.allow_remote
    return listen_on(config.host, config.port, open_to_all="run programs" if is_open else None)
