"""Which names a local server answers to: the guard against DNS rebinding, for the viewer and the sandbox service.

A web page can point a name of its own at any address, that of this machine included, and its visitors' browsers then
send requests here. Such a request names the page's host, in `Host` or in `Origin`, and that is what gives it away.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from functools import lru_cache

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/\s]+)(:\d+)?")
_ORIGIN = re.compile(r"https?://(.+)")


class OwnNames:
    """The names of a server that listens on `host`.

    Always: loopback by any name, `host` itself, and `allowed`, where `*.example.com` means any name below that domain,
    and `*` any name at all. If `host` is not loopback, so that others are meant to connect: any literal address, which
    no web page can claim for itself, and the name of this machine.
    """

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        names = [name.strip("[]").lower() for name in allowed]
        self._exact = {"localhost", host.lower(), *names}
        self._domains = tuple(name.removeprefix("*") for name in names if name.startswith("*"))
        self._open = not _is_loopback(host)
        if self._open:
            own = socket.gethostname().lower()
            self._exact |= {own, f"{own}.local", own.partition(".")[0]}
        # A client sends the same name with each of its requests.
        self.include = lru_cache(maxsize=256)(self._include)

    def _include(self, host: str) -> bool:
        """Whether `host`, the value of a Host header, is one of them. The port does not matter."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").lower()
        if name in self._exact or (self._domains and name.endswith(self._domains)):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback or self._open
        except ValueError:
            return False

    def include_origin(self, origin: str) -> bool:
        """Whether `origin`, the value of an Origin header, is a page of one of them."""
        found = _ORIGIN.fullmatch(origin)
        return found is not None and self.include(found[1])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
