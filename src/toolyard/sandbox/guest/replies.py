"""Replies from a worker to the host, sent from memory that children do not inherit."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from . import frames
from .child import Stream, private_memory

_ROOM = 256 << 10
SHORT_PATIENCE, LONG_PATIENCE = 0.008, 0.05
"""Seconds to hold a reply back so that others can join it: waking the host costs as much as a short case."""


Numbers = tuple[int, int, int, float, float, float, int]
"""Reason, flags, wait status; wall, CPU and starved seconds; peak bytes."""


class Replies:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._held = private_memory(_ROOM)
        self._size = 0
        self._since = 0.0
        self.patience = SHORT_PATIENCE

    def put(self, numbers: Numbers, streams: Sequence[Stream], *, hold: bool) -> None:
        """Send a reply.

        `hold`: more will follow soon; if not, call `flush`.
        """
        sizes = [stream.size for stream in streams]
        at, end = self._size, self._size + frames.RESPONSE.size + sum(sizes)
        if not hold or end > _ROOM:
            self.flush()
            at, end = 0, end - at
        if not hold or end > _ROOM:
            frames.RESPONSE.pack_into(self._held, 0, *numbers, *sizes)
            self._send([self._held[: frames.RESPONSE.size], *(stream.view() for stream in streams)])
            return
        now = time.monotonic()
        if not at:
            self._since = now
        frames.RESPONSE.pack_into(self._held, at, *numbers, *sizes)
        at += frames.RESPONSE.size
        for stream, size in zip(streams, sizes, strict=True):
            if size:
                self._held[at : at + size] = stream.view()
                at += size
        self._size = end
        if now - self._since > self.patience:
            self.flush()

    def flush(self) -> None:
        if self._size:
            self._send([self._held[: self._size]])
            self._size = 0

    def _send(self, parts: list[memoryview]) -> None:
        parts = [part for part in parts if len(part)]
        while parts:
            sent = self._channel.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
