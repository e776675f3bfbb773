"""`RemoteSandbox`: the `Sandbox` protocol over HTTP, against `toolyard sandbox serve` or any SandboxFusion server.

With our own service an `Execution` arrives exactly as it would locally, many inputs share one request, and sessions
work. A third-party server supports neither `args`, `env`, binary stdin nor sessions; using them raises. It supports no
limits but time and memory, and gets the memory limit only if you set it; a warning names other limits that you set.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from pydantic import BaseModel, ValidationError

from toolyard import settings
from toolyard.errors import ConfigError, ProgramError, SandboxError, SessionLostError, ToolyardError
from toolyard.sandbox.protocol import CellResult, Execution, Limits, Program
from toolyard.sandbox.remote.http import (
    Connections,
    HttpReply,
    Retries,
    ServerGoneError,
    explain,
    failure,
    public_error,
    ssl_context,
)
from toolyard.sandbox.remote.servers import Attempts, Server, Servers
from toolyard.sandbox.wire import cases as wire_cases
from toolyard.sandbox.wire import programs as wire
from toolyard.sandbox.wire import session as wire_session

__all__ = ["RemoteSandbox", "RemoteSession", "Retries"]

_log = logging.getLogger("toolyard.sandbox.remote")

_QUERY_BYTES = 16384
"""Per request: our server accepts headers of 64 KB, others less."""
_FILE_SECONDS = 60.0
"""For transferring a session's files: they cannot be larger than the server's request limit."""

Model = TypeVar("Model", bound=BaseModel)


class HttpSandbox:
    """Programs and sessions on `servers`. `margin_seconds`: see `RemoteSandbox`."""

    def __init__(self, servers: Servers, margin_seconds: float) -> None:
        self._servers = servers
        self._margin = margin_seconds

    async def __aenter__(self) -> Self:
        await self._servers.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._servers.close()

    async def run(self, program: Program, limits: Limits | None = None) -> Execution:
        """Run `program` on the server. See `Sandbox.run`; cancelling closes the connection, which stops the program.

        Raises:
            ProgramError: the server cannot run the program as requested.
            SandboxBusyError: the server stayed too busy to start it.
            SandboxError: the service failed, or was unreachable.
        """
        limits = limits or Limits()
        body = wire.write_request(program, limits)
        attempts = Attempts(self._servers)
        while True:
            async with attempts as server:
                return await self._run_at(server, program, body, limits)

    async def _run_at(self, server: Server, program: Program, body: bytes, limits: Limits) -> Execution:
        seconds = limits.compile_seconds + limits.run_seconds + self._margin
        reply = await server.http.call("POST", "/run_code", body, seconds=seconds)
        if reply.status != 200:
            raise explain(reply, f"{server.base}/run_code")
        response = _parse(wire.ExtendedRunCodeResponse, reply, server.base)
        if response.toolyard is None and (ignored := wire.needs_extras(program)):
            raise ProgramError(f"{server.base} is not a Toolyard service and ignored the program's {ignored}")
        if response.toolyard is None:
            server.warn_unenforced(limits)
        server.max_cases = response.toolyard.max_cases if response.toolyard else 0
        return wire.read_response(response)

    async def run_each(
        self,
        program: Program,
        stdins: Sequence[str | bytes | None],
        limits: Limits | None = None,
        *,
        batch_results: bool = False,
    ) -> AsyncGenerator[Execution]:
        """Run `program` once on each of `stdins`, in order, and yield what `run` would have returned.

        Our own service gets one request for all, as cheap as `LocalSandbox.run_each`, once its first response has shown
        that it is ours; a third-party one gets a request per input. `batch_results`: see `LocalSandbox.run_each`.
        Leaving early stops the running programs; call `aclose()`.

        Raises:
            ProgramError: also if `program` has a stdin of its own.
            SandboxError: the next run failed; earlier results are valid.
        """
        if program.stdin is not None:
            raise ProgramError("run_each: the program has a stdin of its own; pass it in stdins instead")
        limits = limits or Limits()
        done = tried = 0
        attempts = Attempts(self._servers)
        while done < len(stdins):
            if done > tried:  # the next case starts with all its attempts
                tried, attempts = done, Attempts(self._servers)
            execution = None
            async with attempts as server:
                if server.max_cases > 1 and done + 1 < len(stdins):
                    some = wire_cases.portion(stdins[done:], server.max_cases)
                    try:
                        body = wire_cases.write_request(program, some, limits, batch_results=batch_results)
                        found = run_cases(server.http, server.base, body, len(some), limits, self._margin)
                        async with aclosing(found) as executions:
                            async for case in executions:
                                done += 1
                                yield case
                    except NoCasesError:
                        server.max_cases = 0
                else:
                    one = program.model_copy(update={"stdin": stdins[done]})
                    execution = await self._run_at(server, one, wire.write_request(one, limits), limits)
            if execution is not None:
                done += 1
                yield execution

    @asynccontextmanager
    async def session(self, limits: Limits | None = None) -> AsyncGenerator[RemoteSession]:
        """Open a session on the server. If this client dies, the server closes it after its idle time.

        Raises:
            SandboxError: the server has no sessions (it is not ours), or could not open one.
        """
        limits = limits or Limits()
        attempts = Attempts(self._servers)
        while True:
            async with attempts as server:
                session = await self._open_session(server, limits)
                break
        try:
            yield session
        finally:
            await session.close()

    async def _open_session(self, server: Server, limits: Limits) -> RemoteSession:
        order = wire_session.OpenSession(limits=limits).model_dump_json().encode()
        where = f"{server.base}{wire_session.SESSIONS}"
        # The server closes idle sessions, so a session opened twice by a retry does no harm.
        reply = await server.http.call("POST", wire_session.SESSIONS, order, seconds=limits.run_seconds + self._margin)
        if reply.status in (404, 405):
            raise failure(f"{server.base} has no sessions: only `toolyard sandbox serve` does", retryable=False)
        if reply.status != 201:
            raise _session_error(reply, where)
        opened = _parse(wire_session.OpenedSession, reply, where)
        return RemoteSession(server, opened.session_id, limits, self._margin)


class RemoteSandbox(HttpSandbox):
    """A sandbox behind `url`: the base URL, the full `…/run_code` URL that verl's config has, or a list of URLs.

    With several servers, each program goes to the least loaded one. A server that fails, or misses two pings in a row
    while a program waits, is avoided for a while and its programs run elsewhere; a session stays on its server and is
    lost with it.

    `margin_seconds` is what a request may take beyond its program's own compile and run time: waiting for a worker
    and network latency. `connections` limits the requests in flight; more wait here. `ca_file` holds the certificates
    that https servers are verified against, in place of the system's.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        token: str | None = None,
        *,
        margin_seconds: float = 10.0,
        connections: int = 256,
        connect_seconds: float = 5.0,
        retries: Retries | None = None,
        ca_file: str | Path | None = None,
    ) -> None:
        bases = list(dict.fromkeys(_base_of(one) for one in ([url] if isinstance(url, str) else url)))
        if not bases:
            raise ConfigError("sandbox URL: expected at least one, got an empty list")
        token = token if token is not None else settings.sandbox_token()
        trust = ssl_context(ca_file or settings.sandbox_ca_file())

        def connect(base: str, retries: Retries) -> Connections:
            return Connections(
                base,
                token,
                limit=connections,
                connect_seconds=connect_seconds,
                retries=retries,
                pinged=len(bases) > 1,
                trust=trust,
            )

        super().__init__(Servers(bases, connect, retries=retries or Retries(), limit=connections), margin_seconds)


class RemoteSession:
    """The `Session` protocol over HTTP. Created by `RemoteSandbox.session`."""

    def __init__(self, server: Server, session_id: str, limits: Limits, margin_seconds: float) -> None:
        self._server = server
        self._path = f"{wire_session.SESSIONS}/{quote(session_id, safe='')}"
        self._where = f"{server.base}{self._path}"
        self._limits = limits
        self._margin = margin_seconds
        self._closed = False

    async def run(self, code: str, *, seconds: float | None = None) -> CellResult:
        """See `Session.run`. A cell changes the session, so it is never sent twice."""
        order = wire_session.CellOrder(code=code, seconds=seconds)
        allowed = (seconds or self._limits.run_seconds) + self._margin
        reply = await self._call("POST", "/cells", order, seconds=allowed, repeatable=False)
        try:
            return wire_session.CELL_RESULT.validate_json(reply.body)
        except ValidationError as error:
            raise failure(f"{self._where}: the server's response is invalid: {error}", retryable=False) from error

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        await self._call("PUT", "/files", wire_session.Files(files={**wire.encode_files(files)}))

    async def read_files(self, names: Sequence[str]) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for query in _queries(names):
            reply = await self._call("GET", f"/files?{query}")
            files |= wire.decode_files(_parse(wire_session.Files, reply, self._where).files)
        return files

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._server.http.call("DELETE", self._path, seconds=self._margin)
        except SandboxError as error:
            # The work is done, and the server closes idle sessions: no reason to raise.
            _log.warning("could not close %s: %s", self._where, error)

    async def _call(
        self,
        method: str,
        path: str,
        order: BaseModel | None = None,
        *,
        seconds: float = _FILE_SECONDS,
        repeatable: bool = True,
    ) -> HttpReply:
        if self._closed:
            raise SessionLostError("the session is closed")
        body = None if order is None else wire.to_json(order)
        try:
            reply = await self._server.http.call(
                method, self._path + path, body, seconds=seconds, repeatable=repeatable
            )
        except ServerGoneError as error:
            self._server.name_source(error)
            if not self._server.may_return:
                raise SessionLostError(f"the session is lost with its server: {error}") from error.__cause__
            self._server.failed(error)
            raise public_error(error) from error.__cause__
        if reply.status >= 300:
            error = _session_error(reply, self._where)
            if isinstance(error, SandboxError):
                self._server.name_source(error)
            raise error
        return reply


def _base_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"sandbox URL {url!r}: expected http://host:port, with or without /run_code")
    return url.rstrip("/").removesuffix("/run_code").rstrip("/")


def _queries(names: Sequence[str]) -> Iterator[str]:
    """Split `names` over as many queries as needed."""
    query = ""
    for name in names:
        field = urlencode([("name", name)])
        if query and len(query) + len(field) > _QUERY_BYTES:
            yield query
            query = ""
        query = f"{query}&{field}" if query else field
    if query:
        yield query


def _parse(model: type[Model], reply: HttpReply, where: str) -> Model:
    try:
        return model.model_validate_json(reply.body)
    except ValidationError as error:
        text = reply.body[:200].decode("utf-8", "replace")
        raise failure(f"{where} is not a SandboxFusion server: it responded {text!r}", retryable=False) from error


def _session_error(reply: HttpReply, where: str) -> ToolyardError:
    try:
        report = wire_session.ErrorReport.model_validate_json(reply.body)
    except ValidationError:
        return explain(reply, where)
    if report.error is None:
        return explain(reply, where)
    return wire.named_error(report.error, report.detail, retryable=report.retryable)


# Running one program on many inputs in one request, if the server supports it.


class NoCasesError(Exception):
    """The server lacks the route it had announced: an older server is behind the same address."""


async def run_cases(
    http: Connections, base: str, body: bytes, count: int, limits: Limits, margin: float
) -> AsyncGenerator[Execution]:
    """Yield an execution for each of `count` inputs, in order. `margin`: seconds beyond the program's own limits.

    Raises:
        NoCasesError: nothing was run.
        ProgramError, SandboxError: the next run failed; earlier results are valid.
    """
    where = f"{base}{wire_cases.PATH}"
    # A case whose parent process dies is run again from the start.
    seconds = 2 * limits.run_seconds + margin
    async with http.stream(wire_cases.PATH, body, seconds=limits.compile_seconds + seconds) as reply:
        if reply.status in (404, 405):
            raise NoCasesError
        if reply.lines is None:
            raise explain(reply, where)
        for number in range(count):
            line = await reply.lines.next(seconds)
            if not line:
                raise SandboxError(f"{where}: the server answered only {number} of {count} cases")
            yield wire_cases.read_line(line, where)
        await reply.lines.next(margin)  # there is none; reading the end lets the connection be reused
