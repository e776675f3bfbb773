"""The protocol between lender and borrowers, length-prefixed JSON over TCP, and detection of dead peers.

A dead process's sockets are closed, a dead machine stops answering the kernel's probes; a process that is merely stuck
does neither, which is how they are told apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Mapping
from typing import Any

from toolyard.connections import write

_LENGTH = struct.Struct("!I")
PROTOCOL = 2
"""Version of the messages: raised when they change, so that mixed Toolyard versions in a cluster get an error."""
MAX_BYTES = 4 << 20
"""Maximum bytes of a message. A process with thousands of tenants stays far below."""


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Receive the next message.

    Raises:
        ConnectionError: the peer is gone, or does not speak this protocol.
    """
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MAX_BYTES:
            raise ConnectionError(f"a message of {size} bytes")
        message: Any = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError, RecursionError, ValueError) as error:
        raise ConnectionError(f"connection lost: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionError("not a message")
    return message  # pyright: ignore[reportUnknownVariableType]


def send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    """Send a message without waiting.

    Raises:
        ConnectionError: the peer is gone.
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    write(writer, _LENGTH.pack(len(data)) + data)


def identity() -> dict[str, Any]:
    """Identifies this process, so that another process on the same machine can check whether it is alive."""
    return {"machine": _machine(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_dead(who: Mapping[str, Any]) -> bool:
    """Whether the process is known to be dead. False if that cannot be determined from here."""
    if not who["machine"] or who["machine"] != _machine():
        return False
    found = _started(who["pid"])
    return _is_gone(who["pid"]) if found is None else found != who["started"]


def _is_gone(pid: int) -> bool:
    """Check a process that /proc does not show: it may be hidden (`hidepid`) but alive."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _machine() -> str:
    """Identifies this boot and pid namespace; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """The start time of the process in kernel ticks; empty if it is a zombie, None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]
