"""Who may use a server of this package: the host names it answers to, and its tokens.

A web page can point a host name at any address, including this machine's, and its visitors' browsers then send requests
here (DNS rebinding). Such a request carries the page's host name in `Host` or `Origin`, so it can be recognized.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import resource
import socket
from collections.abc import Iterable
from functools import lru_cache

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/\s]+)(:\d+)?")
_ORIGIN = re.compile(r"https?://(.+)")
_OPEN_FILES = 65536


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
        self._open = not is_loopback(host)
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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Secrets:
    """Secrets and their holders. The time that a lookup takes reveals neither a secret nor its length."""

    def __init__(self) -> None:
        self._holders: list[tuple[bytes, str]] = []

    def __bool__(self) -> bool:
        return bool(self._holders)

    def add(self, secret: bytes, holder: str) -> None:
        self._holders.append((_digest(secret), holder))

    def remove(self, holder: str) -> None:
        self._holders = [one for one in self._holders if one[1] != holder]

    def holder_of(self, given: bytes) -> str | None:
        digest = _digest(given)
        # Always compare all of them, so that the time taken does not reveal which one was close.
        found = [holder for known, holder in self._holders if hmac.compare_digest(digest, known)]
        return found[0] if found else None


def _digest(text: bytes) -> bytes:
    """Hash to a fixed length, so that comparing does not even reveal a secret's length."""
    return hashlib.sha256(text).digest()


def raise_open_files_limit() -> None:
    """Each client needs a file descriptor, and the usual soft limit is 1024: less than one training batch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
