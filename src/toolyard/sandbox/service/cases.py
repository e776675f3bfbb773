"""`POST /run_cases`: runs one program on many inputs and sends one line per result as soon as it is known.

Our own route; SandboxFusion has none like it. Errors known before the first line get an HTTP status. Later errors are
sent as the last line, because the status has already been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, runtime_checkable

from starlette.types import Receive, Scope, Send

from toolyard.errors import SandboxBusyError, SandboxError, ToolyardError
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program
from toolyard.sandbox.service.http import CLIENT_CLOSED_REQUEST, ClientGone, HttpResponse, Refusal, detail
from toolyard.sandbox.service.metrics import ServiceMetrics
from toolyard.sandbox.wire import cases as wire_cases

_LINES = (b"content-type", b"application/x-ndjson")
_IN_LINES = HttpResponse(200, b"")
"""Marks a response whose lines have already been sent."""
_MAX_BUFFERED_BYTES = 8 * MIB
"""Bytes of lines that a slow client has not read yet. Beyond it, its cases wait."""


class RunsProgram(Protocol):
    async def run(
        self, program: Program, limits: Limits | None = None, *, start_within: float | None = None
    ) -> Execution: ...


@runtime_checkable
class RunsEachInTime(Protocol):
    """A sandbox that runs one program on many inputs more cheaply than one by one, with a bounded wait."""

    def run_each(
        self,
        program: Program,
        stdins: Sequence[wire_cases.Input],
        limits: Limits | None = None,
        *,
        start_within: float | None = None,
        batch_results: bool = False,
    ) -> AsyncGenerator[Execution]: ...


class LineStream:
    """A streamed response: each line is sent as soon as possible, together with others that are ready by then."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        """Lines have been sent: too late for any other response."""
        self._send = send
        self._held: list[bytes] = []
        self._size = 0
        self._over = False
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    async def put(self, line: bytes) -> None:
        self._held.append(line)
        self._size += len(line)
        self._changed.set()
        while self._size > _MAX_BUFFERED_BYTES:
            self._taken.clear()
            await self._taken.wait()

    def close(self) -> None:
        """No more lines will follow."""
        self._over = True
        self._changed.set()

    async def send_until_closed(self) -> None:
        """Send lines until `close` is called and all are sent."""
        while self._held or not self._over:
            await self._changed.wait()
            self._changed.clear()
            if self._held:
                await self._begin()
                content, self._held, self._size = b"".join(self._held), [], 0
                self._taken.set()
                await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": last})

    async def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [_LINES]})


Admit = Callable[[Receive, Callable[[], Awaitable[HttpResponse]]], Awaitable[HttpResponse]]
"""Does the work if there is capacity, as long as the client stays connected."""


class CasesEndpoint:
    """The route as an ASGI application."""

    def __init__(
        self,
        sandbox: RunsProgram,
        *,
        limits: Limits,
        max_cases: int,
        max_wait_seconds: float,
        read: Callable[[Scope, Receive], Awaitable[wire_cases.RunCasesRequest]],
        admit: Admit,
        busy: Callable[[SandboxBusyError], HttpResponse],
        as_toolyard_error: Callable[[Exception], ToolyardError],
        metrics: ServiceMetrics,
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._max_cases = max_cases
        self._within = max_wait_seconds
        self._read, self._admit, self._busy, self._as_toolyard_error = read, admit, busy, as_toolyard_error
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lines, extended = LineStream(send), False
        try:
            request = await self._read(scope, receive)
            extended = request.toolyard is not None
            answer = await self._admit(receive, lambda: self._answer(request, lines))
            last = b""
        except Refusal as refusal:
            answer = refusal.response
            last = wire_cases.write_failure(SandboxError("the service is stopping"), extended=extended)
        except ClientGone:
            self._metrics.answered(wire_cases.PATH, CLIENT_CLOSED_REQUEST)
            return
        if answer is _IN_LINES or lines.begun:
            self._metrics.answered(wire_cases.PATH, 200)
            await lines.end(last)
        else:
            self._metrics.answered(wire_cases.PATH, answer.status)
            await answer.send(send)

    async def _answer(self, request: wire_cases.RunCasesRequest, lines: LineStream) -> HttpResponse:
        count = len(request.stdins)
        if count > self._max_cases:
            return detail(
                413, f"stdins: {count} cases; this server accepts at most {self._max_cases} at once (max_cases)"
            )
        busy: SandboxBusyError | None = None
        async with asyncio.TaskGroup() as group:
            group.create_task(lines.send_until_closed())
            try:
                await self._run(request, lines)
            except Exception as error:
                if isinstance(error, SandboxBusyError) and not lines.begun:
                    busy = error
                else:
                    extended = request.toolyard is not None
                    await lines.put(wire_cases.write_failure(self._as_toolyard_error(error), extended=extended))
            finally:
                lines.close()
        return _IN_LINES if busy is None else self._busy(busy)

    async def _run(self, request: wire_cases.RunCasesRequest, lines: LineStream) -> None:
        program, stdins, limits = wire_cases.read_request(request, self._limits)
        async with aclosing(self._executions(program, stdins, limits, request.batch_results)) as executions:
            async for execution in executions:
                self._metrics.executed(program.language, execution)
                await lines.put(wire_cases.write_line(execution, extended=request.toolyard is not None))

    async def _executions(
        self, program: Program, stdins: Sequence[wire_cases.Input], limits: Limits, batch_results: bool
    ) -> AsyncGenerator[Execution]:
        if isinstance(self._sandbox, RunsEachInTime):
            found = self._sandbox.run_each(
                program, stdins, limits, start_within=self._within, batch_results=batch_results
            )
            async with aclosing(found) as executions:
                async for execution in executions:
                    yield execution
            return
        for stdin in stdins:
            case = program.model_copy(update={"stdin": stdin})
            yield await self._sandbox.run(case, limits, start_within=self._within)
