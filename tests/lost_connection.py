"""Connections that the peer resets, on both kinds of event loop: asyncio's, and uvloop's, which Ray installs."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def reset(connection: socket.socket) -> None:
    """Close it as the kernel closes those of a killed process that has unread data."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def listening(serve: Callable[[socket.socket, int], None]) -> Generator[int]:
    """Listen in a thread, which calls `serve` with one connection after the other, and its number. Yields the port."""

    def accept() -> None:
        number = 0
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                serve(connection, number)
            number += 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


async def lost() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that is lost, though nobody has noticed."""

    def serve(connection: socket.socket, _: int) -> None:
        connection.recv(1)  # then it is connected
        reset(connection)

    with listening(serve) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b".")
        while not writer.is_closing():  # noqa: ASYNC110 - nothing would set an event
            await asyncio.sleep(0.001)
        return reader, writer
