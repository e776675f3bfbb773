"""The service's routes: translates each request for the sandbox, and each outcome for the client.

Back-pressure: a program waits at most `max_wait_seconds` for a worker, and at most `max_waiting` programs wait at once.
A program that cannot start gets 504 with Retry-After, the only status that verl's client retries instead of scoring.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from toolyard._version import __version__
from toolyard.errors import ConfigError, ProgramError, SandboxBusyError, SandboxError, SessionLostError, ToolyardError
from toolyard.sandbox import languages
from toolyard.sandbox.protocol import CellResult, Execution, Limits, Program, Session
from toolyard.sandbox.service.access import AccessControl
from toolyard.sandbox.service.cases import CasesEndpoint
from toolyard.sandbox.service.config import WIRE_NAMES, ServiceConfig, Token, exceeded_limits
from toolyard.sandbox.service.http import (
    CLIENT_CLOSED_REQUEST,
    BodyBudget,
    BodyReservation,
    ClientGone,
    HttpResponse,
    Refusal,
    RunningRequests,
    detail,
    invalid,
    json_response,
    model_response,
    parse,
    read_body,
    require_json,
    try_later,
)
from toolyard.sandbox.service.metrics import ServedStatistics, ServiceMetrics
from toolyard.sandbox.service.sessions import SessionHost, TooManySessionsError
from toolyard.sandbox.wire import cases as wire_cases
from toolyard.sandbox.wire import notebook as wire_notebook
from toolyard.sandbox.wire import programs as wire
from toolyard.sandbox.wire import session as wire_session
from toolyard.sandbox.wire import submit as wire_submit

_log = logging.getLogger("toolyard.sandbox.service")

_NO_CONTENT = HttpResponse(204, b"", ())

Ask = TypeVar("Ask")


class ServedSandbox(Protocol):
    """A sandbox that can be served: the `Sandbox` protocol, plus `start_within` and `statistics`."""

    async def run(
        self, program: Program, limits: Limits | None = None, *, start_within: float | None = None
    ) -> Execution: ...

    def session(self, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]: ...

    def statistics(self) -> ServedStatistics: ...


class Judge(Protocol):
    """Answers `POST /submit`. Implemented in `toolyard.rewards.code.submissions`; the sandbox does not judge tests."""

    async def judge(
        self,
        request: wire_submit.SubmitRequest,
        sandbox: Any,
        limits: Limits,
        *,
        workers: int,
        max_cases: int,
        patience_seconds: float,
    ) -> wire_submit.EvalResult:
        """
        Raises:
            ConfigError: the request's data is not a judgeable test suite.
            SandboxError: our failure.
        """
        ...


class SandboxService:
    """The ASGI application. The sandbox and session host must be open and outlive it. Without a judge, no /submit."""

    def __init__(
        self, config: ServiceConfig, sandbox: ServedSandbox, sessions: SessionHost, judge: Judge | None = None
    ) -> None:
        self.running = RunningRequests()
        self._config = config
        self._sandbox = sandbox
        self._sessions = sessions
        self._judge = judge
        self._access = AccessControl(config)
        self._bodies = BodyBudget(config.max_buffered_bytes, busy_status=config.busy_status)
        self._in_flight = 0
        self._max_in_flight = sandbox.statistics().workers + config.max_waiting
        self._metrics = ServiceMetrics(sandbox.statistics, lambda: self._in_flight)
        self._run_code_endpoint = _Endpoint("/run_code", self._run_code, self._metrics)
        self._app = Starlette(
            routes=self._routes(), exception_handlers={HTTPException: self._refused, Exception: self._crashed}
        )

    def admit(self, token: Token) -> None:
        """Accept another token from now on."""
        self._access.admit(token)

    def dismiss(self, client: str) -> None:
        """Refuse the client's tokens from now on, and end its sessions."""
        self._access.dismiss(client)
        self._sessions.end_all(client)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reservation = BodyReservation(self._bodies)
        try:
            client = self._access.client_of(scope)
            with self._access.counted(scope, client):
                scope["toolyard"] = _RequestContext(client, reservation)
                if scope["path"] == "/run_code" and scope["method"] == "POST":
                    # Every program takes this path; routing and middleware would add a sixth to the time spent here.
                    await self._run_code_endpoint(scope, receive, send)
                else:
                    await self._app(scope, receive, send)
        except Refusal as refusal:
            self._metrics.answered("access", refusal.response.status)
            await refusal.response.send(send)
        finally:
            reservation.release()

    def _routes(self) -> list[Route]:
        session = f"{wire_session.SESSIONS}/{{session_id}}"

        def route(method: str, path: str, act: _Act) -> Route:
            return Route(path, _Endpoint(path, act, self._metrics), methods=[method])

        return [
            Route("/run_code", self._run_code_endpoint, methods=["POST"]),
            Route(wire_cases.PATH, self._cases_endpoint(), methods=["POST"]),
            route("POST", "/run_jupyter", self._run_jupyter),
            *([route("POST", "/submit", partial(self._submit, self._judge))] if self._judge else ()),
            route("GET", "/v1/ping", self._ping),
            route("GET", "/healthz", self._health),
            route("GET", "/metrics", self._expose),
            route("POST", wire_session.SESSIONS, self._open_session),
            route("DELETE", session, self._end_session),
            route("POST", f"{session}/cells", self._run_cell),
            route("PUT", f"{session}/files", self._write_files),
            route("GET", f"{session}/files", self._read_files),
        ]

    def _cases_endpoint(self) -> CasesEndpoint:
        async def read(scope: Scope, receive: Receive) -> wire_cases.RunCasesRequest:
            request = parse(wire_cases.RunCasesRequest, await self._body(scope, receive))
            self._check_program(request)
            return request

        async def admit(receive: Receive, act: Callable[[], Awaitable[HttpResponse]]) -> HttpResponse:
            return await self._run_admitted(receive, lambda _: act(), None)

        return CasesEndpoint(
            self._sandbox,
            limits=self._config.limits,
            max_cases=self._config.max_cases,
            max_wait_seconds=self._config.max_wait_seconds,
            read=read,
            admit=admit,
            busy=self._busy,
            as_toolyard_error=self._as_toolyard_error,
            metrics=self._metrics,
        )

    async def _run_code(self, scope: Scope, receive: Receive) -> HttpResponse:
        request = parse(wire.RunCodeRequest, await self._body(scope, receive))
        self._check_program(request)
        return await self._run_admitted(receive, self._execute, request)

    async def _execute(self, request: wire.RunCodeRequest) -> HttpResponse:
        extended = request.toolyard is not None
        try:
            program, limits = wire.read_request(request, self._config.limits)
            execution = await self._sandbox.run(program, limits, start_within=self._config.max_wait_seconds)
        except SandboxBusyError as busy:
            return self._busy(busy)
        except Exception as error:
            return model_response(wire.write_failure(self._as_toolyard_error(error), extended=extended))
        # Only languages that ran become labels, so clients cannot fill the metrics with made-up names.
        self._metrics.executed(program.language, execution)
        return model_response(wire.write_response(execution, extended=extended, max_cases=self._config.max_cases))

    async def _submit(self, judge: Judge, scope: Scope, receive: Receive) -> HttpResponse:
        request = parse(wire_submit.SubmitRequest, await self._body(scope, receive))
        asked = {"run_seconds": request.config.run_timeout, "compile_seconds": request.config.compile_timeout}
        asked = {name: seconds for name, seconds in asked.items() if seconds is not None}
        self._check_limits(asked)
        return await self._run_admitted(
            receive, partial(self._judged, judge, self._config.limits.model_copy(update=asked)), request
        )

    async def _judged(self, judge: Judge, limits: Limits, request: wire_submit.SubmitRequest) -> HttpResponse:
        try:
            result = await judge.judge(
                request,
                self._sandbox,
                limits,
                workers=self._sandbox.statistics().workers,
                max_cases=self._config.max_cases,
                patience_seconds=self._config.max_wait_seconds,
            )
            return model_response(result)
        except SandboxBusyError as busy:
            return self._busy(busy)
        except ConfigError as error:
            return invalid([(("config",), str(error))], "value_error")
        except Exception as error:
            return detail(500, str(self._as_toolyard_error(error)))

    async def _run_jupyter(self, scope: Scope, receive: Receive) -> HttpResponse:
        request = parse(wire_notebook.RunJupyterRequest, await self._body(scope, receive))
        self._check_seconds("total_timeout", request.total_timeout)
        self._check_files(request.files, request.fetch_files)
        return await self._run_admitted(receive, self._run_notebook, request)

    async def _run_notebook(self, request: wire_notebook.RunJupyterRequest) -> HttpResponse:
        try:
            wire_notebook.check_kernel(request)
            return model_response(await self._notebook(request, wire.decode_files(request.files)))
        except SandboxBusyError as busy:
            return self._busy(busy)
        except Exception as error:
            return model_response(wire_notebook.write_notebook_failure(self._as_toolyard_error(error)))

    async def _notebook(
        self, request: wire_notebook.RunJupyterRequest, files: dict[str, bytes]
    ) -> wire_notebook.RunJupyterResponse:
        clock = asyncio.get_running_loop().time
        limits = self._config.limits.model_copy(update={"run_seconds": request.total_timeout})
        results: list[CellResult] = []
        fetched: dict[str, bytes] = {}
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._config.max_wait_seconds):
                    session = await stack.enter_async_context(self._sandbox.session(limits))
            except TimeoutError:
                raise SandboxBusyError(f"no session opened within {self._config.max_wait_seconds:g} s") from None
            started = clock()
            if files:
                await session.write_files(files)
            lost = False
            for code in request.cells:
                left = request.total_timeout - (clock() - started)
                if left <= 0 or lost:
                    break
                results.append(await session.run(code, seconds=min(left, request.cell_timeout or left)))
                self._metrics.ran_cell(results[-1])
                lost = results[-1].session_lost
            seconds = clock() - started
            if request.fetch_files and not lost:
                fetched = await session.read_files(request.fetch_files)
        out_of_time = not lost and len(results) < len(request.cells)
        return wire_notebook.write_notebook(results, seconds=seconds, out_of_time=out_of_time, files=fetched)

    async def _open_session(self, scope: Scope, receive: Receive) -> HttpResponse:
        request = parse(wire_session.OpenSession, await self._body(scope, receive) or b"{}")
        if request.limits is not None:
            self._check_limits(dict(request.limits), "limits")

        async def act() -> HttpResponse:
            hosted = await self._sessions.open(
                request.limits or self._config.limits,
                client=_context(scope).client,
                idle_seconds=request.idle_seconds,
                start_within=self._config.max_wait_seconds,
            )
            opened = wire_session.OpenedSession(session_id=hosted.id, idle_seconds=hosted.idle_seconds)
            return HttpResponse(201, opened.model_dump_json().encode())

        return await self._run_session_request(receive, act)

    async def _run_cell(self, scope: Scope, receive: Receive) -> HttpResponse:
        order = parse(wire_session.CellOrder, await self._body(scope, receive))
        if order.seconds is not None:
            self._check_seconds("seconds", order.seconds)
        session_id = _session_id(scope)

        async def act() -> HttpResponse:
            async with self._sessions.lend(session_id) as session:
                result = await session.run(order.code, seconds=order.seconds)
            self._metrics.ran_cell(result)
            if result.session_lost:
                await self._sessions.end(session_id)
            return HttpResponse(200, wire_session.CELL_RESULT.dump_json(result))

        return await self._run_session_request(receive, act)

    async def _write_files(self, scope: Scope, receive: Receive) -> HttpResponse:
        order = parse(wire_session.Files, await self._body(scope, receive))
        self._check_files(order.files, ())

        async def act() -> HttpResponse:
            files = wire.decode_files(order.files)
            async with self._sessions.lend(_session_id(scope)) as session:
                await session.write_files(files)
            return _NO_CONTENT

        return await self._run_session_request(receive, act)

    async def _read_files(self, scope: Scope, receive: Receive) -> HttpResponse:
        names = parse_qs(scope["query_string"].decode("latin-1")).get("name", [])
        self._check_files({}, names)

        async def act() -> HttpResponse:
            async with self._sessions.lend(_session_id(scope)) as session:
                files = await session.read_files(names)
            return model_response(wire_session.Files(files={**wire.encode_files(files)}))

        return await self._run_session_request(receive, act)

    async def _end_session(self, scope: Scope, receive: Receive) -> HttpResponse:
        await self._sessions.end(_session_id(scope))
        return _NO_CONTENT

    async def _ping(self, scope: Scope, receive: Receive) -> HttpResponse:
        return json_response(200, "pong")

    async def _health(self, scope: Scope, receive: Receive) -> HttpResponse:
        now = self._sandbox.statistics()
        report = {
            "status": "ok",
            "service": "toolyard",
            "version": __version__,
            "isolation": now.isolation,
            "in_flight": self._in_flight,
            "pool": {
                "workers": now.workers,
                "busy": now.busy,
                "waiting": now.waiting,
                "sessions": now.sessions,
                "zygotes": dict(now.zygotes),
            },
        }
        return json_response(200, report)

    async def _expose(self, scope: Scope, receive: Receive) -> HttpResponse:
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return HttpResponse(200, self._metrics.exposition(), (kind,))

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        require_json(scope)
        config, reservation = self._config, _context(scope).reservation
        return await read_body(
            scope, receive, limit=config.max_request_bytes, seconds=config.max_request_seconds, reservation=reservation
        )

    def _check_program(self, request: wire.RunCodeRequest) -> None:
        """Raises Refusal: the program asks for more than this server allows."""
        # A client that sends `toolyard` is ours: it gets the error that an embedded sandbox would have raised.
        if request.toolyard is None and (why := languages.refuse_unknown(request.language)):
            raise Refusal(invalid([(("language",), why)], "literal_error"))
        self._check_files(request.files, request.fetch_files)
        exact = request.toolyard is not None and request.toolyard.limits is not None
        self._check_limits(wire.asked_limits(request), *(("toolyard", "limits") if exact else ()))

    def _check_limits(self, asked: Mapping[str, Any], *within: str) -> None:
        found = [
            ((*within, name) if within else (WIRE_NAMES[name],), message)
            for name, message in exceeded_limits(asked, self._config.max_limits)
        ]
        if found:
            raise Refusal(invalid(found))

    def _check_seconds(self, name: str, seconds: float) -> None:
        most = self._config.max_limits.run_seconds
        if seconds > most:
            text = f"{name} is {seconds:g} s; this server allows at most {most:g} s"
            raise Refusal(invalid([((name,), text)]))

    def _check_files(self, files: Mapping[str, str | None], names: Sequence[str]) -> None:
        config = self._config
        size = sum(len(content or "") for content in files.values()) * 3 // 4
        if max(len(files), len(names)) > config.max_files or size > config.max_file_bytes:
            sent = f"{len(files)} files of {size} bytes and {len(names)} files to fetch"
            most = f"at most {config.max_files} files of {config.max_file_bytes} bytes together"
            raise Refusal(detail(413, f"the request has {sent}; this server accepts {most}"))

    async def _run_admitted(
        self, receive: Receive, act: Callable[[Ask], Awaitable[HttpResponse]], ask: Ask
    ) -> HttpResponse:
        if self._in_flight >= self._max_in_flight:
            return self._busy(SandboxBusyError(f"{self._config.max_waiting} programs are already waiting"))
        self._in_flight += 1
        try:
            return await self.running.run(receive, act(ask))
        finally:
            self._in_flight -= 1

    async def _run_session_request(self, receive: Receive, act: Callable[[], Awaitable[HttpResponse]]) -> HttpResponse:
        """Run a session request: no queue, and failures are HTTP errors, since SandboxFusion clients never see them."""

        async def work() -> HttpResponse:
            try:
                return await act()
            except SandboxBusyError as busy:
                return self._busy(busy)
            except Exception as error:
                ours = self._as_toolyard_error(error)
                status = 400 if isinstance(ours, ProgramError) else 404 if isinstance(ours, SessionLostError) else 500
                report = wire_session.ErrorReport(detail=str(ours), error=type(ours).__name__, retryable=ours.retryable)
                return HttpResponse(status, report.model_dump_json().encode())

        return await self.running.run(receive, work())

    def _busy(self, busy: SandboxBusyError) -> HttpResponse:
        self._metrics.failed(busy)
        status = 429 if isinstance(busy, TooManySessionsError) else self._config.busy_status
        return try_later(status, str(busy), retry_after=busy.retry_after or 1.0)

    def _as_toolyard_error(self, error: Exception) -> ToolyardError:
        self._metrics.failed(error)
        if isinstance(error, ToolyardError):
            return error
        _log.error("a request failed unexpectedly", exc_info=error)
        return SandboxError(f"internal error: {error!r}")

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self._metrics.answered("none", error.status_code)
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)

    async def _crashed(self, request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": "internal error"}, 500)


_Act = Callable[[Scope, Receive], Awaitable[HttpResponse]]


class _Endpoint:
    """One route as an ASGI application: counts and sends the response of `act`."""

    def __init__(self, route: str, act: _Act, metrics: ServiceMetrics) -> None:
        self._route = route
        self._act = act
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._act(scope, receive)
        except Refusal as refusal:
            answer = refusal.response
        except ClientGone:
            self._metrics.answered(self._route, CLIENT_CLOSED_REQUEST)
            return
        self._metrics.answered(self._route, answer.status)
        await answer.send(send)


@dataclass(slots=True)
class _RequestContext:
    """What is known about an admitted request."""

    client: str
    reservation: BodyReservation


def _context(scope: Scope) -> _RequestContext:
    return scope["toolyard"]


def _session_id(scope: Scope) -> str:
    return scope["path_params"]["session_id"]
