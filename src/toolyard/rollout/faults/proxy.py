"""A proxy on loopback between an engine and its servers. It answers, stalls and resets as the profile says, so that the
engine's own retries and failover are tested, not imitations of them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp import web

from toolyard.engines.http.exchange import base_url
from toolyard.engines.http.openai import openai_base
from toolyard.messages import JSON
from toolyard.rollout.faults.inject import Faults

_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "te", "transfer-encoding", "upgrade"})
_NO_SUCH_ROUTE = frozenset({403, 404, 405, 501})
"""With these, the engine tries another route in the same attempt: which requests find that out depends on timing."""


@asynccontextmanager
async def engine_proxy(faults: Faults, kind: str, urls: Sequence[str]) -> AsyncGenerator[tuple[str, ...]]:
    """URLs to use instead of `urls`. Each names its server, for messages: `http://127.0.0.1:40001/http/gpu-1:8000`.

    `kind`: the engine's, as in the settings.

    Raises:
        ConfigError: a URL is invalid.
    """
    urls = [openai_base(url) if kind == "openai" else base_url(url) for url in urls]
    proxy = _Proxy(faults, urls)
    application = web.Application(client_max_size=1 << 40)
    application.router.add_route("*", "/{path:.*}", proxy.serve)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with proxy.session:
            yield tuple(f"http://127.0.0.1:{runner.addresses[0][1]}{path}" for path in proxy.servers)
    finally:
        await runner.cleanup()


class _Proxy:
    def __init__(self, faults: Faults, urls: Sequence[str]) -> None:
        self.servers = {_path_of(url): url for url in urls}
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )
        self._faults = faults

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Requests with a routing key are attempts to sample; others, such as health checks, have no faults."""
        key = request.headers.get("x-smg-routing-key")
        calls = None if key is None else self._faults.playing.get(unquote(key))
        if calls is None:
            return await self._forward(request)
        fault = calls.engine_fault("engine_error", "engine_busy", "engine_reset", "engine_stall")
        response = None if fault is None else await self._answer(request, fault)
        if response is None:
            response = await self._forward(request)
            if response.status in _NO_SUCH_ROUTE:
                calls.uncount("attempt")
        return response

    async def _answer(self, request: web.Request, fault: JSON) -> web.StreamResponse | None:
        """None: go on, after a stall."""
        profile = self._faults.profile
        said = {"error": {"message": f"injected fault: {fault['kind']}"}}
        match fault["kind"]:
            case "engine_error":
                assert profile.engine_error is not None
                return web.json_response(said, status=profile.engine_error.status)
            case "engine_busy":
                assert profile.engine_busy is not None
                wait = {"Retry-After": f"{profile.engine_busy.retry_after_seconds:g}"}
                return web.json_response(said, status=429, headers=wait)
            case "engine_reset":
                return _reset(request)
            case _:
                assert profile.engine_stall is not None
                await asyncio.sleep(profile.engine_stall.seconds)
                return None

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path
        mine = max((own for own in self.servers if path.startswith(f"{own}/")), key=len, default=None)
        if mine is None:
            return web.Response(status=404)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        target = self.servers[mine] + path.removeprefix(mine)
        body = await request.read() if request.can_read_body else None
        try:
            asked = self.session.request(request.method, target, headers=headers, data=body, allow_redirects=False)
            async with asked as answer:
                content = await answer.read()
                back = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
                return web.Response(status=answer.status, body=content, headers=back)
        except (aiohttp.ClientError, OSError):
            return _reset(request)  # the server's own failure


def _reset(request: web.Request) -> web.Response:
    """Break the connection with a real RST."""
    transport = request.transport
    if transport is not None:
        own: socket.socket | None = transport.get_extra_info("socket")
        if own is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    return web.Response()


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    return f"/{parts.scheme}/{parts.netloc.replace('[', '').replace(']', '')}{parts.path}"
