"""What a child process writes to stderr, line by line to a logger; the last lines are kept, to explain its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from types import TracebackType
from typing import TextIO

_LINES = 5
_SHOWN = 200
_LONGEST_LINE = 16 << 10
_DYING_SECONDS = 0.5
"""How long the last words of a dead process are waited for: somebody else may hold its stderr open."""


class Stderr:
    """A context manager that returns what to give the process as its stderr. May be entered again once left."""

    def __init__(self, log: logging.Logger, name: str) -> None:
        self._log = log
        self._name = name
        self._kept: deque[str] = deque(maxlen=_LINES)

    def tail(self) -> str:
        """The last lines, as the end of a sentence; empty if there are none."""
        return f"; its stderr ends with: {' | '.join(line[:_SHOWN] for line in self._kept)}" if self._kept else ""

    async def __aenter__(self) -> TextIO:
        self._kept.clear()
        read, write = os.pipe()
        self._write = os.fdopen(write, "w")
        self._pipe = _Pipe(self)
        await asyncio.get_running_loop().connect_read_pipe(lambda: self._pipe, os.fdopen(read, "rb", buffering=0))
        return self._write

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_SECONDS):
                    await self._pipe.ended.wait()
        finally:
            self._pipe.close()

    def said(self, line: bytes) -> None:
        text = line.decode(errors="replace").strip()
        if text:
            self._kept.append(text)
            self._log.info("%s: %s", self._name, text)


class _Pipe(asyncio.Protocol):
    def __init__(self, stderr: Stderr) -> None:
        self.ended = asyncio.Event()
        self._stderr = stderr
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._stderr.said(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stderr.said(self._rest)
        self.ended.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
