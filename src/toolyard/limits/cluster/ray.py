"""`RayLimiter`: one limit for a whole Ray cluster.

Ray places, names and restarts the lender. Permits do not go through Ray calls, which take milliseconds, but are lent to
each process in blocks over the lender's own socket (see `lending`).

The lender is a *detached* actor: it outlives the job that created it, since other jobs use it too. It is not leaked: it
ends itself after `idle_seconds` without users; `toolyard doctor` lists live lenders and can stop them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter

from toolyard.errors import ConfigError, LimiterClosedError, LimiterError, MissingDependencyError
from toolyard.limits.cluster.client import Address, Client
from toolyard.limits.desk import DeskPermit
from toolyard.limits.local import check_hold, check_limit
from toolyard.limits.protocol import LimiterStatistics
from toolyard.limits.rate import TokenBucket

try:
    ray: Any = import_module("ray")  # poorly annotated
except ImportError as error:
    raise MissingDependencyError("ray", "ray", "a limit for a whole cluster") from error

from toolyard.limits.cluster.actor import NAMESPACE, LenderOptions, Records, lender_class

PREFIX = "limiter:"
_READ_SECONDS = 5.0
_statistics = TypeAdapter(LimiterStatistics)
_ATTACH_SECONDS = 180.0
"""On a busy machine, Ray was seen to take a minute to start an actor."""
_LOOK_SECONDS = (0.02, 0.05, 0.1, 0.2)
"""Seconds between checks for a lender's new address. Many processes may be checking."""


class RayLimiter:
    """At most `limit` in flight in the whole cluster, even if holders, nodes or the lender itself crash.

    Omit `limit` to attach to an existing limiter. Attaching with another limit is an error that shows both; use
    `resize()` to change it. All other options take effect only when the limiter is created:

    `lease_seconds`: permits of a dead process or node come back within this time, plus a few percent; those of a
    process on the lender's own machine immediately. A shorter lease reclaims faster, but the network must never be
    silent that long. `idle_seconds`: the lender ends itself after this long without attached processes.
    `adaptive`, `starts_per_second`, `burst`, `max_hold_seconds`: as in `LocalLimiter`. With n processes, at most
    `starts_per_second` × seconds + `burst` + n executions start in any period.

    Within a process, limiters with the same name share what was lent to it. Limiters can be pickled, and attach where
    they are unpickled. Within a process, waiters are served as described in `Limiter`; between processes by shares (see
    `lending`): with n processes waiting for a limit L, each gets a permit within n / L turns of 50 ms, a turn being
    extended until its execution ends.
    """

    def __init__(
        self,
        name: str,
        limit: int | None = None,
        *,
        namespace: str = NAMESPACE,
        adaptive: bool = False,
        starts_per_second: float | None = None,
        burst: float | None = None,
        max_hold_seconds: float | None = None,
        lease_seconds: float = 4.0,
        idle_seconds: float = 600.0,
    ) -> None:
        if not name:
            raise ConfigError("a cluster limiter needs a name")
        if limit is not None:
            check_limit(limit, name)
        check_hold(max_hold_seconds)
        if not 0.5 <= lease_seconds <= 3600:
            raise ConfigError(f"limiter {name!r}: lease_seconds={lease_seconds!r}; expected 0.5 to 3600")
        if not idle_seconds > 0:
            raise ConfigError(f"limiter {name!r}: idle_seconds={idle_seconds!r} is not a positive number")
        if starts_per_second is not None:
            TokenBucket(starts_per_second, burst)  # raises if they are invalid
        if not ray.is_initialized():
            raise ConfigError(f"limiter {name!r}: this process is not connected to Ray; call ray.init() first")
        options = LenderOptions(lease_seconds, adaptive, starts_per_second, burst, max_hold_seconds, idle_seconds)
        self._spec = (name, limit, namespace, options)
        self._client = _attach(name, limit, namespace, options)
        self.name = name
        self._closed = False

    @property
    def limit(self) -> int:
        return self._client.desk.limit

    def permit(
        self, tenant: str = "", *, weight: float = 1.0, timeout: float | None = None, label: str = ""
    ) -> DeskPermit:
        return self._client.desk.permit(tenant, weight, timeout, label)

    async def resize(self, limit: int) -> None:
        check_limit(limit, self.name)
        # Adopted here at once: if the lender dies before telling anyone, it learns the new limit from us.
        self._client.desk.adopt(await self._client.ask("resize", limit=limit))

    async def statistics(self) -> LimiterStatistics:
        """Statistics of the whole cluster. Counts from other processes are up to a second old."""
        answer = await self._client.ask("statistics")
        return read_statistics(answer["statistics"])

    def read_statistics(self) -> LimiterStatistics:
        """`statistics()` without an event loop. Blocks up to ten seconds if the lender is stuck.

        Raises:
            LimiterError: the lender did not answer.
        """
        return read_statistics(self._client.ask_blocking("statistics")["statistics"])

    async def close(self) -> None:
        """Close it for this process. The lender stays for others."""
        if self._closed:
            return
        self._closed = True
        leaving = _detach(self._client)
        if leaving is not None and not self._client.desk.in_use:
            await asyncio.wrap_future(leaving)

    def kill_lender(self) -> None:
        """Kill the lender's process, for fault injection. Ray starts it again. Blocks.

        Raises:
            LimiterError: there is none.
        """
        name, _, namespace, _ = self._spec
        try:
            ray.kill(ray.get_actor(PREFIX + name, namespace), no_restart=False)
        except (ValueError, ray.exceptions.RayError) as error:
            raise LimiterError(f"limiter {name!r}: its lender cannot be killed: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._spec


def _rebuild(name: str, limit: int | None, namespace: str, options: LenderOptions) -> RayLimiter:
    return RayLimiter(
        name,
        limit,
        namespace=namespace,
        adaptive=options.adaptive,
        starts_per_second=options.starts_per_second,
        burst=options.burst,
        max_hold_seconds=options.max_hold_seconds,
        lease_seconds=options.term,
        idle_seconds=options.idle_seconds,
    )


# Attaching ------------------------------------------------------------------------------------------------------------

_clients: dict[tuple[str, str, str], Client] = {}
_clients_lock = threading.RLock()


def _attach(name: str, limit: int | None, namespace: str, options: LenderOptions) -> Client:
    key = (ray.get_runtime_context().gcs_address, namespace, name)
    with _clients_lock:
        client = _clients.get(key)
        if client is not None and not client.gone:
            client.attach(limit)
            return client
        if limit is None and not _exists(name, namespace):
            raise ConfigError(f"there is no limiter {name!r} in namespace {namespace!r} yet: pass a limit to create it")
        finder = _LenderFinder(name, limit, namespace, options)

        async def resolve() -> Address:
            return await asyncio.get_running_loop().run_in_executor(None, finder.find)

        client = Client(name, limit, resolve=resolve)
        client.connect(_ATTACH_SECONDS)
        finder.made = True
        _clients[key] = client
        return client


class _LenderFinder:
    """Finds the lender, also after a restart. Creates it only the first time."""

    def __init__(self, name: str, limit: int | None, namespace: str, options: LenderOptions) -> None:
        self._name = name
        self._limit = limit
        self._namespace = namespace
        self._options = options
        self._records = Records(namespace, name)
        self._found: Address | None = None
        self._lender: Any = None
        self.made = False

    def find(self) -> Address:
        """Find the lender's address. Blocks.

        Raises:
            LimiterError: it does not answer, but may answer later.
            LimiterClosedError: it was stopped, or this process left the cluster.
        """
        self._check_connection()
        if self._lender is None:
            self._lender = self._look_up() if self.made else self._look_up_or_make()
        try:
            self._found = self._ask()
        except ray.exceptions.ActorDiedError as error:
            self._lender = None  # it is dead for good; find another with its name, or create one
            raise LimiterError(f"limiter {self._name!r} has ended: {error}") from error
        except ray.exceptions.RayError as error:
            raise LimiterError(f"limiter {self._name!r} does not answer: {error}") from error
        return self._found

    def _ask(self) -> Address:
        """Ask the lender and the records at once: a call to a restarting actor may take two seconds too long."""
        asked = self._lender.address.remote()
        until = time.monotonic() + _ATTACH_SECONDS
        for look in itertools.count():
            pause = _LOOK_SECONDS[min(look, len(_LOOK_SECONDS) - 1)]
            if ray.wait([asked], timeout=pause)[0] or time.monotonic() > until:
                break
            self._check_connection()
            published = self._published()
            if published not in (None, self._found):
                return published
        return Address(*ray.get(asked, timeout=1.0))

    def _check_connection(self) -> None:
        if not ray.is_initialized():  # or asking would start a cluster
            raise LimiterClosedError(f"limiter {self._name!r}: this process is no longer connected to Ray")

    def _published(self) -> Address | None:
        """Not used the first time: a lender with this name that was killed long ago leaves its address behind."""
        if Records.kept and self._found is not None:
            with contextlib.suppress(Exception):  # the call to the actor is still running
                return Address(*self._records.read("address"))
        return None

    def _look_up(self) -> Any:
        try:
            return ray.get_actor(PREFIX + self._name, self._namespace)
        except ValueError:
            raise LimiterClosedError(f"limiter {self._name!r} was stopped") from None

    def _look_up_or_make(self) -> Any:
        if self._limit is None:
            return self._look_up()
        return (
            ray.remote(lender_class(self._name, self._namespace, self._limit, self._options))
            .options(
                name=PREFIX + self._name,
                namespace=self._namespace,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                num_cpus=0,
                scheduling_strategy=_prefer_head_node(),
            )
            .remote()
        )


def _detach(client: Client) -> Any:
    with _clients_lock:
        for key, known in list(_clients.items()):
            if known is client:
                if client.detach():
                    return None
                del _clients[key]
                return client.close()
    return None


def _exists(name: str, namespace: str) -> bool:
    try:
        ray.get_actor(PREFIX + name, namespace)
    except ValueError:
        return False
    return True


def _prefer_head_node() -> Any:
    """Place it on the head node, whose loss ends the cluster anyway, so that losing another node does not matter."""
    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return "DEFAULT"


def _forget() -> None:
    """In a forked child: the connections belong to the parent."""
    global _clients_lock
    _clients_lock = threading.RLock()
    _clients.clear()


def _leave_all() -> None:
    with _clients_lock:
        leaving = [client.close() for client in _clients.values() if not client.desk.in_use]
        _clients.clear()
    for one in leaving:
        with contextlib.suppress(Exception):
            one.result(1.0)


os.register_at_fork(after_in_child=_forget)
atexit.register(_leave_all)


# Statistics -----------------------------------------------------------------------------------------------------------


class LimiterReader:
    """Reads the statistics of a cluster's limiter without borrowing permits from it."""

    def __init__(self, name: str, *, namespace: str = NAMESPACE) -> None:
        self.name = name
        self._namespace = namespace

    def read_statistics(self) -> LimiterStatistics:
        """Blocks for up to five seconds.

        Raises:
            LimiterError, ValueError, RayError: it is not there, or did not answer.
        """
        if not ray.is_initialized():  # or asking would start a cluster
            raise LimiterError(f"limiter {self.name!r}: this process is not connected to Ray")
        lender = ray.get_actor(f"{PREFIX}{self.name}", self._namespace)
        return read_statistics(ray.get(lender.statistics.remote(), timeout=_READ_SECONDS))


def read_statistics(found: Mapping[str, Any]) -> LimiterStatistics:
    """Parse statistics received over the wire."""
    return _statistics.validate_python(found)
