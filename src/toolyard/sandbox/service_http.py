"""How the service speaks HTTP: bodies in under a limit, answers out, and work tied to the client that waits for it.

Knows ASGI and nothing of sandboxes. Kept free of request and response classes: this is the path of every execution,
and their cost would show.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

_JSON = (b"content-type", b"application/json")
_CLOSE = (b"connection", b"close")
CLIENT_CLOSED_REQUEST = 499
"""Never sent, only counted: the client had hung up."""
_WATCH_AFTER_SECONDS = 0.02
"""Most programs are done before anybody can hang up on them; only those that are not pay for a task that watches."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    headers: Sequence[tuple[bytes, bytes]] = (_JSON,)

    async def send(self, send: Send) -> None:
        length = (b"content-length", str(len(self.body)).encode())
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, length]})
        await send({"type": "http.response.body", "body": self.body})


class Refusal(Exception):  # noqa: N818 - an answer on its way out, not an error
    """Ends the handling of a request with this answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class ClientGone(Exception):  # noqa: N818 - nobody is left to call it an error
    """The client hung up. There is nobody to answer."""


def json_answer(status: int, value: Any, *headers: tuple[bytes, bytes]) -> Answer:
    return Answer(status, json.dumps(value, separators=(",", ":")).encode(), (_JSON, *headers))


def model_answer(model: BaseModel) -> Answer:
    return Answer(200, model.__pydantic_serializer__.to_json(model))


def detail(status: int, text: str, *headers: tuple[bytes, bytes]) -> Answer:
    return json_answer(status, {"detail": text}, *headers)


def try_later(status: int, text: str, *, retry_after: float = 1.0) -> Answer:
    seconds = str(max(1, math.ceil(retry_after))).encode()
    return json_answer(status, {"detail": text, "error": "SandboxBusyError"}, (b"retry-after", seconds))


def parse(model: type[Model], body: bytes) -> Model:
    """Raises Refusal: 422, in the shape FastAPI gives it, which is what SandboxFusion's clients know."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        listed = [{"type": item["type"], "loc": ["body", *item["loc"]], "msg": item["msg"]} for item in problems]
        raise Refusal(json_answer(422, {"detail": listed})) from None


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


def authorised(scope: Scope, token: bytes) -> bool:
    """Whether the request bears `token`; takes equally long for any wrong one."""
    return hmac.compare_digest(header(scope, b"authorization") or b"", b"Bearer " + token)


async def read_body(scope: Scope, receive: Receive, *, limit: int, seconds: float) -> bytes:
    """The whole body.

    Raises:
        Refusal: it is larger than `limit` bytes (413) or takes longer than `seconds` to arrive (408).
        ClientGone: the client hung up first.
    """
    try:
        async with asyncio.timeout(seconds):
            declared = header(scope, b"content-length")
            if declared is not None and declared.isdigit() and int(declared) > limit:
                # A client that expects "100 Continue" waits for our word before it sends: there is nothing to read.
                raise await _too_large(receive, limit, ended=header(scope, b"expect") is not None)
            message = await _next_part(receive)
            body: bytes = message.get("body", b"")
            if not message.get("more_body", False):
                # Nearly every request comes in one piece: no copy for it. It may still be over the limit.
                if len(body) > limit:
                    raise await _too_large(receive, limit, ended=True)
                return body
            return await _read_on(receive, body, limit)
    except TimeoutError:
        raise Refusal(detail(408, f"the request body did not arrive within {seconds:g} s", _CLOSE)) from None


async def _read_on(receive: Receive, start: bytes, limit: int) -> bytes:
    parts, size = [start], len(start)
    while True:
        if size > limit:
            raise await _too_large(receive, limit)
        message = await _next_part(receive)
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if not message.get("more_body", False):
            if size > limit:
                raise await _too_large(receive, limit, ended=True)
            return b"".join(parts)


async def _next_part(receive: Receive) -> Any:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


async def _too_large(receive: Receive, limit: int, *, ended: bool = False) -> Refusal:
    # Closing a connection with unread data resets it, and most clients then never see the answer. So read on a
    # little, keeping nothing, and only then give up on a client that does not stop.
    left = 2 * limit
    while not ended and left > 0:
        message = await _next_part(receive)
        left -= len(message.get("body", b""))
        ended = not message.get("more_body", False)
    return Refusal(detail(413, f"the request body is larger than {limit} bytes", _CLOSE))


class Attendance:
    """Ties work to the client that waits for it, and all work to the life of the service."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._stopping = False

    def stop(self) -> None:
        """Cancel all work now; its clients get a 503."""
        self._stopping = True
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    async def attend(self, receive: Receive, work: Awaitable[Answer]) -> Answer:
        """Do `work`, which turns every failure it expects into an answer, unless the client hangs up before.

        Raises:
            ClientGone: it hung up; `work` was cancelled.
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
