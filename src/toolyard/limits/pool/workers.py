"""Runs functions under a named limiter: this process's or, if Ray is connected, the cluster's."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from toolyard.errors import ConfigError, LimiterError, MissingDependencyError
from toolyard.limits.background import background
from toolyard.limits.local import LocalLimiter
from toolyard.limits.pool.local import ExecutionPool, PoolMode
from toolyard.limits.protocol import DEFAULT_NAME, Limiter, Permit

T = TypeVar("T")
P = ParamSpec("P")


class ExecutionWorker:
    """Runs functions for the threads that call `execute`, each under a permit of the limiter `name`.

    In thread mode a function runs in the calling thread. In process mode it runs in one of `num_workers` child
    processes, for which calls wait in order; `close` ends them.
    """

    def __init__(
        self,
        enable_global_rate_limit: bool = True,
        rate_limit: int = 10,
        *,
        num_workers: int = 1,
        mode: PoolMode = PoolMode.ThreadMode,
        name: str = DEFAULT_NAME,
        tenant: str = "",
        cluster: bool | None = None,
    ) -> None:
        self._limiter = named_limiter(name, rate_limit, cluster) if enable_global_rate_limit else None
        self._tenant = tenant
        self._processes = (
            ExecutionPool(num_workers, self._limiter, mode=mode, tenant=tenant)
            if mode is PoolMode.ProcessMode
            else None
        )

    def execute(self, fn: Callable[P, T], /, *fn_args: P.args, **fn_kwargs: P.kwargs) -> T:
        """Run `fn` and return its result. What it raises is raised here, with its traceback.

        Raises:
            ExecutionWorkerDiedError: in process mode, the process that ran it died.
            OutcomeLostError: in process mode, its result or exception cannot be pickled.
        """
        if self._processes is not None:
            call = self._processes.execute(fn, *fn_args, **fn_kwargs)
            try:
                return call.result()
            finally:
                call.cancel()  # needed if a signal interrupts the wait
        with self._permit(getattr(fn, "__qualname__", type(fn).__qualname__)):
            return fn(*fn_args, **fn_kwargs)

    def ping(self) -> bool:
        """Return True: the worker is up."""
        return True

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def _permit(self, label: str) -> Permit | contextlib.nullcontext[None]:
        if self._limiter is None:
            return contextlib.nullcontext()
        return self._limiter.permit(self._tenant, label=label)


class PermitBucket:
    """The limit by itself, for code that acquires and releases in different places. Works from any thread.

    Prefer `with limiter.permit()`, which cannot forget to release.
    """

    def __init__(self, rate_limit: int | None, name: str = DEFAULT_NAME, cluster: bool | None = None) -> None:
        self._limiter = named_limiter(name, rate_limit, cluster)
        self._held: deque[Permit] = deque()

    def acquire(self) -> None:
        """Block until a permit is available."""
        permit = self._limiter.permit(label="TokenBucketWorker.acquire")
        permit.__enter__()
        self._held.append(permit)

    def release(self) -> None:
        """Give back the permit acquired first.

        Raises:
            LimiterError: none is held through this object.
        """
        try:
            permit = self._held.popleft()
        except IndexError:
            raise LimiterError("release() without acquire(): no permit is held here") from None
        permit.__exit__(None, None, None)

    def get_current_count(self) -> int:
        """Permits in use under this name, by any process. Counts of other processes are up to a second old."""
        return background().run(self._limiter.statistics()).result().in_flight


def named_limiter(name: str, limit: int | None, cluster: bool | None) -> Limiter:
    if on_cluster(cluster):
        return cluster_limiter(name, limit)
    if limit is None:
        raise ConfigError(f"limiter {name!r}: a limit is required without Ray")
    return LocalLimiter(limit, name=name)


def cluster_limiter(name: str, limit: int | None) -> Limiter:
    """
    Raises:
        MissingDependencyError, ConfigError: there is no Ray, or no connection to it.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingDependencyError("ray", "ray", "a cluster-wide execution pool") from error
    from toolyard.limits.cluster.ray import RayLimiter

    if not ray.is_initialized():
        raise ConfigError("a cluster-wide execution pool needs a connection to Ray: call ray.init() first")
    return RayLimiter(name, limit)


def on_cluster(cluster: bool | None) -> bool:
    """Whether to use the cluster's limiter. None: if this process is connected to Ray."""
    if cluster is not None:
        return cluster
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
