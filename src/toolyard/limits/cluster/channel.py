"""How lender and borrowers talk: JSON with a length before it, on TCP. And how each side finds out that the other died.

A broken process closes its sockets, a broken machine stops answering the kernel's probes; a process that is merely
stuck does neither, which is how the two are told apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("!I")
PROTOCOL = 2
"""Of the messages: raised when they change, so that two versions of Toolyard in one cluster say so."""
MOST = 4 << 20
"""Bytes of a message. A process with thousands of tenants stays far below."""


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message.

    Raises:
        ConnectionError: the other side is gone, or does not speak our language.
    """
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MOST:
            raise ConnectionError(f"a message of {size} bytes")
        message: Any = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError, RecursionError, ValueError) as error:
        raise ConnectionError(f"connection lost: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionError("not a message")
    return message  # pyright: ignore[reportUnknownVariableType]


def send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    writer.write(_LENGTH.pack(len(data)) + data)


def watch_peer(writer: asyncio.StreamWriter, term: float) -> None:
    """Have the kernel find out within about a term that the other machine is gone, and send without delay."""
    peer: socket.socket = writer.get_extra_info("socket")
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, round(term / 4))
    for option, value in (("TCP_KEEPIDLE", interval), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(term * 1000))


def identity() -> dict[str, Any]:
    """Of this process, so that another one of the same machine can ask the kernel whether it still lives."""
    return {"machine": _machine(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_dead(who: Mapping[str, Any]) -> bool:
    """Known to be dead. False also if that cannot be known from here."""
    if not who["machine"] or who["machine"] != _machine():
        return False
    found = _started(who["pid"])
    return _is_gone(who["pid"]) if found is None else found != who["started"]


def _is_gone(pid: int) -> bool:
    """Of a process that /proc does not show: it may be hidden from us (`hidepid`), and alive."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _machine() -> str:
    """This boot of this machine, seen through this pid namespace; empty if there is no telling."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When the process of that number started, in the kernel's words; empty if only its remains are left."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]
