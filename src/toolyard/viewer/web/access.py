"""Who may use the page's server: requests for its own name, from its own page, and with its token if it has one.

The token is the first part of the path, so it is in every request of the page and nowhere else: not in a cookie, which
a browser would also send to other servers on the same machine, and not in `Referer`, which the page forbids.
"""

from __future__ import annotations

import re
import secrets

from aiohttp import web

from toolyard.errors import ConfigError
from toolyard.hosts import OwnNames, Secrets

_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Access:
    def __init__(self, host: str, token: str | None) -> None:
        """
        Raises:
            ConfigError: the token cannot be part of a URL, or is easily guessed.
        """
        if token is not None and not _TOKEN.fullmatch(token):
            raise ConfigError("the viewer's token must have 16 to 128 characters from A-Z, a-z, 0-9, - and _")
        self.base = f"/{token}/" if token else "/"
        """The path of the page; all others are below it."""
        self._names = OwnNames(host)
        self._tokens = Secrets()
        if token:
            self._tokens.add(token.encode(), "viewer")

    @property
    def route(self) -> str:
        """The start of all routes."""
        return "/{token}" if self._tokens else ""

    def refusal(self, request: web.Request) -> str | None:
        """Why the request is refused; None if it is not."""
        if len(request.headers.getall("Host", [])) > 1 or not self._names.include(request.host):
            return "this server accepts requests only for its own host name"
        given = request.path.removeprefix("/").partition("/")[0]
        if self._tokens and self._tokens.holder_of(given.encode("utf-8", "replace")) is None:
            return "this page needs its complete URL, with the token: use the one that `toolyard view --web` printed"
        if not self._is_from_us(request):
            return "this server accepts requests only from its own page"
        return None

    def _is_from_us(self, request: web.Request) -> bool:
        """Whether it comes from this page, or from no page at all.

        Any site may link to the page: it contains no data, and requests the rest itself.
        """
        origin = request.headers.get("Origin")
        if origin is not None and not (
            self._names.include_origin(origin) and origin.partition("://")[2].lower() == request.host.lower()
        ):
            return False
        site = request.headers.get("Sec-Fetch-Site", "none")
        opened = request.path == self.base and request.headers.get("Sec-Fetch-Dest") == "document"
        return site in ("none", "same-origin") or (opened and request.method == "GET")
