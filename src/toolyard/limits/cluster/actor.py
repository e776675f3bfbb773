"""The lender as a Ray actor, and what outlives its process.

Everything in flight in a cluster may wait for its restart, so it imports little: not what only users of a limiter need.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
import uuid
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar
from urllib.parse import quote

from toolyard.limits.background import background
from toolyard.limits.cluster.lending import Lender
from toolyard.limits.cluster.roster import Roster
from toolyard.limits.cluster.server import LenderServer

ray: Any = import_module("ray")  # whose annotations say little
_store: Any = getattr(ray.experimental, "internal_kv", None)

NAMESPACE = "toolyard"
_PUBLISH_SECONDS = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LenderOptions:
    """What a lender is made with; those who attach later take it as it is."""

    term: float
    adaptive: bool
    starts_per_second: float | None
    burst: float | None
    max_hold_seconds: float | None
    idle_seconds: float


class Records:
    """What outlives a lender's process: its address and its roster, in the key-value store of Ray's control service."""

    kept = hasattr(_store, "_internal_kv_put")
    """False in a Ray without this store, which is no public interface: there a restart of the lender takes longer."""

    def __init__(self, namespace: str, name: str) -> None:
        self._prefix = f"{quote(namespace, safe='')}/{quote(name, safe='')}/"

    def read(self, record: str) -> Any:
        found = _store._internal_kv_get(self._prefix + record, namespace=NAMESPACE)  # noqa: SLF001
        return None if found is None else json.loads(found)

    def write(self, record: str, value: Any) -> None:
        _store._internal_kv_put(self._prefix + record, json.dumps(value), namespace=NAMESPACE)  # noqa: SLF001

    def delete(self) -> None:
        _store._internal_kv_del(self._prefix, del_by_prefix=True, namespace=NAMESPACE)  # noqa: SLF001


class LenderActor:
    """The actor, made by `lender_class`. All but its address goes over its socket, which a background thread serves.

    It has no async methods, or Ray would run event loops of its own beside that thread.
    """

    made_of: ClassVar[tuple[str, str, int, LenderOptions]]

    def __init__(self) -> None:
        name, namespace, limit, options = self.made_of
        restarted = _was_restarted()
        lender = Lender(
            name,
            limit,
            epoch=uuid.uuid4().hex[:8],
            now=time.monotonic(),
            term=options.term,
            recovering=restarted,
            adaptive=options.adaptive,
            starts_per_second=options.starts_per_second,
            burst=options.burst,
            max_hold=options.max_hold_seconds,
        )
        records = Records(namespace, name)
        read, write = partial(records.read, "roster"), partial(records.write, "roster")
        roster = Roster(read, write, inherits=restarted) if Records.kept else None
        self._server = LenderServer(lender, secrets.token_hex(16), roster)
        self._address = background().run(_serve(self._server, roster, records)).result()
        itself = ray.get_runtime_context().current_actor
        self._leaving = background().run(_leave_when_idle(self._server, options.idle_seconds, records, itself))

    def address(self) -> tuple[str, int, str]:
        return self._address

    def statistics(self) -> dict[str, Any]:
        """For who only wants to look."""

        async def look() -> dict[str, Any]:
            return asdict(self._server.lender.statistics(time.monotonic()))

        return background().run(look()).result()


def lender_class(name: str, namespace: str, limit: int, options: LenderOptions) -> type[LenderActor]:
    """The class of an actor without arguments: Ray imports numpy, pydantic and more to read any.

    That is half the time of a restart.
    """
    return type("Lender", (LenderActor,), {"made_of": (name, namespace, limit, options)})


async def _serve(server: LenderServer, roster: Roster | None, records: Records) -> tuple[str, int, str]:
    if roster is not None and not roster.complete:
        await roster.recall(within=server.lender.term / 2)
    host = ray.util.get_node_ip_address()
    address = host, await server.start(host), server.secret
    if Records.kept:
        try:
            async with asyncio.timeout(_PUBLISH_SECONDS):
                await asyncio.to_thread(records.write, "address", address)
        except Exception:
            _log.warning("limiter %r: its address could not be published", server.lender.name, exc_info=True)
    return address


async def _leave_when_idle(server: LenderServer, seconds: float, records: Records, itself: Any) -> None:
    while server.idle_seconds < seconds:  # noqa: ASYNC110 - nothing would set an event
        await asyncio.sleep(min(5.0, seconds / 4))
    await server.stop()
    if Records.kept:
        with contextlib.suppress(Exception):  # a few hundred bytes stay behind
            await asyncio.to_thread(records.delete)
    # Not `exit_actor`, which only a call of the actor may use, nor `os._exit`, which Ray would take for a crash.
    await asyncio.to_thread(ray.kill, itself, no_restart=True)


def _was_restarted() -> bool:
    """Of an actor, whether there was one in its place before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what it calls itself to find out
        return ray.get_runtime_context().was_current_actor_reconstructed
