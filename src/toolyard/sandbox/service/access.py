"""Access control: checks a request's host name, origin and token, and limits requests in flight per client.

Decided from the headers alone, before any of the body is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from starlette.types import Scope

from toolyard.hosts import OwnNames, Secrets
from toolyard.sandbox.service.config import ServiceConfig, Token
from toolyard.sandbox.service.http import Refusal, detail, header, try_later, unread

_OPEN_PATHS = frozenset({"/v1/ping", "/healthz"})
"""Answered without a token: load balancer probes have none, and the responses reveal nothing worth hiding."""
_UNCOUNTED_PATHS = _OPEN_PATHS | {"/metrics"}


class AccessControl:
    def __init__(self, config: ServiceConfig) -> None:
        self._names = OwnNames(config.host, config.allow_hosts)
        self._clients = Secrets()
        for token in config.all_tokens:
            self.admit(token)
        self._most = config.max_in_flight_per_client
        self._in_flight: Counter[str] = Counter()

    def admit(self, token: Token) -> None:
        self._clients.add(f"Bearer {token.secret}".encode(), token.name)

    def dismiss(self, name: str) -> None:
        self._clients.remove(name)

    def client_of(self, scope: Scope) -> str:
        """Identify the client: by the name of its token, or by its address if no token is required.

        Raises:
            Refusal: the request is for another host (421), from a page of another host (403), or has no valid token
                (401).
        """
        hosts = [value for key, value in scope["headers"] if key == b"host"]
        # No Host header, as with HTTP/1.0, is fine: browsers always send one.
        if len(hosts) > 1 or (hosts and not self._names.include(hosts[0].decode("latin-1"))):
            text = "the request is for another host; to accept this name, start the server with --allow-host NAME"
            raise Refusal(unread(scope, detail(421, text)))
        origin = header(scope, b"origin")
        if origin is not None and not self._names.include_origin(origin.decode("latin-1")):
            raise Refusal(unread(scope, detail(403, "the request comes from a web page of another host")))
        address = scope["client"][0] if scope.get("client") else "unknown"
        if not self._clients or scope["path"] in _OPEN_PATHS:
            return address
        found = self._clients.holder_of(header(scope, b"authorization") or b"")
        if found is None:
            challenge = (b"www-authenticate", b"Bearer")
            text = "this server requires a token: Authorization: Bearer …"
            raise Refusal(unread(scope, detail(401, text, challenge)))
        return found

    @contextmanager
    def counted(self, scope: Scope, client: str) -> Generator[None]:
        """Count a request of `client` while it is being received, waiting or running.

        Raises:
            Refusal: the client has too many already (429).
        """
        if scope["path"] in _UNCOUNTED_PATHS or scope["method"] == "DELETE":  # which never adds load
            yield
            return
        if self._in_flight[client] >= self._most:
            text = f"client {client} has {self._most} requests in flight, the most this server allows"
            raise Refusal(unread(scope, try_later(429, text)))
        self._in_flight[client] += 1
        try:
            yield
        finally:
            self._in_flight[client] -= 1
            if not self._in_flight[client]:
                del self._in_flight[client]
