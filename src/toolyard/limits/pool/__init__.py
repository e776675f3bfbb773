"""verl's execution pool: runs functions in threads, processes or a Ray actor, under a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.limits.pool.local import Call, ExecutionPool, PoolMode
    from toolyard.limits.pool.process import OutcomeLostError
    from toolyard.limits.pool.verl import RemotePool, TokenBucketWorker, init_execution_pool
    from toolyard.limits.pool.workers import ExecutionWorker

__all__ = [
    "Call",
    "ExecutionPool",
    "ExecutionWorker",
    "OutcomeLostError",
    "PoolMode",
    "RemotePool",
    "TokenBucketWorker",
    "init_execution_pool",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.limits.pool.local": "Call ExecutionPool PoolMode",
        "toolyard.limits.pool.process": "OutcomeLostError",
        "toolyard.limits.pool.verl": "RemotePool TokenBucketWorker init_execution_pool",
        "toolyard.limits.pool.workers": "ExecutionWorker",
    },
)
