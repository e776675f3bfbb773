"""The seeds' names for running functions under a limit: a pool, its worker, and the limit by itself.

    pool = init_execution_pool(num_workers=10, rate_limit=10)
    result = await pool.execute.remote(function, argument)

In a Ray job the pool is an actor and the limit is the cluster's; without Ray both live in this process. *Connected to
Ray* means that this process has called `ray.init()` or is one of Ray's own; nothing here starts Ray. `cluster` forces
one or the other.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

from toolyard.errors import ConfigError, LimiterError, MissingDependencyError

from .background import background
from .local import LocalLimiter
from .pool_local import Call, ExecutionPool, PoolMode
from .protocol import Limiter, Permit

__all__ = ["Call", "ExecutionPool", "ExecutionWorker", "PoolMode", "TokenBucketWorker", "init_execution_pool"]

T = TypeVar("T")
P = ParamSpec("P")
_NAME = "rate-limiter"


class RemoteCallable(Protocol):
    def remote(self, fn: Callable[..., Any], /, *fn_args: Any, **fn_kwargs: Any) -> Any:
        """To be awaited: a `Call`, or of an actor an `ObjectRef`, which `ray.get` takes as well."""
        ...


class RemotePing(Protocol):
    def remote(self) -> Any:
        """To be awaited, likewise: True."""
        ...


class RemotePool(Protocol):
    """What an `ExecutionPool` and a Ray actor have in common."""

    @property
    def execute(self) -> RemoteCallable: ...

    @property
    def ping(self) -> RemotePing: ...


def init_execution_pool(
    num_workers: int,
    enable_global_rate_limit: bool = True,
    rate_limit: int = 10,
    mode: PoolMode = PoolMode.ThreadMode,
    *,
    name: str = _NAME,
    tenant: str = "",
    cluster: bool | None = None,
) -> RemotePool:
    """A pool that runs `num_workers` functions at once, and at most `rate_limit` of all pools with that `name`.

    Connected to Ray, it is an actor: somewhere in the cluster, asking for no CPU, ended with the process that made it,
    with the last handle or by `ray.kill`. Otherwise it is an `ExecutionPool`. `tenant` is whom its permits are
    fair to.

    Raises:
        LimitConflictError: a limiter of that name has another `rate_limit`.
        MissingDependencyError, ConfigError: `cluster=True` without Ray, or without a connection to it.
    """
    if _on_cluster(cluster):
        return _pool_ray().start_actor(num_workers, enable_global_rate_limit, rate_limit, mode, name, tenant)
    limiter = LocalLimiter(rate_limit, name=name) if enable_global_rate_limit else None
    return ExecutionPool(num_workers, limiter, mode=mode, tenant=tenant)


class ExecutionWorker:
    """Runs functions for the threads that call `execute`, each under a permit of the limiter called `name`.

    In thread mode a function runs in the thread that calls. In process mode it runs in one of `num_workers` child
    processes, for which calls wait in order; `close` ends them.
    """

    def __init__(
        self,
        enable_global_rate_limit: bool = True,
        rate_limit: int = 10,
        *,
        num_workers: int = 1,
        mode: PoolMode = PoolMode.ThreadMode,
        name: str = _NAME,
        tenant: str = "",
        cluster: bool | None = None,
    ) -> None:
        self._limiter = _limiter(name, rate_limit, cluster) if enable_global_rate_limit else None
        self._tenant = tenant
        self._processes = (
            ExecutionPool(num_workers, self._limiter, mode=mode, tenant=tenant)
            if mode is PoolMode.ProcessMode
            else None
        )

    def execute(self, fn: Callable[P, T], /, *fn_args: P.args, **fn_kwargs: P.kwargs) -> T:
        """Block for what `fn` returns. What it raises is raised here, with its traceback.

        Raises:
            ExecutionWorkerDiedError: in process mode, the process that ran it died.
            OutcomeLostError: in process mode, what it returned or raised cannot be pickled.
        """
        if self._processes is not None:
            call = self._processes.execute(fn, *fn_args, **fn_kwargs)
            try:
                return call.result()
            finally:
                call.cancel()  # of use when a signal interrupts the wait
        with self._permit(getattr(fn, "__qualname__", type(fn).__qualname__)):
            return fn(*fn_args, **fn_kwargs)

    def ping(self) -> bool:
        """True: it is up."""
        return True

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def _permit(self, label: str) -> Permit | contextlib.nullcontext[None]:
        if self._limiter is None:
            return contextlib.nullcontext()
        return self._limiter.permit(self._tenant, label=label)


class TokenBucketWorker:
    """The limit by itself, for code that takes and gives in different places. From any thread.

    As a Ray actor, that any process may ask: `TokenBucketWorker.options(name=…, get_if_exists=True).remote(10)`, then
    `ray.get(bucket.acquire.remote())`. Who takes a permit there and dies does not give it back.

    Prefer `with limiter.permit()`, which cannot forget to give back.
    """

    def __init__(self, rate_limit: int | None, name: str = _NAME, cluster: bool | None = None) -> None:
        self._limiter = _limiter(name, rate_limit, cluster)
        self._held: deque[Permit] = deque()

    @classmethod
    def options(cls, *, name: str | None = None, **options: Any) -> RemoteBucket:
        """Ray's options of an actor. The limit is that of all pools and buckets called `name`."""
        return RemoteBucket(name, options)

    @classmethod
    def remote(cls, rate_limit: int | None = None) -> Any:
        """An actor without a name of its own. See `RemoteBucket.remote`."""
        return cls.options().remote(rate_limit)

    def acquire(self) -> None:
        """Block until there is a permit."""
        permit = self._limiter.permit(label="TokenBucketWorker.acquire")
        permit.__enter__()
        self._held.append(permit)

    def release(self) -> None:
        """Give back the one that was taken first.

        Raises:
            LimiterError: none is held through this object.
        """
        try:
            permit = self._held.popleft()
        except IndexError:
            raise LimiterError("release() without acquire(): no permit is held here") from None
        permit.__exit__(None, None, None)

    def get_current_count(self) -> int:
        """Permits in use under this name, whoever holds them. Those of other processes are up to a second old."""
        return background().run(self._limiter.statistics()).result().in_flight


class RemoteBucket:
    """What `TokenBucketWorker.options` returns."""

    def __init__(self, name: str | None, options: Mapping[str, Any]) -> None:
        self._name = name
        self._options = options

    def remote(self, rate_limit: int | None = None) -> Any:
        """The actor. Without `rate_limit`, that of the limiter which has this name already.

        Raises:
            LimitConflictError: a limiter of that name has another `rate_limit`.
            MissingDependencyError, ConfigError: there is no Ray, no connection to it, or no limiter of that name.
        """
        return _pool_ray().start_bucket(self._name, rate_limit, _NAME, self._options)


def _limiter(name: str, limit: int | None, cluster: bool | None) -> Limiter:
    if _on_cluster(cluster):
        return _pool_ray().cluster_limiter(name, limit)
    if limit is None:
        raise ConfigError(f"limiter {name!r}: without Ray it needs a limit")
    return LocalLimiter(limit, name=name)


def _on_cluster(cluster: bool | None) -> bool:
    if cluster is not None:
        return cluster
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _pool_ray() -> Any:
    try:
        from . import pool_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingDependencyError("ray", "ray", "a cluster-wide execution pool") from error
    return pool_ray
