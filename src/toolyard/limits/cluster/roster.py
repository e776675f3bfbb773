"""The roster: which processes may have permits, written where it outlives the lender.

A process is written down *before* it can be lent anything, so a restarted lender that reads the roster knows whom to
wait for (see `lending`). One that cannot be written down is not admitted, and tries again. One that is struck out late,
or never, costs the next lender time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Mapping
from typing import Any

_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 0.1


Record = Mapping[str, Any]


class Roster:
    """`read` and `write` go to where it is kept. They block, and may raise anything.

    `inherits`: there was a lender before this one, so who may have permits is not known until `recall`, or for a term.
    """

    def __init__(self, read: Callable[[], Record | None], write: Callable[[Record], None], *, inherits: bool) -> None:
        self.members: Record = {}
        """The identity of each process, by its name at the lender. All of them are written down."""
        self.complete = not inherits
        """Whether everyone who may have permits is among `members`."""
        self._read = read
        self._write = write
        self._joining: dict[str, Any] = {}
        self._lock = asyncio.Lock()

    async def recall(self, within: float) -> None:
        """Take over what the lender before this one left. Call it before anybody is added.

        The store may be waking up, too: it is asked again for `within` seconds.
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
                    await asyncio.sleep(_AGAIN_SECONDS)
        except TimeoutError:
            _log.warning("a limiter's roster cannot be read: nothing is granted for a whole lease", exc_info=failure)

    async def add(self, member: str, identity: Record) -> None:
        """Return once it is written down.

        Raises:
            ConnectionError: it could not be.
        """
        if member in self.members:
            return
        self._joining[member] = identity
        async with self._lock:
            if member not in self.members:  # or it was written together with another
                joining, self._joining = self._joining, {}
                await self._replace({**self.members, **joining, member: identity})

    async def strike_out_all_but(self, members: Container[str]) -> None:
        """Not before all members of the lender before this one are accounted for."""
        async with self._lock:
            left = {member: identity for member, identity in self.members.items() if member in members}
            if len(left) < len(self.members) or not self.complete:
                # Before it is written: one that returns meanwhile must be written down again.
                self.members, self.complete = left, True
                await self._replace(left)

    async def _replace(self, members: Record) -> None:
        try:
            await asyncio.to_thread(self._write, {"complete": self.complete, "members": members})
        except Exception as error:
            _log.warning("a limiter's roster cannot be written", exc_info=True)
            raise ConnectionError(f"the roster cannot be written: {error}") from error
        self.members = members
