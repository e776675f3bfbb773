"""Streams to peers that may die at any moment.

After a connection is lost, asyncio ignores what is written to it, but uvloop, which Ray installs, raises RuntimeError
and has no socket anymore. Here, both are a ConnectionError.
"""

from __future__ import annotations

import asyncio
import socket


def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write without waiting.

    Raises:
        ConnectionError: the connection is lost.
    """
    _check(writer)
    writer.write(data)


def watch_peer(writer: asyncio.StreamWriter, seconds: float) -> None:
    """Make the kernel detect a dead peer machine within about this time, and send without delay.

    Raises:
        ConnectionError: the connection is lost.
    """
    _check(writer)
    peer: socket.socket = writer.get_extra_info("socket")
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, round(seconds / 4))
    for option, value in (("TCP_KEEPIDLE", interval), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


def _check(writer: asyncio.StreamWriter) -> None:
    if writer.is_closing():
        raise ConnectionResetError("the connection is lost")
