"""The page's server. It reads the dump, and writes only notes; `access` says whose requests it accepts.

A dump holds model output. It leaves here as JSON, and the page inserts it as text; should that ever fail, the content
security policy forbids scripts, styles and requests other than the page's own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Self, cast

from aiohttp import web

from toolyard.errors import ConfigError, ToolyardError
from toolyard.hosts import raise_open_files_limit
from toolyard.messages import JSON
from toolyard.records.jsonl import encode
from toolyard.viewer.query import Query, QueryError, parse_query
from toolyard.viewer.web.access import Access
from toolyard.viewer.web.answers import Answers, UnknownKeyError

_log = logging.getLogger(__name__)

STATIC = files("toolyard.viewer.web") / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LONG_POLL = 20.0
_IDLE_SECONDS = 60.0
"""Then a connection without a complete request is closed."""
_BODY_SECONDS = 20.0
_MAX_BODY = 256 << 10
REFRESH_SECONDS = 0.5

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serves one library, and follows its dump as it grows.

    async with Server(answers, host="127.0.0.1", port=0) as server:
        print(server.url)
    """

    def __init__(self, answers: Answers, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        """`token`: answer only requests whose path starts with it; see `access`.

        Raises:
            ConfigError: the token is not fit for a URL.
        """
        self._answers = answers
        self._host = host
        self._access = Access(host, token)
        self._port = port
        # Not from 0, so that pages that waited for a previous server notice that this is a new one.
        self._revision = time.time_ns() // 1_000_000
        self._changed = asyncio.Condition()
        self._ending = False
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._guard], client_max_size=_MAX_BODY)
        base = self._access.route
        app.add_routes([web.get(f"{base}/", self._page), web.get(f"{base}/static/{{name}}", self._static)])
        routes: Mapping[str, Callable[[Mapping[str, str]], Any]] = {
            "overview": self._overview,
            "rows": self._rows,
            "row": lambda asked: self._answers.detail(_text(asked, "key")),
            "tokens": lambda asked: self._answers.tokens(_text(asked, "key")),
            "raw": lambda asked: self._answers.raw(_text(asked, "key")),
            "position": lambda asked: self._answers.position(_text(asked, "key"), _query(asked)),
            "next_step": self._next_step,
            "find": lambda asked: self._answers.find(_text(asked, "id")),
            "search": self._search,
            "step": lambda asked: self._answers.step(_number(asked, "step"), _query(asked)),
            "statistics": lambda asked: self._answers.statistics(_query(asked)),
            "groups": self._groups,
            "calls": lambda asked: self._answers.calls(_query(asked)),
            "changes_between": self._changes_between,
            "suggestions": lambda asked: self._answers.suggestions(asked.get("field", ""), asked.get("part", "")),
            "compare": lambda asked: self._answers.comparison(_text(asked, "left"), _text(asked, "right")),
        }
        app.add_routes([web.get(f"{base}/api/{name}", _answering(answer)) for name, answer in routes.items()])
        app.add_routes([web.get(f"{base}/api/changes", self._changes)])
        for name, change in (("note", self._write_note), ("view", self._save_view)):
            app.add_routes([web.post(f"{base}/api/{name}", self._changing(change))])
        raise_open_files_limit()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=_IDLE_SECONDS)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, self._host, self._port)
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}; --port 0 picks a free one"
            ) from None
        self._port = self._runner.addresses[0][1]
        self._following = asyncio.create_task(self._follow(), name="follow the dump")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        async with self._changed:
            self._ending = True
            self._changed.notify_all()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """The complete URL of the page, with its token."""
        everywhere = self._host in ("0.0.0.0", "::", "")  # noqa: S104
        name = socket.gethostname() if everywhere else self._host
        return f"http://{f'[{name}]' if ':' in name else name}:{self._port}{self._access.base}"

    # Following --------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                came = await asyncio.to_thread(self._answers.library.refresh)
            except Exception as error:  # e.g. the folder is missing for a moment: it may come back
                if said != str(error):
                    said = str(error)
                    _log.warning("cannot read what was added to the dump: %s", error)
                continue
            if came:
                async with self._changed:
                    self._revision += 1
                    self._changed.notify_all()

    async def _changes(self, request: web.Request) -> web.Response:
        known = _number(request.query, "revision", 0)
        try:
            async with asyncio.timeout(_LONG_POLL), self._changed:
                await self._changed.wait_for(lambda: self._ending or self._revision != known)
        except TimeoutError:
            pass
        library = self._answers.library
        told = {
            "revision": self._revision,
            "changed": self._revision != known,
            "count": await asyncio.to_thread(library.count),
            "generation": library.generation,
        }
        return _json(told)

    # Answers ----------------------------------------------------------------------------------------------------------

    def _overview(self, asked: Mapping[str, str]) -> Any:
        return {**self._answers.overview(), "revision": self._revision}

    def _rows(self, asked: Mapping[str, str]) -> Any:
        return self._answers.rows(_query(asked), _number(asked, "offset", 0), _number(asked, "limit", 100))

    def _search(self, asked: Mapping[str, str]) -> Any:
        needle, key = _text(asked, "needle"), asked.get("from") or None
        return self._answers.search(needle, _query(asked), key, backwards=asked.get("backwards") == "1")

    def _next_step(self, asked: Mapping[str, str]) -> Any:
        backwards = asked.get("backwards") == "1"
        return self._answers.next_step(_number(asked, "step"), _query(asked), backwards=backwards)

    def _groups(self, asked: Mapping[str, str]) -> Any:
        return self._answers.groups(
            _query(asked),
            kind=asked.get("kind", ""),
            sort=asked.get("sort", ""),
            offset=_number(asked, "offset", 0),
            limit=_number(asked, "limit", 100),
        )

    def _changes_between(self, asked: Mapping[str, str]) -> Any:
        return self._answers.changes(
            _query(asked, "before"),
            _query(asked, "after"),
            kind=asked.get("kind", ""),
            offset=_number(asked, "offset", 0),
            limit=_number(asked, "limit", 100),
        )

    # Changes ----------------------------------------------------------------------------------------------------------

    def _write_note(self, given: Mapping[str, str]) -> Any:
        row = self._answers.row_of(_text(given, "key"))
        return {"note": self._answers.notes.write(row, given.get("text", ""), was=given.get("was", ""))}

    def _save_view(self, given: Mapping[str, str]) -> Any:
        notes, name = self._answers.notes, _text(given, "name")
        if "query" in given:
            notes.save_view(name, given["query"])
        else:
            notes.remove_view(name)
        return self._answers.saved()

    def _changing(self, change: Callable[[Mapping[str, str]], Any]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            if why := self._answers.notes.read_only:
                return _json({"error": why}, 403)
            given = await _body(request)
            told = await asyncio.to_thread(change, given)
            async with self._changed:  # other windows show it too
                self._revision += 1
                self._changed.notify_all()
            return _json(told)

        return handle

    # ------------------------------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.Response:
        return _file("index.html")

    async def _static(self, request: web.Request) -> web.Response:
        return _file(request.match_info["name"])

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := self._access.refusal(request):
            answer: web.StreamResponse = web.Response(text=f"{why}\n", status=403)
        else:
            try:
                answer = await handler(request)
            except QueryError as error:
                answer = _json({"error": str(error), "position": error.position}, 400)
            except UnknownKeyError as error:
                answer = _json({"error": str(error)}, 404)
            except (ToolyardError, _BadRequestError) as error:
                answer = _json({"error": str(error)}, 400)
            except web.HTTPException as error:
                answer = _json({"error": error.reason}, error.status)
            except Exception as error:  # shown on the page, so that the user can report it
                _log.exception("%s", request.path.removeprefix(self._access.base))
                answer = _json({"error": f"{type(error).__name__}: {error}"}, 500)
        answer.headers.update(_HEADERS)
        return answer


class _BadRequestError(Exception):
    pass


def _answering(answer: Callable[[Mapping[str, str]], Any]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return await asyncio.to_thread(lambda: _json(answer(request.query)))

    return handle


async def _body(request: web.Request) -> dict[str, str]:
    """The request's JSON object.

    Raises:
        HTTPException: it is too large or too slow, or is not declared as JSON, which pages of other sites cannot do.
    """
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            given: Any = await request.json()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in cast("JSON", given).values()):
        raise _BadRequestError("expected a JSON object of texts")
    return cast("dict[str, str]", given)


def _json(told: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode(told), status=status, content_type="application/json", charset="utf-8")


@cache
def _files() -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in STATIC.iterdir()}


def _file(name: str) -> web.Response:
    kind = _TYPES.get(name[name.rfind(".") :])
    if name not in _files() or kind is None:
        raise UnknownKeyError(f"there is no file {name!r}")
    return web.Response(body=_files()[name], content_type=kind, charset="utf-8")


def _query(asked: Mapping[str, str], name: str = "q") -> Query:
    return parse_query(asked.get(name, ""))


def _text(asked: Mapping[str, str], name: str) -> str:
    if not asked.get(name):
        raise _BadRequestError(f"{name}= is missing")
    return asked[name]


def _number(asked: Mapping[str, str], name: str, default: int | None = None) -> int:
    given = asked.get(name) or ("" if default is None else str(default))
    digits = given.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        raise _BadRequestError(f"{name}={given[:40]!r} is not a number")
    return int(given)
