"""The execution pool in a Ray job: an actor, under a cluster-wide limit."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import ray

from toolyard.errors import ConfigError
from toolyard.limits.background import background
from toolyard.limits.pool.local import PoolMode
from toolyard.limits.pool.process import OutcomeLostError
from toolyard.limits.pool.workers import ExecutionWorker, PermitBucket, cluster_limiter

T = TypeVar("T")
P = ParamSpec("P")


def start_actor(
    num_workers: int, enable_global_rate_limit: bool, rate_limit: int, mode: PoolMode, name: str, tenant: str
) -> Any:
    """See `init_execution_pool`. If the actor's process dies, callers whose functions were running or waiting get Ray's
    `ActorDiedError` or `ActorUnavailableError`, and Ray restarts it: it has no state to lose."""
    if enable_global_rate_limit:
        # Raise a limit conflict in the caller. In the actor it would only make the actor die.
        background().run(cluster_limiter(name, rate_limit).close()).result()
    _check_connection()
    remote: Any = ray.remote(RayExecutionWorker)  # pyright: ignore
    return remote.options(max_concurrency=num_workers, num_cpus=0, max_restarts=-1).remote(
        enable_global_rate_limit,
        rate_limit,
        num_workers=num_workers,
        mode=mode,
        name=name,
        tenant=tenant,
        cluster=True,
    )


def start_bucket(name: str | None, rate_limit: int | None, limiter: str, options: Mapping[str, Any]) -> Any:
    """See `RemoteBucket.remote`. `limiter`: the limiter's name, if the actor has none."""
    background().run(cluster_limiter(name or limiter, rate_limit).close()).result()  # raises a limit conflict here
    make = cast("Any", ray).remote(concurrency_groups={"acquire": 1, "release": 10})
    return (
        make(RayTokenBucketWorker)
        .options(name=name, num_cpus=0, **options)
        .remote(rate_limit, name or limiter, cluster=True)
    )


def _in_group(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    return ray.method(concurrency_group=name)  # pyright: ignore


class RayTokenBucketWorker(PermitBucket):
    """The actor. Callers of `acquire` are served in order, and never block those that release."""

    @_in_group("acquire")
    def acquire(self) -> None:
        super().acquire()

    @_in_group("release")
    def release(self) -> None:
        super().release()


class RayExecutionWorker(ExecutionWorker):
    """The actor."""

    def execute(self, fn: Callable[P, T], /, *fn_args: P.args, **fn_kwargs: P.kwargs) -> T:
        try:
            return super().execute(fn, *fn_args, **fn_kwargs)
        except Exception:
            raise
        except BaseException as error:
            # Ray treats sys.exit() as the end of the actor, and KeyboardInterrupt as a cancelled task.
            lost = OutcomeLostError(f"the function raised {error!r}, which would end the actor")
            lost.add_note("".join(traceback.format_exception(error)).rstrip())
            raise lost from None


def _check_connection() -> None:
    if not ray.is_initialized():
        raise ConfigError("a cluster-wide execution pool needs a connection to Ray: call ray.init() first")
