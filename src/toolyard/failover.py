"""Chooses which of several servers gets a request. No I/O happens here; the caller passes the time in."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_REST = 1.0
_LONGEST_REST = 30.0
_FIRST_HOLD = 30.0
_LONGEST_HOLD = 600.0
_REMEMBERED = 65_536


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


class Router:
    """Keeps each request on one server, where its prompt is still cached, as long as that server answers.

    A new request goes to the least loaded server. A server that failed rests, each time twice as long as before, from
    1 s to 30 s; its requests move to other servers for good. After the rest, one request tries the server again, and
    the others wait for the result. If all servers rest, the one whose rest ends first is used: better than giving up.

    A server that accepts requests but never answers is held instead, because each try costs a full timeout. It rests
    for 30 s to 10 min, and after that until a health check succeeds and the caller releases it.

    The latest 65,536 requests are remembered; a forgotten request is treated as new and loses its cached prompt.
    """

    def __init__(self, servers: Sequence[str], *, remembered: int = _REMEMBERED, probe_seconds: float = 5.0) -> None:
        """`probe_seconds`: how long other requests wait for the one that tries a resting server."""
        self._servers = {server: _Server() for server in servers}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._remembered = remembered
        self._probe_seconds = probe_seconds

    def add(self, server: str, *, capacity: int = 1) -> None:
        """`capacity`: relative to the other servers."""
        self._servers.setdefault(server, _Server(capacity))

    def remove(self, server: str) -> None:
        """What is under way there may still call `done` and the like."""
        self._servers.pop(server, None)
        self._homes = OrderedDict((key, home) for key, home in self._homes.items() if home != server)

    def report(self, server: str, in_flight: int) -> None:
        """The server says how many requests it has, from all processes together."""
        found = self._known(server)
        found.reported = max(0, in_flight - found.in_flight)

    def pick(self, request_id: str, now: float) -> str:
        """Choose the server for one attempt of `request_id`. Call `done` afterwards."""
        home = self._homes.get(request_id)
        if home is None or not self._is_up(home, now):
            up = [server for server in self._servers if self._is_up(server, now)]
            # Break ties by name, or all processes of a cluster would start with the same server.
            home = (
                min(up, key=lambda server: (*self._load(server), zlib.crc32(f"{server} {request_id}".encode())))
                if up
                else min(self._servers, key=lambda server: self._servers[server].rests_until)
            )
            self._settle(request_id, home)
        else:
            self._homes.move_to_end(request_id)
        chosen = self._servers[home]
        if chosen.rests_until:
            chosen.rests_until, chosen.is_tried = now + self._probe_seconds, True
        chosen.in_flight += 1
        return home

    def done(self, server: str) -> None:
        self._known(server).in_flight -= 1

    def answered(self, server: str) -> None:
        """The server works: any answer counts."""
        found = self._known(server)
        found.answers += 1
        found.failures, found.rests_until, found.is_tried = 0, 0.0, False
        found.holds, found.is_held = 0, False

    def hold(self, server: str, now: float) -> None:
        """The server answers nothing. New requests go elsewhere; moving the others is up to the caller."""
        found = self._known(server)
        if not found.is_held:
            found.holds += 1
            found.is_held, found.is_tried = True, False
            found.rests_until = now + min(_LONGEST_HOLD, _FIRST_HOLD * 2 ** min(found.holds - 1, 10))

    def is_held(self, server: str, now: float) -> bool:
        """Whether the server is held and its rest is over, so that a successful health check may release it."""
        found = self._known(server)
        return found.is_held and found.rests_until <= now

    def release(self, server: str, now: float) -> None:
        """A health check succeeded: after its rest, one request may try the server."""
        if self.is_held(server, now):
            self._servers[server].is_held = False

    def failed(self, server: str, now: float, *, gone: bool) -> None:
        """`gone`: the server could not be reached, or the connection broke. Otherwise the request may be at fault, and
        the server rests only after two failures in a row."""
        found = self._known(server)
        found.errors += 1
        if found.is_held or (found.rests_until > now and not found.is_tried):
            return  # of a hundred requests that fail together, only the first counts
        found.failures += 1
        found.is_tried = False
        if gone or found.failures > 1:
            found.rests_until = now + min(_LONGEST_REST, _FIRST_REST * 2 ** min(found.failures - 1, 10))

    def _known(self, server: str) -> _Server:
        return self._servers.get(server) or _Server()  # it was removed

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
