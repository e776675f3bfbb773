"""How `RemoteSandbox` speaks HTTP: pooled connections, deadlines, and retries where they are safe.

Safe means that the request cannot have been processed: no connection was established, an idle connection turned out to
be closed, or the server said that it is too busy. A timeout or a connection that broke mid-request is not safe: those
are reported, and `retryable` tells callers that they may decide otherwise.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import aiohttp

from toolyard.errors import ConfigError, ProgramError, SandboxBusyError, SandboxClosedError, SandboxError
from toolyard.failover import payload, retry_after_seconds
from toolyard.sandbox.remote.health import PING_SECONDS, Health

_BUSY = frozenset({429, 503, 504})
_IDLE_SECONDS = 4.0
"""uvicorn, which SandboxFusion uses, closes idle connections after 5 s. Closing ours first avoids the race."""
_STALE_SECONDS = 1.0
"""A reused connection that was already closed fails within a round trip. Later failures happened during the request."""
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Retries:
    """How often to retry before giving up."""

    attempts: int = 5
    """Per server, if there are several."""
    seconds: float = 60.0
    """No attempt starts later than this after the first, regardless of Retry-After."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    status: int
    body: bytes
    retry_after: float | None
    lines: ResponseLines | None = None
    """Replaces the body if lines were requested and the status is 200."""


class ServerGoneError(SandboxError):
    """The server was unreachable, broke the connection or fell silent. Whether it processed the request is unknown."""


class _NotSentError(ServerGoneError):
    """The request cannot have reached the server's application: retrying is safe."""


def failure(message: str, *, retryable: bool) -> SandboxError:
    error = SandboxError(message)
    error.retryable = retryable
    return error


def public_error(error: ServerGoneError) -> SandboxError:
    """Convert it to the public error type."""
    known = failure(str(error), retryable=True)
    known.source = error.source
    return known


def ssl_context(ca_file: str | Path | None) -> ssl.SSLContext | bool:
    """An SSL context that verifies certificates against `ca_file`; None: against the system's.

    Raises:
        ConfigError: the file cannot be read, or contains no certificates.
    """
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"CA file {str(ca_file)!r}: {error.strerror or error}") from error


class Connections:
    """A pool of connections to one server. Opened and closed in one task, used from any task of its loop.

    `pinged`: while a request waits, ping the server now and then, and give up if it misses two pings.
    """

    def __init__(
        self,
        base: str,
        token: str | None,
        *,
        limit: int,
        connect_seconds: float,
        retries: Retries,
        pinged: bool = False,
        trust: ssl.SSLContext | bool = True,
    ) -> None:
        self._base = base
        self._trust = trust
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._limit = limit
        self._connect_seconds = connect_seconds
        self._retries = retries
        self._health = Health(self._ping) if pinged else None
        self._session: aiohttp.ClientSession | None = None
        self._abandoned = False

    async def open(self) -> None:
        self._slots = asyncio.Semaphore(self._limit)
        traces = aiohttp.TraceConfig()
        traces.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            # Our own semaphore is the limit: time spent waiting for a connection is not the server's fault and must
            # not count toward its deadline.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=self._trust),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
            headers=self._headers,
            trace_configs=[traces],
        )

    async def close(self) -> None:
        if self._health is not None:
            await self._health.close()
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def abandon(self) -> None:
        """The server is gone for good: requests, also later ones, fail with `ServerGoneError`."""
        self._abandoned = True
        if self._health is not None:
            self._health.lose()
        await self.close()

    async def call(
        self, method: str, path: str, body: bytes | None = None, *, seconds: float, repeatable: bool = True
    ) -> HttpReply:
        """Return the server's reply, after as many attempts as needed and `Retries` allows.

        `repeatable`: processing the request twice does no harm. Then busy replies, which a proxy might give after the
        fact, and broken idle connections may be retried too.

        Raises:
            SandboxBusyError: the server stayed busy.
            SandboxError: it was unreachable, broke the connection, or did not answer an attempt within `seconds`.
        """

        async def once() -> HttpReply:
            where, connection = f"{self._base}{path}", SimpleNamespace(reused_at=None)
            with self._translated_errors(where, seconds, connection, repeatable=repeatable):
                async with (
                    self._slots,
                    self._waiting(seconds),
                    self._opened().request(
                        method, where, data=payload(body), allow_redirects=False, trace_request_ctx=connection
                    ) as response,
                ):
                    return await _whole_reply(response)

        return await self._with_retries(once, path, repeatable=repeatable)

    @asynccontextmanager
    async def stream(self, path: str, body: bytes, *, seconds: float) -> AsyncGenerator[HttpReply]:
        """Reply to a repeatable POST: line by line if its status is 200, otherwise in one piece.

        It starts within `seconds` of an attempt. Leaving before the last line closes the connection, which the server
        notices. Raises what `call` raises.
        """
        async with AsyncExitStack() as open_until_left:

            async def once() -> HttpReply:
                where, connection = f"{self._base}{path}", SimpleNamespace(reused_at=None)
                with self._translated_errors(where, seconds, connection, repeatable=True):
                    async with AsyncExitStack() as opened:
                        await opened.enter_async_context(self._slots)
                        async with self._waiting(seconds):
                            response = await opened.enter_async_context(
                                self._opened().post(
                                    where, data=payload(body), allow_redirects=False, trace_request_ctx=connection
                                )
                            )
                            if response.status != 200:
                                return await _whole_reply(response)
                        open_until_left.push_async_exit(opened.pop_all())
                        return HttpReply(200, b"", None, ResponseLines(response, where, self._waiting))

            yield await self._with_retries(once, path, repeatable=True)

    async def _with_retries(
        self, once: Callable[[], Awaitable[HttpReply]], path: str, *, repeatable: bool
    ) -> HttpReply:
        clock = asyncio.get_running_loop().time
        begun = clock()
        attempt = 0
        while True:
            attempt += 1
            problem: SandboxError
            try:
                reply = await once()
            except _NotSentError as error:
                problem, least = error, None
            else:
                if reply.status not in _BUSY:
                    return reply
                problem = SandboxBusyError(
                    f"{self._base}{path}: the server is busy (HTTP {reply.status})",
                    retry_after=reply.retry_after,
                )
                least = reply.retry_after
                if not repeatable:
                    raise problem
            delay = delay_before(attempt, least)
            if attempt >= self._retries.attempts or clock() - begun + delay > self._retries.seconds:
                problem.args = (f"{problem} ({attempt} tries)" if attempt > 1 else str(problem),)
                raise problem if isinstance(problem, SandboxBusyError) else ServerGoneError(*problem.args)
            await asyncio.sleep(delay)

    @asynccontextmanager
    async def _waiting(self, seconds: float) -> AsyncGenerator[None]:
        """
        Raises:
            TimeoutError: the server has not answered within `seconds`.
            ServerGoneError: it missed two pings, or one if it was already lost.
        """
        health = self._health
        if health is None:
            async with asyncio.timeout(seconds):
                yield
            return
        if health.lost and not await health.is_back():
            raise _NotSentError(f"{self._base}: still does not answer pings")
        try:
            async with asyncio.timeout(seconds) as deadline:
                with health.watch(deadline):
                    yield
        except TimeoutError:
            if health.lost:
                why = "is gone" if self._abandoned else "stopped answering and missed two pings"
                raise ServerGoneError(f"{self._base} {why}") from None
            raise

    async def _ping(self) -> bool:
        """Both our service and SandboxFusion have this route. For other servers, even a 404 is an answer."""
        unused = SimpleNamespace(reused_at=None)
        where = f"{self._base}/v1/ping"
        try:
            async with (
                asyncio.timeout(PING_SECONDS),
                self._opened().get(where, allow_redirects=False, trace_request_ctx=unused) as response,
            ):
                return response.status < 500
        except (TimeoutError, aiohttp.ClientError):
            return False

    def _opened(self) -> aiohttp.ClientSession:
        if self._abandoned:
            raise ServerGoneError(f"{self._base} is gone")
        if self._session is None:
            raise SandboxClosedError(f"the sandbox at {self._base} is not open: use `async with RemoteSandbox(…)`")
        return self._session

    @contextmanager
    def _translated_errors(
        self, where: str, seconds: float, connection: SimpleNamespace, *, repeatable: bool
    ) -> Generator[None]:
        """Convert whatever goes wrong in one attempt to our errors."""
        clock = asyncio.get_running_loop().time
        session = self._opened()
        try:
            yield
        except aiohttp.ConnectionTimeoutError:
            raise _NotSentError(f"{where}: no connection within {self._connect_seconds:g} s") from None
        except TimeoutError:
            raise failure(f"{where}: no answer within {seconds:g} s", retryable=True) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise failure(f"{where}: {error}", retryable=False) from error
        except aiohttp.ClientConnectorError as error:
            raise _NotSentError(f"{where}: cannot connect: {error.os_error}") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            stale = connection.reused_at is not None and clock() - connection.reused_at < _STALE_SECONDS
            if stale and repeatable:
                raise _NotSentError(f"{where}: an idle connection was closed by the server") from error
            raise ServerGoneError(f"{where}: the server broke the connection: {error}") from error
        except aiohttp.ClientError as error:
            raise ServerGoneError(f"{where}: {error!r}") from error
        except RuntimeError as error:
            if self._abandoned:
                raise ServerGoneError(f"{self._base} is gone") from error
            if session.closed:
                raise SandboxClosedError(f"the sandbox at {self._base} was closed during the request") from error
            raise


class ResponseLines:
    """The lines of a streamed response."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        where: str,
        waiting: Callable[[float], AbstractAsyncContextManager[None]],
    ) -> None:
        self._response = response
        self._where = where
        self._waiting = waiting
        self._buffer = bytearray()

    async def next(self, seconds: float) -> bytes:
        """Return the next line, or b"" after the last.

        Raises:
            SandboxError: it did not arrive within `seconds`, or the server broke the connection.
        """
        end = self._buffer.find(b"\n")
        try:
            if end < 0:
                async with self._waiting(seconds):
                    while end < 0:
                        seen = len(self._buffer)
                        # Not `readline`, which refuses long lines.
                        chunk = await self._response.content.readany()
                        if not chunk:
                            return b""
                        self._buffer += chunk
                        end = self._buffer.find(b"\n", seen)
        except TimeoutError:
            raise failure(f"{self._where}: no answer within {seconds:g} s", retryable=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGoneError(f"{self._where}: the server broke the connection: {error!r}") from error
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        return line


def explain(reply: HttpReply, where: str) -> SandboxError | ProgramError:
    """The error for a reply that is neither a success nor busy, if nothing more specific is known."""
    text = reply.body[:500].decode("utf-8", "replace")
    if reply.status in (400, 413, 422):
        return ProgramError(f"{where} refused the request (HTTP {reply.status}): {text}")
    if reply.status in (401, 403):
        return failure(f"{where} requires a valid token (HTTP {reply.status}): {text}", retryable=False)
    if reply.status in (415, 421, 431):
        return failure(f"{where} refused the request (HTTP {reply.status}): {text}", retryable=False)
    if 300 <= reply.status < 500:
        return failure(f"{where} is not a SandboxFusion server (HTTP {reply.status}): {text}", retryable=False)
    return failure(f"{where} failed (HTTP {reply.status}): {text}", retryable=True)


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, _: object) -> None:
    context.trace_request_ctx.reused_at = asyncio.get_running_loop().time()


async def _whole_reply(response: aiohttp.ClientResponse) -> HttpReply:
    body = await response.read()
    return HttpReply(response.status, body, retry_after_seconds(response.headers.get("Retry-After")))


def delay_before(attempt: int, least: float | None) -> float:
    """Exponential with full jitter, so that clients refused together do not all come back at once."""
    return (least or 0.0) + _random.uniform(0, min(_LONGEST_DELAY, _FIRST_DELAY * 2**attempt))
