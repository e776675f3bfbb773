"""One connection to the service: limits the size of headers, the time they may take, and unwanted request bodies.

uvicorn limits none of these, and its parser takes quadratic time for a header that arrives in many pieces. Requests
refused here are refused before the application, and thus before any token, is checked.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 65536
"""Request line and headers; also the bytes between and after the parts of a chunked body."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with limits. Created by `connection_class`, which sets them."""

    seconds: float
    """Time for the headers, and for the rest of a body that is no longer needed."""
    max_unwanted_bytes: int
    """Size limit for such a body. Reading it lets a client that sends everything before it reads see the response."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending = 0
        """Bytes since the parser last completed an element: what it may be buffering."""
        self._head_bytes = 0
        self._unwanted_bytes = 0
        self._in_head = False
        self._in_message = False
        self._deadline: asyncio.TimerHandle | None = None
        self._oversize = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pending += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._pending > MAX_HEAD_BYTES:
            self._refuse_oversize()
        elif self._in_head or (self._answered and (self._in_message or self.timeout_keep_alive_task is None)):
            self._expect_end()

    # Parser callbacks -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_message = self._in_head = True
        self._head_bytes = self._unwanted_bytes = 0
        self._forget_deadline()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._in_head:
            super().on_header(name, value)
        # Otherwise it is a trailer, which must not become a header of a request that was admitted without it.

    def on_headers_complete(self) -> None:
        self._head_bytes = self._pending = 0
        self._forget_deadline()
        super().on_headers_complete()  # raises for an invalid URL
        self._in_head = False

    def on_chunk_header(self) -> None:
        self._pending = 0

    def on_chunk_complete(self) -> None:
        self._pending = 0

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        if self._answered:
            self._unwanted_bytes += len(body)
            if self._unwanted_bytes > self.max_unwanted_bytes:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._head_bytes = self._pending = 0
        self._forget_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_message and not self.transport.is_closing():
            self._expect_end()

    # Bounds -----------------------------------------------------------------------------------------------------------

    @property
    def _answered(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is None or cycle.response_complete

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._oversize = True
            raise ValueError("too large")  # the parser stops, and `send_400_response` is called

    def _expect_end(self) -> None:
        """Start the deadline for the end of the headers, or of an unwanted body, unless it is running already."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.seconds, self._too_late)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if not self._answered:
            self._expect_end()  # half a request, pipelined behind one that is still running
        elif self._in_head:
            self._refuse(408, f"the headers did not arrive within {self.seconds:g} s")
        elif self._in_message or self.timeout_keep_alive_task is None:
            self.transport.close()

    def _refuse_oversize(self) -> None:
        self._refuse(431, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        if self._oversize:
            self._refuse_oversize()
        else:
            self._refuse(400, "not a valid HTTP request")

    def _refuse(self, status: int, text: str) -> None:
        in_body = self._in_message and not self._in_head and not self.pipeline
        if self._answered or (in_body and not self.cycle.response_started):
            body = json.dumps({"detail": text}).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        # Otherwise it is pipelined behind a running request, whose response the client would take this for.
        self.transport.close()


def connection_class(seconds: float, max_unwanted_bytes: int) -> type[Connection]:
    return type("Connection", (Connection,), {"seconds": seconds, "max_unwanted_bytes": max_unwanted_bytes})
