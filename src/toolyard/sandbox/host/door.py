"""The one way out of a jail that may reach an address: the host accepts what programs connect to, and forwards it."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from toolyard.connections import write

_CONNECTIONS = 64
"""At once, for one jail. Further ones are closed."""
_CHUNK = 1 << 16


class Door:
    """Forwards connections to `host:port` until it is closed. Made by `open_door`."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._forwarding: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener)

    def close(self) -> None:
        """Accept nothing more, and break the connections that there are."""
        if self._server is not None:
            self._server.close()
        for task in self._forwarding:
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._forwarding) >= _CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._forward(reader, writer))
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._address)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, far_writer))
                group.create_task(_pump(far_reader, writer))
        except* OSError:
            pass  # one of the two is gone, and so is the connection
        finally:
            writer.close()
            far_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        write(writer, chunk)
        await writer.drain()
    with contextlib.suppress(OSError):
        if not writer.is_closing():
            writer.write_eof()


async def open_door(listener: socket.socket, host: str, port: int) -> Door:
    """`listener`: in the jail's network namespace."""
    door = Door(host, port)
    await door.open(listener)
    return door
