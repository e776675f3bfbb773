"""What goes wrong on the way between a client and a server, for stand-ins that play servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with the answer to one request."""

    status: int = 200
    body: bytes | None = None
    """Instead of the answer."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    silent: bool = False
    """Nothing is ever answered."""
    hang_up_after: int | None = None
    """So many bytes of the body are sent; then the connection is gone."""
    piece_seconds: float = 0.0
    """The body comes in sixteen pieces, each after so long."""


async def misbehave(request: web.Request, fault: Fault, body: bytes) -> web.StreamResponse:
    """Send `body`, with what is wrong about it."""
    if fault.silent:
        await asyncio.Event().wait()
    headers = {"Content-Type": "application/json", **fault.headers}
    if fault.hang_up_after is None and not fault.piece_seconds:
        return web.Response(status=fault.status, body=body, headers=headers)
    response = web.StreamResponse(status=fault.status, headers={**headers, "Content-Length": str(len(body))})
    await response.prepare(request)
    sent = body if fault.hang_up_after is None else body[: fault.hang_up_after]
    piece = max(1, len(body) // 16)
    for at in range(0, len(sent), piece):
        await asyncio.sleep(fault.piece_seconds)
        await response.write(sent[at : at + piece])
    if fault.hang_up_after is not None and request.transport is not None:
        request.transport.abort()
    return response
