"""One HTTP exchange with one server: its answer, or an error that says whose failure it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote, urlsplit

import aiohttp
import orjson

from toolyard.errors import ConfigError, EngineError, EngineRequestError
from toolyard.failover import payload, retry_after_seconds
from toolyard.messages import JSON

_ERROR_BYTES = 64 * 1024
_WORDS = 300
_TRY_AGAIN = frozenset({408, 425, 429})
_AWAY = frozenset({502, 503, 504})


class ServerFailedError(EngineError):
    """One attempt at one server failed. `gone`: the server itself seems unavailable, not just this answer invalid."""

    def __init__(self, message: str, *, gone: bool = False, busy: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.gone = gone
        self.busy = busy
        """It works, but is overloaded."""
        self.retry_after = retry_after
        """Seconds it asks to wait."""


class RefusedError(EngineRequestError):
    """A server refused the request; `words` is its message."""

    def __init__(self, message: str, status: int, words: str) -> None:
        super().__init__(message)
        self.status = status
        self.words = words


def permanent(message: str) -> EngineError:
    """A failure that a retry does not fix."""
    error = EngineError(message)
    error.retryable = False
    return error


class Exchanges:
    """Pooled connections to any number of servers."""

    def __init__(self, *, api_key: str | None, connect_timeout: float, max_connections: int, max_bytes: int) -> None:
        self._api_key = api_key
        self._connect_timeout = connect_timeout
        self._max_connections = max_connections
        self._max_bytes = max_bytes
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            headers={} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"},
        )

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def ask(self, where: str, body: JSON | None = None, *, headers: Mapping[str, str] | None = None) -> JSON:
        """POST `body`, or GET if there is none, and return the JSON object in the answer.

        Raises:
            RefusedError: the server refused.
            ServerFailedError: there was no answer, or an invalid one.
            EngineError: the engine is closed, or the server's certificate is invalid.
        """
        content = await self._exchange(where, body, headers or {})
        try:
            found = an_object(orjson.loads(content))
        except ValueError as error:
            raise ServerFailedError(f"{where}: the answer is not JSON: {_short(content)}") from error
        if found is None:
            raise ServerFailedError(f"{where}: the answer is not a JSON object: {_short(content)}")
        return found

    async def get(self, where: str) -> bytes:
        """GET. Raises what `ask` raises."""
        return await self._exchange(where, None, {})

    async def tell(self, where: str, body: JSON | None) -> None:
        """Like `ask`, for a server that sends no answer."""
        await self._exchange(where, body, {})

    async def _exchange(self, where: str, body: JSON | None, headers: Mapping[str, str]) -> bytes:
        session = self._session
        if session is None:
            raise permanent(f"the engine was closed before {where} was asked")
        try:
            data = None if body is None else payload(orjson.dumps(body))
        except TypeError as error:
            raise EngineRequestError(f"{where}: the request cannot be written as JSON: {error}") from error
        if data is not None:
            headers = {**headers, "Content-Type": "application/json"}
        method = "GET" if data is None else "POST"
        try:
            async with session.request(method, where, data=data, headers=headers, allow_redirects=False) as response:
                if response.status >= 300:
                    raise await self._explain(where, response)
                return await _read(where, response, self._max_bytes)
        except aiohttp.ClientConnectorCertificateError as error:
            raise permanent(f"{where}: {error}") from error
        except aiohttp.ConnectionTimeoutError:
            raise ServerFailedError(f"{where}: no connection within {self._connect_timeout:g} s", gone=True) from None
        except aiohttp.ClientConnectorError as error:
            raise ServerFailedError(f"{where}: cannot connect: {error.os_error}", gone=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailedError(f"{where}: the connection broke: {error!r}", gone=True) from error
        except RuntimeError as error:
            if session.closed:
                raise permanent(f"the engine was closed before {where} answered") from error
            raise

    async def _explain(self, where: str, response: aiohttp.ClientResponse) -> EngineError:
        status = response.status
        try:
            words = _words_of(await _read(where, response, _ERROR_BYTES))
        except (ServerFailedError, aiohttp.ClientError):
            words = "its message could not be read"
        if self._api_key:
            words = words.replace(self._api_key, "***")  # some servers repeat the key they refuse
        if (status >= 500 and status != 501) or status in _TRY_AGAIN:
            retry_after = retry_after_seconds(response.headers.get("Retry-After"))
            # A server that says when to retry is not unavailable.
            busy = status == 429 or (status == 503 and retry_after is not None)
            return ServerFailedError(
                f"{where}: HTTP {status}: {words}",
                gone=status in _AWAY and not busy,
                busy=busy,
                retry_after=retry_after or 0.0,
            )
        return RefusedError(f"{where} refused (HTTP {status}): {words}", status, words)


def base_url(url: str) -> str:
    """Return `url` without its trailing slash.

    Raises:
        ConfigError: it is not a server's address, or contains a password or a query.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the engine's URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"the engine's URL {url!r} is invalid: expected http://HOST:PORT")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"the engine's URL for {parts.hostname} must not have a user, query or fragment; use api_key")
    return url.rstrip("/")


def routing_headers(request_id: str) -> dict[str, str]:
    """`smg`, SGLang's router, sends requests with the same key to one server."""
    return {"x-smg-routing-key": quote(request_id, safe="-_.:/@#+=,")}


def an_object(found: object) -> JSON | None:
    return cast("JSON", found) if isinstance(found, dict) else None


def a_list(found: object) -> list[Any] | None:
    return cast("list[Any]", found) if isinstance(found, list) else None


async def _read(where: str, response: aiohttp.ClientResponse, most: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > most:
            response.close()
            raise ServerFailedError(f"{where}: the answer is longer than {most} bytes")
        pieces.append(piece)
    return b"".join(pieces)


def _short(content: bytes | str) -> str:
    text = content[: 4 * _WORDS].decode("utf-8", "replace") if isinstance(content, bytes) else content
    text = " ".join(text.split())
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}…"


def _words_of(content: bytes) -> str:
    """Extract the server's error message: SGLang, vLLM, OpenAI and FastAPI each have their own place for it."""
    try:
        found: Any = orjson.loads(content)
    except ValueError:
        return _short(content)
    for _ in range(2):
        fields = an_object(found)
        if fields is None:
            break
        found = next((fields[name] for name in ("error", "message", "detail") if fields.get(name)), str(fields))
    return _short(str(found))
