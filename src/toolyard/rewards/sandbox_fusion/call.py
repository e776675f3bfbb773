"""One `run_code` request of `rewards.sandbox_fusion`: to a service over HTTP, or to the embedded sandbox.

Both run in the process's background loop, where connections are pooled and the sandbox stays open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from toolyard import settings
from toolyard.errors import ConfigError, SandboxBusyError, SandboxError, ToolyardError
from toolyard.rewards import blocking
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Limits
from toolyard.sandbox.remote.http import Connections, Retries, explain, ssl_context
from toolyard.sandbox.wire import programs as wire

_LIMITS = Limits(output_bytes=16 * MIB)
"""Limits of the embedded sandbox that a request does not set. Truncated output is never correct."""
_CONNECTIONS = 256
_CONNECT_SECONDS = 5.0
_BROKEN_TRIES = 3
_QUEUE_SECONDS = 20.0
_PATIENCE_SECONDS = 600.0


def post(url: str, body: bytes, seconds: float) -> bytes:
    """Return the service's response. `seconds`: time limit of one attempt.

    Raises:
        ToolyardError: there is none after all retries; or the URL is not a SandboxFusion service.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"sandbox URL {url!r}: expected http://host:port, with or without /run_code")
    where = url if parts.path.strip("/") else parts._replace(path="/run_code").geturl()
    return blocking.run(_post(where.rstrip("/"), body, seconds))


def run_here(body: bytes) -> bytes:
    """Respond as a service would: the sandbox's refusals and failures are responses as well.

    Raises:
        ToolyardError: the sandbox could not be opened.
        ValidationError: `body` is not a valid request.
    """
    return blocking.run(_run_here(wire.RunCodeRequest.model_validate_json(body)))


async def _run_here(request: wire.RunCodeRequest) -> bytes:
    sandbox = await blocking.kept(LocalSandbox, LocalSandbox)
    try:
        program, limits = wire.read_request(request, _LIMITS)
        response = wire.write_response(await sandbox.run(program, limits), extended=False)
    except ToolyardError as error:
        response = wire.write_failure(error, extended=False)
    return wire.to_json(response)


async def _post(url: str, body: bytes, seconds: float) -> bytes:
    token = settings.sandbox_token()
    http = await blocking.kept((Connections, url, token), lambda: _connected(url, token))
    clock = asyncio.get_running_loop().time
    begun = clock()
    broken = 0
    while True:
        tried = clock()
        try:
            reply = await http.call("POST", "", body, seconds=seconds)
        except SandboxBusyError:
            # A server that lets requests wait before it rejects them has a queue, and queues move. One that rejects
            # them immediately, several times, is down.
            now = clock()
            if now - tried < _QUEUE_SECONDS or now - begun > _PATIENCE_SECONDS:
                raise
        except SandboxError as error:
            # It has a cause if the connection broke during the request. Running a program twice does no harm; waiting
            # twice for a server that does not respond does.
            broken += 1
            if not error.retryable or error.__cause__ is None or broken == _BROKEN_TRIES:
                raise
            await asyncio.sleep(0.5 * broken)
        else:
            if reply.status != 200:
                raise explain(reply, url)
            return reply.body


@asynccontextmanager
async def _connected(url: str, token: str | None) -> AsyncGenerator[Connections]:
    http = Connections(
        url,
        token,
        limit=_CONNECTIONS,
        connect_seconds=_CONNECT_SECONDS,
        retries=Retries(),
        trust=ssl_context(settings.sandbox_ca_file()),
    )
    await http.open()
    try:
        yield http
    finally:
        await http.close()
