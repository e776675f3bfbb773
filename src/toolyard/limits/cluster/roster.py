"""The roster: which processes may have permits, stored where it outlives the lender.

A process is recorded *before* it can be lent anything, so a restarted lender that reads the roster knows whom to wait
for (see `lending`). A process that cannot be recorded is not admitted, and tries again. Removing one late, or never,
only costs the next lender time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Mapping
from typing import Any

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.1


Record = Mapping[str, Any]


class Roster:
    """`read` and `write` access the store. They block, and may raise anything.

    `inherits`: there was a lender before this one, so who may have permits is unknown until `load`, or for a term.
    """

    def __init__(self, read: Callable[[], Record | None], write: Callable[[Record], None], *, inherits: bool) -> None:
        self.members: Record = {}
        """The identity of each process, by its id at the lender. All of them are in the store."""
        self.complete = not inherits
        """Whether `members` has everyone who may have permits."""
        self._read = read
        self._write = write
        self._joining: dict[str, Any] = {}
        self._lock = asyncio.Lock()

    async def load(self, within: float) -> None:
        """Load what the previous lender left. Call it before adding anyone.

        The store may be starting up too: retries for `within` seconds.
        """
        failure: Exception | None = None
        try:
            async with asyncio.timeout(within):
                while True:
                    try:
                        found = await asyncio.to_thread(self._read)
                        if found is not None and found["complete"]:
                            self.members, self.complete = dict(found["members"]), True
                        return
                    except Exception as error:
                        failure = error
                    await asyncio.sleep(_RETRY_SECONDS)
        except TimeoutError:
            _log.warning("a limiter's roster cannot be read: nothing is granted for a whole lease", exc_info=failure)

    async def add(self, member: str, identity: Record) -> None:
        """Return when the member is recorded.

        Raises:
            ConnectionError: it could not be recorded.
        """
        if member in self.members:
            return
        self._joining[member] = identity
        async with self._lock:
            if member not in self.members:  # it may have been written together with another
                joining, self._joining = self._joining, {}
                await self._replace({**self.members, **joining, member: identity})

    async def keep_only(self, members: Container[str]) -> None:
        """Remove all others. Not before all members of the previous lender are accounted for."""
        async with self._lock:
            left = {member: identity for member, identity in self.members.items() if member in members}
            if len(left) < len(self.members) or not self.complete:
                # Before writing: a process that returns meanwhile must be recorded again.
                self.members, self.complete = left, True
                await self._replace(left)

    async def _replace(self, members: Record) -> None:
        try:
            await asyncio.to_thread(self._write, {"complete": self.complete, "members": members})
        except Exception as error:
            _log.warning("a limiter's roster cannot be written", exc_info=True)
            raise ConnectionError(f"the roster cannot be written: {error}") from error
        self.members = members
