"""A session of the embedded sandbox: a jail and an interpreter kept between cells."""

from __future__ import annotations

import asyncio
import json
import marshal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from toolyard.errors import ProgramError, SessionLostError
from toolyard.sandbox.guest import frames
from toolyard.sandbox.host.pool import Slots
from toolyard.sandbox.host.requests import as_bytes, header_of, unpack_files, verdict_of
from toolyard.sandbox.host.worker import Worker, WorkerDiedError, WorkerReply
from toolyard.sandbox.protocol import CellError, CellResult, Limits, Verdict

_FILES_SECONDS = 30.0
_INTERFERED = "the files could not be transferred: the session's own program interfered"


class LocalSession:
    """See `Session`. Created by `LocalSandbox.session()`; cells of one session run one after the other."""

    def __init__(
        self, slots: Slots, limits: Limits, idle_seconds: float, on_close: Callable[[LocalSession], None]
    ) -> None:
        self._slots = slots
        self._limits = limits
        self._idle_seconds = idle_seconds
        self._on_close = on_close
        self._worker: Worker | None = None
        self._discard: Callable[[], None] | None = None
        self._turn = asyncio.Lock()
        self._wanted = 0
        """How many calls are waiting or running."""
        self._expiry: asyncio.TimerHandle | None = None
        self._why_lost = "the session is closed"

    async def open(self, worker: Worker, discard: Callable[[], None]) -> None:
        self._worker, self._discard = worker, discard
        parts = [marshal.dumps(((), {}, ()), 4), b"", b"", b"", b""]
        async with self._our_turn():
            reply = await self._ask(frames.OPEN_SESSION, parts, 10.0)
        if reply.reason != frames.ENDED:
            raise SessionLostError(f"the session could not be opened: {reply.extra.decode('utf-8', 'replace')}")

    async def run(self, code: str, *, seconds: float | None = None) -> CellResult:
        seconds = seconds or self._limits.run_seconds
        async with self._our_turn():
            await self._slots.take(None)
            try:
                parts = [marshal.dumps(((), {}, ()), 4), as_bytes(code), b"", b"", b""]
                reply = await self._ask(frames.CELL, parts, seconds)
            finally:
                self._slots.give()
            if reply.reason == frames.LOST:
                self._lose("the session's interpreter is gone")
                raise SessionLostError(self._why_lost)
            lost = bool(reply.flags & frames.RETIRING)
            if lost:
                verdict, _ = verdict_of(reply)
                self._lose(f"the session's interpreter ended with its last cell ({verdict.value})")
            return _cell_result(reply, lost=lost)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write files into the session's directory.

        Raises:
            ProgramError: a name is not allowed, or there is no space.
        """
        manifest = marshal.dumps(tuple((name, len(content), 0o644) for name, content in files.items()), 4)
        order = len(manifest).to_bytes(8, "little") + manifest + b"".join(files.values())
        async with self._our_turn():
            reply = await self._ask(frames.WRITE_FILES, [order, b"", b"", b"", b""], _FILES_SECONDS)
        if reply.reason == frames.REFUSED:
            raise ProgramError(reply.extra.decode("utf-8", "replace") or _INTERFERED)

    async def read_files(self, names: Sequence[str]) -> dict[str, bytes]:
        """Read those of `names` that exist and are regular files.

        Raises:
            ProgramError: the session's own program prevented reading them.
        """
        order = marshal.dumps(list(names), 4)
        async with self._our_turn():
            reply = await self._ask(frames.READ_FILES, [order, b"", b"", b"", b""], _FILES_SECONDS)
        if reply.reason == frames.REFUSED:
            raise ProgramError(_INTERFERED)
        return unpack_files(reply.extra)

    async def _ask(self, operation: int, parts: list[bytes], seconds: float) -> WorkerReply:
        worker = self._worker
        if worker is not None and not worker.alive:
            self._lose("the session's worker died between two cells")
        if worker is None or not worker.alive:
            raise SessionLostError(self._why_lost)
        try:
            return await worker.request(header_of(operation, self._limits, seconds, parts), parts, seconds)
        except BaseException as error:
            if self._worker is not worker and isinstance(error, WorkerDiedError):
                raise SessionLostError(self._why_lost) from error  # we closed it ourselves meanwhile
            self._lose("the session ended mid-cell: its cell was cancelled or its worker died")
            raise

    @asynccontextmanager
    async def _our_turn(self) -> AsyncGenerator[None]:
        """Keeps the session from expiring, also while calls wait for their turn or for a worker."""
        self._wanted += 1
        if self._expiry is not None:
            self._expiry.cancel()
        try:
            async with self._turn:
                yield
        finally:
            self._wanted -= 1
            if not self._wanted and self._worker is not None:
                why = f"the session expired after {self._idle_seconds:g} s without a cell"
                self._expiry = asyncio.get_running_loop().call_later(self._idle_seconds, self._lose, why)

    def _lose(self, why: str) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self._worker is not None and self._discard is not None:
            self._worker, discard, self._discard = None, self._discard, None
            self._why_lost = why
            discard()
            self._on_close(self)

    async def close(self) -> None:
        """Stop the interpreter and delete its files and processes. Closing twice is fine."""
        self._lose("the session is closed")
        self._on_close(self)


def _cell_result(reply: WorkerReply, *, lost: bool) -> CellResult:
    display, error = _read_report(reply.extra)
    verdict, code = verdict_of(reply)
    if verdict is Verdict.OK and error is not None:
        verdict = Verdict.FAILED
    if lost and verdict is Verdict.OK:
        verdict = Verdict.FAILED
    if lost and error is None:
        error = CellError("SessionLost", f"the interpreter ended ({verdict.value}, exit code {code})", ())
    if verdict is Verdict.TIMED_OUT and error is None:
        error = CellError("TimeoutError", "the cell reached its time limit", ())
    return CellResult(
        verdict=verdict,
        stdout=reply.stdout.decode("utf-8", "backslashreplace"),
        stderr=reply.stderr.decode("utf-8", "backslashreplace"),
        display=display,
        error=error,
        truncated=bool(reply.flags & (frames.STDOUT_CUT | frames.STDERR_CUT)),
        wall_seconds=reply.wall,
        session_lost=lost,
    )


def _read_report(extra: bytes) -> tuple[tuple[dict[str, str], ...], CellError | None]:
    """Parse the interpreter's own report. The program can write anything there, so invalid content is ignored."""
    try:
        found = json.loads(extra[4:])
        if not isinstance(found, dict):
            return (), None
        answer = cast("dict[str, Any]", found)
        return _displays(answer.get("display")), _cell_error(answer.get("error"))
    except (ValueError, RecursionError):
        return (), None


def _cell_error(found: Any) -> CellError | None:
    if not isinstance(found, dict):
        return None
    values = cast("dict[str, Any]", found)
    lines = values.get("traceback")
    trace = tuple(map(_text, cast("list[Any]", lines))) if isinstance(lines, list) else ()
    return CellError(_text(values.get("ename")), _text(values.get("evalue")), trace)


def _displays(found: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(found, list):
        return ()
    bundles = [cast("dict[Any, Any]", item) for item in cast("list[Any]", found) if isinstance(item, dict)]
    return tuple({_text(kind): _text(content) for kind, content in bundle.items()} for bundle in bundles)


def _text(value: Any) -> str:
    """Escape lone surrogates, like bytes that are not UTF-8: JSON could not carry them."""
    return str(value).encode("utf-8", "backslashreplace").decode()
