"""A real MCP server, for the tests: the SDK's own, over stdio or HTTP.

mcp_server.py stdio | http PORT | legacy-http PORT | sse PORT

`legacy-http` speaks as servers did before 2026, with sessions. Environment: `WITHOUT`, a file: while it exists there is
no tool `extra`. `STUBBORN`: ignores the end of its input and SIGTERM.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

from mcp import types
from mcp.server.mcpserver import Image, MCPServer
from pydantic import BaseModel

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
server = MCPServer("for tests", log_level="WARNING")


class Item(BaseModel):
    name: str
    amount: int = 1


class Order(BaseModel):
    items: list[Item]
    ship: Literal["air", "sea"] | None = None
    notes: dict[str, str | int] = {}


class Flight:
    """Calls of `together` that wait for each other."""

    now = busy = 0
    full = asyncio.Event()


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def order(order: Order) -> str:
    """Takes an order."""
    return f"{sum(item.amount for item in order.items)} pieces by {order.ship}; notes: {json.dumps(order.notes)}"


@server.tool()
def picture(size: int = 0) -> list[str | Image]:
    """Draws."""
    return ["a dot", Image(data=PNG + bytes(size), format="png")]


@server.tool()
def structured() -> types.CallToolResult:
    """Says nothing in words."""
    return types.CallToolResult(content=[], structured_content={"städte": [{"name": "Köln", "people": 1087863}]})


@server.tool()
def resources() -> types.CallToolResult:
    """Gives one of each kind."""
    return types.CallToolResult(
        content=[
            types.TextContent(text="first"),
            types.ResourceLink(name="notes", uri="file:///notes.txt", description="what was said"),
            types.EmbeddedResource(resource=types.TextResourceContents(uri="file:///a.txt", text="inside")),
            types.EmbeddedResource(
                resource=types.BlobResourceContents(uri="file:///a.zip", mime_type="application/zip", blob="UEsFBg==")
            ),
            types.EmbeddedResource(
                resource=types.BlobResourceContents(uri="file:///a.gif", mime_type="image/gif", blob="R0lG")
            ),
            types.AudioContent(mime_type="audio/wav", data="UklGRg=="),
        ]
    )


@server.tool()
def fail(reason: str) -> types.CallToolResult:
    """Fails."""
    return types.CallToolResult(content=[types.TextContent(text=reason)], is_error=True)


@server.tool()
def crash() -> str:
    """Raises."""
    raise ValueError("secret details")


@server.tool()
def pid(padding: str = "") -> int:
    """Who answers."""
    return os.getpid()


@server.tool()
async def freeze(seconds: float) -> str:
    """Blocks the server's event loop, so that it answers nothing else meanwhile."""
    time.sleep(seconds)  # noqa: ASYNC251 - the point
    return "done"


@server.tool()
async def slow(seconds: float, mark: str = "", until: str = "") -> str:
    """Waits until the file `until` exists; writes to the file `mark` when it starts and when it is cancelled."""
    note(mark, "began")
    try:
        await asyncio.sleep(seconds)
        while until and not Path(until).exists():  # noqa: ASYNC110, ASYNC240 - a file sets no event
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        note(mark, "cancelled")
        raise
    return "done"


def note(mark: str, word: str) -> None:
    if mark:
        Path(mark).write_text(word)


@server.tool()
async def together(number: int, me: int) -> int:
    """Answers when this many calls are in flight."""
    Flight.now += 1
    if Flight.now == number:
        Flight.full.set()
    await Flight.full.wait()
    return me


@server.tool()
async def busy(seconds: float) -> int:
    """Tells how many calls of it were in flight."""
    Flight.busy += 1
    await asyncio.sleep(seconds)
    Flight.busy -= 1
    return Flight.busy + 1


@server.tool(name="files.read/all")
def read_all() -> str:
    """Has a name that OpenAI's functions may not have."""
    return "read"


@server.tool()
def complain(text: str) -> str:
    """Writes to stderr."""
    print(text, file=sys.stderr, flush=True)
    return "written"


if not Path(os.environ.get("WITHOUT", "/nowhere")).exists():

    @server.tool()
    def extra() -> str:
        """Is not always there."""
        return "here"


class Legacy:
    """An HTTP server that does not know the question `server/discover`."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        headers = dict(scope.get("headers", []))
        if headers.get(b"mcp-method") == b"server/discover":
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self.app(scope, receive, send)


def main() -> None:
    transport, *rest = sys.argv[1:]
    if os.environ.get("STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if transport == "stdio":
        server.run()
    elif transport == "legacy-http":
        import uvicorn

        uvicorn.run(Legacy(server.streamable_http_app()), host="127.0.0.1", port=int(rest[0]), log_level="error")
    elif transport == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(rest[0]))
    else:
        server.run("sse", host="127.0.0.1", port=int(rest[0]))
    if os.environ.get("STUBBORN"):
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
