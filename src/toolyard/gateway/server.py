"""Serves a gateway on a socket, until it is left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from toolyard.chat.protocol import ChatFormat, Tokenizer
from toolyard.engines.protocol import Engine
from toolyard.errors import MissingDependencyError, RecordError
from toolyard.gateway.config import GatewayConfig
from toolyard.gateway.sessions import SessionEnd, Sessions
from toolyard.records.trajectory import Trajectory

try:
    from toolyard.gateway.service import Finish, Gateway
    from toolyard.sandbox.service.serving import Server, listen_on, url_of
except ImportError as error:
    raise MissingDependencyError(error.name or "uvicorn", "server", "the gateway") from error


class RunningGateway:
    """A gateway that is accepting requests."""

    def __init__(self, url: str, gateway: Gateway) -> None:
        self.url = url
        """Without a session: `session_url` is what agents need."""
        self.sessions: Sessions = gateway.sessions
        self.gateway = gateway

    @property
    def address(self) -> str:
        """`host:port`."""
        return self.url.partition("://")[2]

    def session_url(self, session_id: str) -> str:
        """The base URL of a session for OpenAI's clients. Anthropic's take it without `/v1`."""
        return f"{self.url}/s/{session_id}/v1"


async def _drop(trajectories: list[Trajectory]) -> None:
    """Without a dump."""


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig,
    engine: Engine,
    chat: ChatFormat,
    tokenizer: Tokenizer | None = None,
    *,
    model: str = "model",
    finish: Finish = _drop,
    listener: socket.socket | None = None,
) -> AsyncGenerator[RunningGateway]:
    """Serve `engine`, which must be open, while inside the block. `finish` gets the trajectories of every session that
    ends; leaving the block ends the others.

    Raises:
        ConfigError: the address is in use or cannot be bound, or is reachable from other machines without a token.
        RecordError: from `finish`, for sessions that were open at the end.
    """
    listener = listener or listen(config)
    gateway = Gateway(config, Sessions(config, engine, chat, tokenizer), finish, model)
    server = Server(
        gateway,
        gateway.running.stop,
        request_seconds=config.max_request_seconds,
        max_unwanted_bytes=2 * config.max_request_bytes,
        grace_seconds=config.grace_seconds,
    )
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]))
        idling = group.create_task(gateway.end_idle_sessions())
        await server.ready.wait()
        try:
            yield RunningGateway(url_of(listener), gateway)
        except (Exception, asyncio.CancelledError) as error:
            # Raised again outside: the task group would wrap the caller's own error in an exception group, and would
            # cancel the server, which would then leave its connections and their requests behind.
            failure = error
            gateway.running.stop()
        finally:
            idling.cancel()
            server.should_exit = True
        await asyncio.wait([serving])
    for session in gateway.sessions.open:
        try:
            await gateway.end(session, SessionEnd.ABORTED)
        except RecordError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def listen(config: GatewayConfig) -> socket.socket:
    """Return a listening socket on the configured address.

    Raises:
        ConfigError: see `open_gateway`.
    """
    is_open = not config.tokens and not config.allow_remote
    return listen_on(config.host, config.port, open_to_all="use the model" if is_open else None)
