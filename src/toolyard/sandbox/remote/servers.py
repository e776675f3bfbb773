"""Chooses which of several servers runs a program, and where it goes if that one fails.

A program has no effect outside its sandbox, so it is safe to run it again elsewhere. `toolyard.failover` chooses the
least loaded server that is not resting after a failure. Pings detect a server that accepts a request and then falls
silent (`health`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import TracebackType

from toolyard.errors import SandboxBusyError, SandboxClosedError, SandboxError, ToolyardError
from toolyard.failover import Router
from toolyard.sandbox.protocol import Limits
from toolyard.sandbox.remote.http import Connections, Retries, ServerGoneError, delay_before, public_error

_log = logging.getLogger("toolyard.sandbox.remote")

_NOT_IN_SANDBOX_FUSION = frozenset({"cpu_seconds", "disk_bytes", "file_bytes", "open_files", "processes"})
"""Limits that SandboxFusion's request cannot express. How much output it keeps is fixed."""


class Server:
    """One server and what is known about it."""

    def __init__(self, base: str, http: Connections, router: Router, *, alone: bool) -> None:
        self.base = base
        self.http = http
        self.max_cases = 0
        """How many cases it accepts per request, learned from its first response; 0 for a third-party server."""
        self.may_return = True
        """False: if it cannot be reached, it is gone for good."""
        self._router = router
        self._alone = alone
        self._is_down = False
        self._warned = False

    def warn_unenforced(self, limits: Limits) -> None:
        """Warn once about limits that the caller set but a third-party server does not support."""
        unenforced = sorted(limits.model_fields_set & _NOT_IN_SANDBOX_FUSION)
        if unenforced and not self._warned:
            self._warned = True
            _log.warning("%s is not a Toolyard service and does not enforce %s", self.base, ", ".join(unenforced))

    def answered(self) -> None:
        self._router.answered(self.base)
        if self._is_down:
            self._is_down = False
            _log.info("%s answers again", self.base)

    def failed(self, error: SandboxError) -> None:
        """Let it rest: requests go elsewhere, and one tries it again later."""
        busy = isinstance(error, SandboxBusyError)
        if busy:  # counts as an answer, so that the rest does not double each time
            self._router.answered(self.base)
        self._router.failed(self.base, _now(), gone=True)
        if not (busy or self._is_down or self._alone):
            self._is_down = True
            _log.warning("%s; requests go to other servers; this one is tried again later", error)

    def name_source(self, error: SandboxError) -> None:
        """Add the server's name to the error."""
        error.source = self.base
        if not self._alone and self.base not in str(error):
            error.args = (f"{self.base}: {error}",)


class Servers:
    """One or more servers. `connect` creates the connections to one, given its base URL and retry settings.

    With a single server, retries are left to its connections, which retry only what is always safe. If `bases` is
    empty, servers come and go with `add` and `remove`, and one that is gone does not return.
    """

    def __init__(
        self, bases: Sequence[str], connect: Callable[[str, Retries], Connections], *, retries: Retries, limit: int
    ) -> None:
        alone = len(bases) == 1
        self.retries = retries
        self.rounds = 1 if alone else retries.attempts
        """How often each server may be tried."""
        self._connect = connect
        once = retries if alone else Retries(attempts=1)
        # Request ids are unique here; remembering them only spreads sequential requests over the servers.
        self._router = Router(bases, remembered=1024)
        self._all = {base: Server(base, connect(base, once), self._router, alone=alone) for base in bases}
        self._limit = limit
        self._slots = asyncio.Semaphore(limit)
        self._changed = asyncio.Event()
        """Set if there is a server, or when this is closed."""
        self._names = map(f"{secrets.token_hex(4)} {{}}".format, count())
        self.is_open = False

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    async def add(self, base: str, *, capacity: int, max_cases: int) -> None:
        """Add a service of ours. `capacity`: the programs that it runs at the same time."""
        http = self._connect(base, Retries(attempts=1))
        await http.open()
        self._all[base] = server = Server(base, http, self._router, alone=False)
        server.max_cases, server.may_return = max_cases, False
        self._router.add(base, capacity=capacity)
        self._changed.set()

    async def remove(self, base: str) -> None:
        """Its programs run elsewhere, and its sessions are lost."""
        server = self._all.pop(base)
        self._router.remove(base)
        if not self._all:
            self._changed.clear()
        await server.http.abandon()

    def report(self, base: str, in_flight: int) -> None:
        """See `Router.report`."""
        self._router.report(base, in_flight)

    async def open(self) -> None:
        # One limit for all servers, so that nothing queues for a server that may fail meanwhile.
        self._slots = asyncio.Semaphore(self._limit)
        self._changed = asyncio.Event()
        for server in self._all.values():
            await server.http.open()
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False
        self._changed.set()
        for server in self._all.values():
            await server.http.close()

    async def take(self) -> Server:
        """Take a server for one attempt. Give it back afterwards.

        Raises:
            SandboxError: there is none, and none came.
        """
        await self._slots.acquire()
        try:
            while not self._all:
                await self._wait_for_one()
            return self._all[self._router.pick(next(self._names), _now())]
        except BaseException:
            self._slots.release()
            raise

    async def _wait_for_one(self) -> None:
        if not self.is_open:
            raise SandboxClosedError("the sandbox is not open: use `async with`")
        try:
            async with asyncio.timeout(self.retries.seconds):
                await self._changed.wait()
        except TimeoutError:
            raise SandboxError(f"no server is left, and none joined within {self.retries.seconds:g} s") from None

    def give_back(self, server: Server) -> None:
        self._router.done(server.base)
        self._slots.release()


class Attempts:
    """The attempts of one request. Enter it for each: `while True: async with tries as server: return …`.

    A `SandboxError` ends an attempt, and is suppressed as long as another may follow.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._made = 0
        self._pause = 0.0
        self._failing_since: float | None = None
        self._last: dict[str, SandboxError] = {}
        """The last error of each server that was tried."""

    async def __aenter__(self) -> Server:
        if self._pause:
            await asyncio.sleep(self._pause)
        self._server = await self._servers.take()
        self._made += 1
        return self._server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        server = self._server
        self._servers.give_back(server)
        if isinstance(error, SandboxClosedError) and not self._servers.is_open:
            return False  # raised here, not reported by a server
        if isinstance(error, SandboxError):
            server.name_source(error)
            server.failed(error)
            self._last[server.base] = error
            if self._may_retry(error):
                return True
            self._give_up(error)
        elif error is None or isinstance(error, ToolyardError):
            server.answered()
        return False

    def _may_retry(self, error: SandboxError) -> bool:
        """Whether to try again. Also sets the pause before that: none while some servers have not been tried."""
        now = _now()
        self._failing_since = self._failing_since or now
        several = max(1, len(self._servers))
        round_, rest = divmod(self._made, several)
        wish = error.retry_after if isinstance(error, SandboxBusyError) else None
        self._pause = 0.0 if rest else delay_before(round_, wish)
        # Where servers are replaced by new ones, a program that kills them must not be tried forever.
        if round_ <= self._servers.rounds and any(base not in self._last for base in self._servers):
            return True
        # A server that answered with an error would do so again. Unreachable or busy ones may be back.
        hopeless = not any(isinstance(last, (ServerGoneError, SandboxBusyError)) for last in self._last.values())
        late = now + self._pause - self._failing_since > self._servers.retries.seconds
        return not (hopeless or late or round_ >= self._servers.rounds)

    def _give_up(self, error: SandboxError) -> None:
        """
        Raises:
            SandboxError: in place of an internal error type.
        """
        others = ", ".join(base for base in self._last if base != self._server.base)
        if others:
            error.args = (f"{error} ({self._made} attempts; also tried {others})",)
            error.retryable = any(last.retryable for last in self._last.values())
        if isinstance(error, ServerGoneError):
            raise public_error(error) from error.__cause__


def _now() -> float:
    return asyncio.get_running_loop().time()
