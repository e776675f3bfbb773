"""verl's names for running functions under a limit: a pool, its worker, and the limit by itself.

    pool = init_execution_pool(num_workers=10, rate_limit=10)
    result = await pool.execute.remote(function, argument)

In a Ray job the pool is an actor and the limit is cluster-wide; without Ray both live in this process. *Connected to
Ray* means that this process has called `ray.init()` or belongs to Ray; nothing here starts Ray. `cluster` forces one or
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from toolyard.errors import MissingDependencyError
from toolyard.limits.local import LocalLimiter
from toolyard.limits.pool.local import ExecutionPool, PoolMode
from toolyard.limits.pool.workers import PermitBucket, on_cluster
from toolyard.limits.protocol import DEFAULT_NAME


class RemoteCallable(Protocol):
    def remote(self, fn: Callable[..., Any], /, *fn_args: Any, **fn_kwargs: Any) -> Any:
        """Return an awaitable: a `Call` or, for an actor, an `ObjectRef`, which `ray.get` accepts as well."""
        ...


class RemotePing(Protocol):
    def remote(self) -> Any:
        """Return an awaitable for True."""
        ...


class RemotePool(Protocol):
    """The common interface of an `ExecutionPool` and a Ray actor."""

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
    name: str = DEFAULT_NAME,
    tenant: str = "",
    cluster: bool | None = None,
) -> RemotePool:
    """Create a pool that runs `num_workers` functions at once, and at most `rate_limit` across all pools with `name`.

    If connected to Ray, it is an actor: somewhere in the cluster, requiring no CPU, and ended with the process that
    created it, with its last handle or by `ray.kill`. Otherwise it is an `ExecutionPool`. `tenant` is the unit of
    fairness for its permits.

    Raises:
        LimitConflictError: a limiter with this name has another `rate_limit`.
        MissingDependencyError, ConfigError: `cluster=True` without Ray, or without a connection to it.
    """
    if on_cluster(cluster):
        return _actors().start_actor(num_workers, enable_global_rate_limit, rate_limit, mode, name, tenant)
    limiter = LocalLimiter(rate_limit, name=name) if enable_global_rate_limit else None
    return ExecutionPool(num_workers, limiter, mode=mode, tenant=tenant)


class TokenBucketWorker(PermitBucket):
    """The limit by itself, also as a Ray actor that any process can use:
    `TokenBucketWorker.options(name=…, get_if_exists=True).remote(10)`, then `ray.get(bucket.acquire.remote())`.

    A process that acquires a permit there and dies does not give it back.
    """

    @classmethod
    def options(cls, *, name: str | None = None, **options: Any) -> RemoteBucket:
        """Ray's actor options. The limit is shared by all pools and buckets with `name`."""
        return RemoteBucket(name, options)

    @classmethod
    def remote(cls, rate_limit: int | None = None) -> Any:
        """An actor without a name. See `RemoteBucket.remote`."""
        return cls.options().remote(rate_limit)


class RemoteBucket:
    """The result of `TokenBucketWorker.options`."""

    def __init__(self, name: str | None, options: Mapping[str, Any]) -> None:
        self._name = name
        self._options = options

    def remote(self, rate_limit: int | None = None) -> Any:
        """Create the actor. Without `rate_limit`, use that of the existing limiter with this name.

        Raises:
            LimitConflictError: a limiter with this name has another `rate_limit`.
            MissingDependencyError, ConfigError: there is no Ray, no connection to it, or no limiter with this name.
        """
        return _actors().start_bucket(self._name, rate_limit, DEFAULT_NAME, self._options)


def _actors() -> Any:
    try:
        from toolyard.limits.pool import ray as actors
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingDependencyError("ray", "ray", "a cluster-wide execution pool") from error
    return actors
