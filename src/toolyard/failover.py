"""Chooses which of several servers gets a request; and what the HTTP clients of such servers share. No I/O happens
here; the caller passes the time in."""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

_FIRST_REST = 1.0
_LONGEST_REST = 30.0
_FIRST_HOLD = 30.0
_LONGEST_HOLD = 600.0
_LONGEST_WAIT = 3600.0
"""Seconds that a server may ask its clients to wait."""
_REMEMBERED = 65_536
_AT_ONCE_BYTES = 512 * 1024
_FAIR = 1.25
"""A server may have this many times the mean load before it is passed over for a request whose prefix it has."""


@dataclass(slots=True)
class _Server:
    capacity: int = 1
    in_flight: int = 0
    reported: int = 0
    """Requests of other processes, as far as the server tells."""
    at_home: int = 0
    """Remembered requests that were last sent here."""
    failures: int = 0
    """Failures since its last answer."""
    rests_until: float = 0.0
    is_tried: bool = False
    """A request is under way to see whether the server works again."""
    holds: int = 0
    """How often it was held since its last answer."""
    is_held: bool = False
    """It accepts requests but answers none: no request tries it before `release`."""
    answers: int = 0
    errors: int = 0
    """All answers and all failures."""
    version: int | None = None
    """The version of its model's weights, if it is known; see `Router.know_version`."""


class Router:
    """Keeps each request on one server, where its prompt is still cached, as long as that server answers.

    A new request goes to the least loaded server. If it names its prefix, it goes to the server that the prefix is
    assigned to, or to the next one if that has more than 1.25 times the mean load: servers are ordered by a hash of
    prefix and name (rendezvous hashing), so all processes of a cluster agree without asking, and a server that comes or
    goes moves few prefixes. Servers known to have older weights get new requests only if no other server is up.

    A server that failed rests, each time twice as long as before, from 1 s to 30 s; its requests move to other servers
    for good. After the rest, one request tries the server again, and the others wait for the result. If all servers
    rest, the one whose rest ends first is used: better than giving up.

    A server that accepts requests but never answers is held instead, because each try costs a full timeout. It rests
    for 30 s to 10 min, and after that until a health check succeeds and the caller releases it.

    The latest 65,536 requests are remembered; a forgotten request is treated as new and loses its cached prompt.
    """

    def __init__(self, servers: Sequence[str], *, remembered: int = _REMEMBERED, probe_seconds: float = 5.0) -> None:
        """`probe_seconds`: how long other requests wait for the one that tries a resting server."""
        self._servers = {server: _Server() for server in servers}
        self._removed: dict[str, _Server] = {}
        """Those with requests in flight."""
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._remembered = remembered
        self._probe_seconds = probe_seconds

    @property
    def servers(self) -> list[str]:
        return list(self._servers)

    def add(self, server: str, *, capacity: int = 1) -> None:
        """Use a server from now on. Does nothing if it is there. `capacity`: relative to the other servers."""
        if server not in self._servers:
            known = self._removed.pop(server, None)
            self._servers[server] = _Server(capacity, in_flight=0 if known is None else known.in_flight)

    def remove(self, server: str) -> None:
        """Send nothing more to a server; its requests move. Those in flight may end, and are counted until then."""
        found = self._servers.pop(server, None)
        if found is not None:
            self._homes = OrderedDict((request, home) for request, home in self._homes.items() if home != server)
            if found.in_flight:
                self._removed[server] = found

    def report(self, server: str, in_flight: int) -> None:
        """The server says how many requests it has, from all processes together."""
        found = self._find(server)
        found.reported = max(0, in_flight - found.in_flight)

    def pick(self, request_id: str, now: float, prefix: str | None = None) -> str:
        """Choose the server for one attempt of `request_id`. Call `done` afterwards.

        `prefix`: requests that begin with the same tokens have the same. It matters only if the request is new.

        Raises:
            LookupError: there are no servers.
        """
        if not self._servers:
            raise LookupError("there are no servers")
        home = self._homes.get(request_id)
        if home is None or not self._is_up(home, now):
            up = self._newest([server for server in self._servers if self._is_up(server, now)])
            if not up:
                home = min(self._servers, key=lambda server: self._servers[server].rests_until)
            elif prefix is None:
                # Break ties by name, or all processes of a cluster would start with the same server.
                home = min(up, key=lambda server: (*self._load(server), _hash(server, request_id)))
            else:
                fair = math.ceil(_FAIR * (1 + sum(self._servers[server].in_flight for server in up)) / len(up))
                free = [server for server in up if self._servers[server].in_flight < fair]
                home = min(free, key=lambda server: _hash(server, prefix))
            self._settle(request_id, home)
        else:
            self._homes.move_to_end(request_id)
        chosen = self._servers[home]
        if chosen.rests_until:
            chosen.rests_until, chosen.is_tried = now + self._probe_seconds, True
        chosen.in_flight += 1
        return home

    def done(self, server: str) -> None:
        found = self._find(server)
        found.in_flight -= 1
        if not found.in_flight:
            self._removed.pop(server, None)

    def answered(self, server: str) -> None:
        """The server works: any answer counts."""
        found = self._find(server)
        found.answers += 1
        found.failures, found.rests_until, found.is_tried = 0, 0.0, False
        found.holds, found.is_held = 0, False

    def know_version(self, server: str, version: int | None) -> None:
        """`version`: larger is newer. None: unknown, which counts as new."""
        self._find(server).version = version

    def hold(self, server: str, now: float) -> None:
        """The server answers nothing. New requests go elsewhere; moving the others is up to the caller."""
        found = self._find(server)
        if not found.is_held:
            found.holds += 1
            found.is_held, found.is_tried = True, False
            found.rests_until = now + min(_LONGEST_HOLD, _FIRST_HOLD * 2 ** min(found.holds - 1, 10))

    def is_held(self, server: str, now: float) -> bool:
        """Whether the server is held and its rest is over, so that a successful health check may release it."""
        found = self._find(server)
        return found.is_held and found.rests_until <= now

    def release(self, server: str, now: float) -> None:
        """A health check succeeded: after its rest, one request may try the server."""
        if self.is_held(server, now):
            self._find(server).is_held = False

    def failed(self, server: str, now: float, *, gone: bool) -> None:
        """`gone`: the server could not be reached, or the connection broke. Otherwise the request may be at fault, and
        the server rests only after two failures in a row."""
        found = self._find(server)
        found.errors += 1
        if found.is_held or (found.rests_until > now and not found.is_tried):
            return  # of a hundred requests that fail together, only the first counts
        found.failures += 1
        found.is_tried = False
        if gone or found.failures > 1:
            found.rests_until = now + min(_LONGEST_REST, _FIRST_REST * 2 ** min(found.failures - 1, 10))

    def _find(self, server: str) -> _Server:
        """What is known of a server; nothing is if it was removed and has no requests in flight."""
        return self._servers.get(server) or self._removed.get(server) or _Server()

    def _newest(self, servers: list[str]) -> list[str]:
        """Leave out servers that are known to have older weights than another one."""
        versions = {server: self._servers[server].version for server in servers}
        newest = max((version for version in versions.values() if version is not None), default=None)
        return [server for server, version in versions.items() if version in (None, newest)]

    def loads(self, now: float) -> list[tuple[str, int, int, int, bool]]:
        """Each server with its requests in flight, all its answers and failures, and whether it is up."""
        return [
            (name, server.in_flight, server.answers, server.errors, self._is_up(name, now))
            for name, server in list(self._servers.items())  # a copy: other threads may ask
        ]

    def _is_up(self, server: str, now: float) -> bool:
        found = self._servers[server]
        return found.rests_until <= now and not found.is_held

    def _load(self, server: str) -> tuple[float, float]:
        found = self._servers[server]
        return (found.in_flight + found.reported) / found.capacity, found.at_home / found.capacity

    def _settle(self, request_id: str, home: str) -> None:
        before = self._homes.pop(request_id, None)
        if before is not None:
            self._servers[before].at_home -= 1
        self._homes[request_id] = home
        self._servers[home].at_home += 1
        if len(self._homes) > self._remembered:
            _, forgotten = self._homes.popitem(last=False)
            self._servers[forgotten].at_home -= 1


def retry_after_seconds(header: str | None) -> float | None:
    """The value of a Retry-After header; None if there is none, or it makes no sense. The date form is ignored: it
    would compare the clocks of two machines."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return min(seconds, _LONGEST_WAIT) if 0 <= seconds < math.inf else None


def payload(body: bytes | None) -> bytes | io.BytesIO | None:
    """Send a large body in pieces: written at once it would block the event loop, and aiohttp warns about it."""
    return io.BytesIO(body) if body is not None and len(body) > _AT_ONCE_BYTES else body


def _hash(server: str, key: str) -> bytes:
    """Not a CRC: the order of its values for one key would depend little on the key."""
    return blake2b(f"{server} {key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
