"""The host names a local server answers to: protects the viewer and the sandbox service against DNS rebinding.

A web page can point a host name at any address, including this machine's, and its visitors' browsers then send requests
here. Such a request carries the page's host name in `Host` or `Origin`, so it can be recognized.
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

    Always: any loopback name, `host` itself, and `allowed`, where `*.example.com` means any name below that domain, and
    `*` any name. If `host` is not loopback, so that others are meant to connect: also any IP address, which no web page
    can claim as its name, and the name of this machine.
    """

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        names = [name.strip("[]").lower() for name in allowed]
        self._exact = {"localhost", host.lower(), *names}
        self._domains = tuple(name.removeprefix("*") for name in names if name.startswith("*"))
        self._open = not _is_loopback(host)
        if self._open:
            own = socket.gethostname().lower()
            self._exact |= {own, f"{own}.local", own.partition(".")[0]}
        # Clients send the same name with every request.
        self.include = lru_cache(maxsize=256)(self._include)

    def _include(self, host: str) -> bool:
        """Whether `host`, the value of a Host header, is one of these names. The port does not matter."""
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
        """Whether `origin`, the value of an Origin header, belongs to one of these names."""
        found = _ORIGIN.fullmatch(origin)
        return found is not None and self.include(found[1])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
