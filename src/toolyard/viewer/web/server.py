"""The page's server: local, read-only, and accepting requests only from its own page.

A dump holds model output. It leaves here as JSON, and the page inserts it as text; should that ever fail, the content
security policy forbids scripts, styles and requests other than the page's own. Requests for another host name are
refused, so that no website can read a dump through the user's browser.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Self

from aiohttp import web

from toolyard.errors import ConfigError, ToolyardError
from toolyard.hosts import OwnNames
from toolyard.records.jsonl import encode
from toolyard.viewer.query import Query, QueryError, parse_query
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
REFRESH_SECONDS = 0.5

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serves one library, and follows its dump as it grows.

    async with Server(answers, host="127.0.0.1", port=0) as server:
        print(server.url)
    """

    def __init__(self, answers: Answers, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._answers = answers
        self._host = host
        self._names = OwnNames(host)
        self._port = port
        # Not from 0, so that pages that waited for a previous server notice that this is a new one.
        self._revision = time.time_ns() // 1_000_000
        self._changed = asyncio.Condition()
        self._ending = False
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._guard])
        app.add_routes([web.get("/", self._page), web.get("/static/{name}", self._static)])
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
        app.add_routes([web.get(f"/api/{name}", _answering(answer)) for name, answer in routes.items()])
        app.add_routes([web.get("/api/changes", self._changes)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
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
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/"

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

    async def _page(self, request: web.Request) -> web.Response:
        return _file("index.html")

    async def _static(self, request: web.Request) -> web.Response:
        return _file(request.match_info["name"])

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._is_ours(request):
            answer: web.StreamResponse = _json(
                {"error": "this server accepts requests only for its own host name"}, 403
            )
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
                _log.exception("%s", request.path)
                answer = _json({"error": f"{type(error).__name__}: {error}"}, 500)
        answer.headers.update(_HEADERS)
        return answer

    def _is_ours(self, request: web.Request) -> bool:
        """Whether the request names this server, and comes from its own page.

        Any site may link to the page: it contains no data, and requests the rest itself.
        """
        return self._names.include(request.host) and _is_from_us(request)


def _is_from_us(request: web.Request) -> bool:
    site = request.headers.get("Sec-Fetch-Site", "none")
    opened = request.path == "/" and request.headers.get("Sec-Fetch-Dest") == "document"
    return site in ("none", "same-origin") or opened


class _BadRequestError(Exception):
    pass


def _answering(answer: Callable[[Mapping[str, str]], Any]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return await asyncio.to_thread(lambda: _json(answer(request.query)))

    return handle


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
