"""Who may come in: a request under a name of ours, from no foreign page, with a token, and not too many at once.

Decided from the headers alone, before a byte of the body is read.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from starlette.types import Scope

from toolyard.hosts import OwnNames
from toolyard.sandbox.service.config import ServiceConfig
from toolyard.sandbox.service.http import Refusal, detail, header, try_later, unread

_OPEN_PATHS = frozenset({"/v1/ping", "/healthz"})
"""Answered without a token: probes of a load balancer have none, and learn nothing worth hiding."""
_UNCOUNTED_PATHS = _OPEN_PATHS | {"/metrics"}


class Door:
    def __init__(self, config: ServiceConfig) -> None:
        self._names = OwnNames(config.host, config.allow_hosts)
        self._clients = [(_digest(f"Bearer {token.secret}".encode()), token.name) for token in config.all_tokens]
        self._most = config.max_in_flight_per_client
        self._in_flight: Counter[str] = Counter()

    def client_of(self, scope: Scope) -> str:
        """The client that sent a request: the name of its token, or its address where no token is asked for.

        Raises:
            Refusal: it is for somebody else (421), from a foreign page (403), or has no token (401).
        """
        hosts = [value for key, value in scope["headers"] if key == b"host"]
        # None at all, as with HTTP/1.0, is fine: a browser always says.
        if len(hosts) > 1 or (hosts and not self._names.include(hosts[0].decode("latin-1"))):
            text = "the request is for another host; start this server with --allow-host NAME if it has that name, too"
            raise Refusal(unread(scope, detail(421, text)))
        origin = header(scope, b"origin")
        if origin is not None and not self._names.include_origin(origin.decode("latin-1")):
            raise Refusal(unread(scope, detail(403, "the request comes from a web page of another host")))
        address = scope["client"][0] if scope.get("client") else "unknown"
        if not self._clients or scope["path"] in _OPEN_PATHS:
            return address
        given = _digest(header(scope, b"authorization") or b"")
        # All of them, always: how long it takes says nothing about which one came close.
        found = [name for digest, name in self._clients if hmac.compare_digest(given, digest)]
        if not found:
            challenge = (b"www-authenticate", b"Bearer")
            text = "this server wants a token: Authorization: Bearer …"
            raise Refusal(unread(scope, detail(401, text, challenge)))
        return found[0]

    @contextmanager
    def counted(self, scope: Scope, client: str) -> Generator[None]:
        """While a request of `client` is being sent, waits or runs.

        Raises:
            Refusal: it has too many of them already (429).
        """
        if scope["path"] in _UNCOUNTED_PATHS or scope["method"] == "DELETE":  # which never adds to anybody's load
            yield
            return
        if self._in_flight[client] >= self._most:
            text = f"client {client} has {self._most} requests in flight, which is the most this server allows"
            raise Refusal(unread(scope, try_later(429, text)))
        self._in_flight[client] += 1
        try:
            yield
        finally:
            self._in_flight[client] -= 1
            if not self._in_flight[client]:
                del self._in_flight[client]


def _digest(text: bytes) -> bytes:
    """Of one length for all: comparing tells not even how long a token is."""
    return hashlib.sha256(text).digest()
