"""One exchange with one server over HTTP: what was answered, or whose failure it is that nothing was."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote, urlsplit

import aiohttp
import orjson

from toolyard.errors import ConfigError, EngineError, EngineRequestError

JSON = dict[str, Any]

_AT_ONCE_BYTES = 512 * 1024
_ERROR_BYTES = 64 * 1024
_WORDS = 300
_TRY_AGAIN = frozenset({408, 425, 429})
_AWAY = frozenset({502, 503, 504})


class ServerFailedError(EngineError):
    """One try at one server failed. `gone`: the server itself seems away, not just this answer wrong."""

    def __init__(self, message: str, *, gone: bool = False, busy: bool = False, wish: float = 0.0) -> None:
        super().__init__(message)
        self.gone = gone
        self.busy = busy
        """It works, and asks for less."""
        self.wish = wish
        """Seconds it asks to be left alone."""


class RefusedError(EngineRequestError):
    """A server refused the request, in these words."""

    def __init__(self, message: str, status: int, words: str) -> None:
        super().__init__(message)
        self.status = status
        self.words = words


def permanent(message: str) -> EngineError:
    """A failure that trying again does not mend."""
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
        """POST `body`, or GET if there is none: the JSON object that is answered.

        Raises:
            RefusedError: the server refused.
            ServerFailedError: there was no answer, or none that makes sense.
            EngineError: the engine is closed, or the server's certificate is none.
        """
        content = await self._exchange(where, body, headers or {})
        try:
            found = an_object(orjson.loads(content))
        except ValueError as error:
            raise ServerFailedError(f"{where}: the answer is no JSON: {_short(content)}") from error
        if found is None:
            raise ServerFailedError(f"{where}: the answer is no JSON object: {_short(content)}")
        return found

    async def tell(self, where: str, body: JSON | None) -> None:
        """Like `ask`, to a server that has nothing to say about it."""
        await self._exchange(where, body, {})

    async def _exchange(self, where: str, body: JSON | None, headers: Mapping[str, str]) -> bytes:
        session = self._session
        if session is None:
            raise permanent(f"the engine was closed before {where} was asked")
        try:
            data = None if body is None else _payload(orjson.dumps(body))
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
            raise ServerFailedError(f"{where}: the server broke off: {error!r}", gone=True) from error
        except RuntimeError as error:
            if session.closed:
                raise permanent(f"the engine was closed before {where} answered") from error
            raise

    async def _explain(self, where: str, response: aiohttp.ClientResponse) -> EngineError:
        status = response.status
        try:
            words = _words_of(await _read(where, response, _ERROR_BYTES))
        except (ServerFailedError, aiohttp.ClientError):
            words = "its words could not be read"
        if self._api_key:
            words = words.replace(self._api_key, "***")  # servers have been seen to repeat the key they refuse
        if (status >= 500 and status != 501) or status in _TRY_AGAIN:
            wish = _retry_after(response)
            # A server that says when to come back is not away.
            busy = status == 429 or (status == 503 and wish is not None)
            return ServerFailedError(
                f"{where}: HTTP {status}: {words}", gone=status in _AWAY and not busy, busy=busy, wish=wish or 0.0
            )
        return RefusedError(f"{where} refused (HTTP {status}): {words}", status, words)


def base_url(url: str) -> str:
    """`url` without its end slash.

    Raises:
        ConfigError: it is no address of a server, or has a password or a query in it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the engine's URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"the engine's URL {url!r} is none: expected http://HOST:PORT")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"the engine's URL for {parts.hostname} may hold no user, query or fragment; use api_key")
    return url.rstrip("/")


def routing_headers(request_id: str) -> dict[str, str]:
    """`smg`, SGLang's router, keeps what has one key at one server."""
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


def _payload(body: bytes) -> bytes | io.BytesIO:
    """A large body goes in pieces: written at once it would hold up the event loop, and aiohttp warns of it."""
    return io.BytesIO(body) if len(body) > _AT_ONCE_BYTES else body


def _short(content: bytes | str) -> str:
    text = content[: 4 * _WORDS].decode("utf-8", "replace") if isinstance(content, bytes) else content
    text = " ".join(text.split())
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}…"


def _words_of(content: bytes) -> str:
    """What a server says is wrong: SGLang, vLLM, OpenAI and FastAPI each have their own place for it."""
    try:
        found: Any = orjson.loads(content)
    except ValueError:
        return _short(content)
    for _ in range(2):
        said = an_object(found)
        if said is None:
            break
        found = next((said[name] for name in ("error", "message", "detail") if said.get(name)), str(said))
    return _short(str(found))


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds. The date form of the header is not worth a clock comparison between two machines."""
    try:
        wish = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return None
    return wish if 0 <= wish < float("inf") else None
