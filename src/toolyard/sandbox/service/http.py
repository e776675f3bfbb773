"""The service's HTTP layer: reads bodies within limits, sends responses, and ties work to the waiting client.

Built on ASGI and independent of the sandbox. Uses no request and response classes: every execution passes through here,
and their cost would show.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

_JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")
_JSON_TYPE = re.compile(rb"\s*application/(?:json|[\w.-]+\+json)\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)
CLIENT_CLOSED_REQUEST = 499
"""Never sent, only counted: the client disconnected."""
_WATCH_AFTER_SECONDS = 0.02
"""Most programs finish before a client can disconnect; only slower ones pay for a task that watches the connection."""

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = (_JSON,)

    async def send(self, send: Send) -> None:
        """If the body was not read to its end, `Connection` reads and drops the rest."""
        length = (b"content-length", str(len(self.body)).encode())
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, length]})
        await send({"type": "http.response.body", "body": self.body})


class Refusal(Exception):  # noqa: N818 - a response, not an error
    """Ends a request with this response."""

    def __init__(self, answer: HttpResponse) -> None:
        super().__init__(answer.status)
        self.response = answer


class ClientGone(Exception):  # noqa: N818 - not an error: no one is left to report it to
    """The client disconnected. There is no one to respond to."""


def json_response(status: int, value: Any, *headers: tuple[bytes, bytes]) -> HttpResponse:
    return HttpResponse(status, json.dumps(value, separators=(",", ":")).encode(), (_JSON, *headers))


def model_response(model: BaseModel) -> HttpResponse:
    return HttpResponse(200, model.__pydantic_serializer__.to_json(model))


def detail(status: int, text: str, *headers: tuple[bytes, bytes]) -> HttpResponse:
    return json_response(status, {"detail": text}, *headers)


def try_later(status: int, text: str, *, retry_after: float = 1.0) -> HttpResponse:
    seconds = str(max(1, math.ceil(retry_after))).encode()
    return json_response(status, {"detail": text, "error": "SandboxBusyError"}, (b"retry-after", seconds))


def parse(model: type[Model], body: bytes) -> Model:
    """Raises Refusal: 422, in FastAPI's format, which SandboxFusion's clients expect."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise Refusal(_unprocessable((item["type"], item["loc"], item["msg"]) for item in problems)) from None


def invalid(problems: Iterable[tuple[tuple[str, ...], str]], kind: str = "less_than_equal") -> HttpResponse:
    """422 in the same format, for values above a maximum or for another `kind` of problem: where, and a message."""
    return _unprocessable((kind, place, text) for place, text in problems)


def _unprocessable(problems: Iterable[tuple[str, Iterable[str | int], str]]) -> HttpResponse:
    listed = [{"type": kind, "loc": ["body", *place], "msg": text} for kind, place, text in problems]
    return json_response(422, {"detail": listed})


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


class BodyBudget:
    """The memory that all request bodies together may use, from their first part until their response."""

    def __init__(self, size: int, *, busy_status: int) -> None:
        self._left = size
        self._busy_status = busy_status

    def take(self, size: int) -> None:
        """Raises Refusal: no memory left now."""
        if size > self._left:
            raise Refusal(try_later(self._busy_status, "no memory left for request bodies; try again later"))
        self._left -= size

    def give(self, size: int) -> None:
        self._left += size


class BodyReservation:
    """One request's share of the body budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = 0

    def grow(self, size: int) -> None:
        """Raises Refusal: no memory left now."""
        self._budget.take(size)
        self._size += size

    def release(self) -> None:
        self._budget.give(self._size)
        self._size = 0


def require_json(scope: Scope) -> None:
    """Raises Refusal: there is a body, and its content type is not JSON (415).

    Web pages may send HTML form types to any site; for JSON, the browser asks us first (CORS).
    """
    kind = header(scope, b"content-type")
    if kind == b"application/json" or (kind is not None and _JSON_TYPE.fullmatch(kind)):
        return
    if header(scope, b"content-length") not in (None, b"0") or header(scope, b"transfer-encoding") is not None:
        raise Refusal(unread(scope, detail(415, "the body must be JSON, with Content-Type: application/json")))


def unread(scope: Scope, answer: HttpResponse) -> HttpResponse:
    """Return `answer` adapted for a request whose body was not read."""
    if header(scope, b"expect") is None:
        return answer
    # A client that waits for "100 Continue" does not send its body after a refusal; its next bytes are a new request.
    return HttpResponse(answer.status, answer.body, (*answer.headers, CLOSE))


async def read_body(
    scope: Scope, receive: Receive, *, limit: int, seconds: float, reservation: BodyReservation
) -> bytes:
    """Read the whole body.

    Raises:
        Refusal: it is larger than `limit` bytes (413), takes longer than `seconds` to arrive (408), or there is no
            memory for it now.
        ClientGone: the client disconnected first.
    """

    def too_large() -> HttpResponse:
        return detail(413, f"the request body is larger than {limit} bytes")

    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise Refusal(unread(scope, too_large()))
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                size += len(part)
                if size > limit:
                    raise Refusal(too_large())
                reservation.grow(len(part))
                parts.append(part)
    except TimeoutError:
        raise Refusal(detail(408, f"the request body did not arrive within {seconds:g} s", CLOSE)) from None
    # Nearly every request arrives in one piece: avoid a copy.
    return parts[0] if len(parts) == 1 else b"".join(parts)


class RunningRequests:
    """Runs each request's work while its client is connected and the service is running."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._stopping = False

    def stop(self) -> None:
        """Cancel all work now; clients get a 503."""
        self._stopping = True
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    async def run(self, receive: Receive, work: Awaitable[T]) -> T:
        """Do `work`, which turns every expected failure into a response, unless the client disconnects first.

        Raises:
            ClientGone: the client disconnected; `work` was cancelled.
            Refusal: the service is stopping; `work` was cancelled.
        """
        loop = asyncio.get_running_loop()
        watcher: asyncio.Task[None] | None = None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            scope.reschedule(loop.time())

        def begin_to_watch() -> None:
            nonlocal watcher
            watcher = group.create_task(watch())

        scope = asyncio.timeout(0.0 if self._stopping else None)
        self._scopes.add(scope)
        try:
            async with scope, asyncio.TaskGroup() as group:
                later = loop.call_later(_WATCH_AFTER_SECONDS, begin_to_watch)
                try:
                    answer = await work
                finally:
                    later.cancel()
                    if watcher is not None:
                        watcher.cancel()
            return answer
        except TimeoutError:
            if gone:
                raise ClientGone from None
            raise Refusal(try_later(503, "the service is stopping")) from None
        finally:
            self._scopes.discard(scope)
