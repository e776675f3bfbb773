"""The lender as a Ray actor, and the records that outlive its process.

Everything in flight in a cluster may be waiting for its restart, so it imports only what a lender needs.
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

ray: Any = import_module("ray")  # poorly annotated
_store: Any = getattr(ray.experimental, "internal_kv", None)

NAMESPACE = "toolyard"
_PUBLISH_SECONDS = 2.0
_FIRST_USE_SECONDS = 60.0
"""Before a new lender counts as idle: on a busy machine, whoever created it may take this long to reach it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LenderOptions:
    """A lender's settings, fixed when it is created; later users take them as they are."""

    term: float
    adaptive: bool
    starts_per_second: float | None
    burst: float | None
    max_hold_seconds: float | None
    idle_seconds: float


class Records:
    """What outlives a lender's process: its address and its roster, in the key-value store of Ray's control service."""

    kept = hasattr(_store, "_internal_kv_put")
    """False if this Ray has no such store, which is not a public interface; a lender's restart then takes longer."""

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
    """The actor, created by `lender_class`. Everything except its address goes over a socket served by a background
    thread.

    It has no async methods, because Ray would run its own event loops beside that thread.
    """

    spec: ClassVar[tuple[str, str, int, LenderOptions]]

    def __init__(self) -> None:
        name, namespace, limit, options = self.spec
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
        if not restarted:
            self._server.idle_since += _FIRST_USE_SECONDS
        self._leaving = background().run(_leave_when_idle(self._server, options.idle_seconds, records, itself))

    def address(self) -> tuple[str, int, str]:
        return self._address

    def statistics(self) -> dict[str, Any]:
        """Statistics for observers that hold no permits."""

        async def look() -> dict[str, Any]:
            return asdict(self._server.lender.statistics(time.monotonic()))

        return background().run(look()).result()


def lender_class(name: str, namespace: str, limit: int, options: LenderOptions) -> type[LenderActor]:
    """Create an actor class without constructor arguments: to deserialize any, Ray imports numpy, pydantic and more.

    That would be half the time of a restart.
    """
    return type("Lender", (LenderActor,), {"spec": (name, namespace, limit, options)})


async def _serve(server: LenderServer, roster: Roster | None, records: Records) -> tuple[str, int, str]:
    if roster is not None and not roster.complete:
        await roster.load(within=server.lender.term / 2)
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
        with contextlib.suppress(Exception):  # at worst a few hundred bytes are left behind
            await asyncio.to_thread(records.delete)
    # Not `exit_actor`, which only works within an actor call, nor `os._exit`, which Ray treats as a crash.
    await asyncio.to_thread(ray.kill, itself, no_restart=True)


def _was_restarted() -> bool:
    """Whether this actor was restarted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by Ray's own code
        return ray.get_runtime_context().was_current_actor_reconstructed
