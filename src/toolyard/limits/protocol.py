"""The contract of a limiter, and its statistics.

A *permit* is the right to run one execution. A *tenant* is the unit of fairness: a job, a tool, a trajectory; whoever
asks for a permit names it. A *holder* is a permit in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

DEFAULT_NAME = "rate-limiter"
"""The limiter that all code interpreters, code judges and execution pools share; the name is verl's."""


@runtime_checkable
class Permit(Protocol):
    """The right to run one execution. Enter it once, with `async with` or, from a thread, with `with`.

    Entering waits for its turn; leaving gives it back, whatever happened inside. Cancelling while it waits, or just as
    it is granted, loses nothing.

    Raises, on entering:
        LimiterTimeoutError: no permit became available within `timeout` seconds.
        LimiterClosedError: the limiter was closed.
    Raises, on leaving:
        PermitExpiredError: it was held longer than `max_hold_seconds` and taken back; an async body was cancelled.
    """

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def refused(self, retry_after: float | None = None, *, unavailable: bool = False) -> None:
        """Report that the service refused this execution: it is full (429), or `unavailable` (503).

        An adaptive limiter lowers its limit; nothing starts for `retry_after` seconds. A `SandboxBusyError` that leaves
        the block counts as a refusal too.
        """
        ...


@runtime_checkable
class Limiter(Protocol):
    """At most `limit` permits in flight at any moment.

    Waiting is first come, first served within a tenant, and weighted fair between tenants: if two tenants wait, one
    with twice the weight starts twice as often. No one waits while a permit is free.
    """

    @property
    def limit(self) -> int: ...

    def permit(self, tenant: str = "", *, weight: float = 1.0, timeout: float | None = None, label: str = "") -> Permit:
        """Create a permit; enter it to take it. `label` names the execution in `statistics()`, in case it hangs."""
        ...

    async def resize(self, limit: int) -> None:
        """Change the limit. If lowered, running executions continue, and none start until few enough are left."""
        ...

    async def statistics(self) -> LimiterStatistics: ...

    async def close(self) -> None:
        """Close the limiter: waiters get a `LimiterClosedError`; permits in use are given back as they end."""
        ...


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    weight: float
    in_flight: int
    waiting: int
    granted: int
    """Permits granted to it so far."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A permit in use. Those held longest come first, so a hung one is at the top."""

    tenant: str
    label: str
    seconds: float
    """How long it has been held."""
    process: str
    """Host and pid."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What one process has borrowed from a cluster's limit."""

    process: str
    permits: int
    in_flight: int
    waiting: int
    silent_seconds: float
    """Time since it was last heard from. A process that is alive but silent keeps its permits and shows up here."""
    state: str
    """`connected`; `stalled`: connected, but silent; `lost`: its connection broke, its permits come back soon."""


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Seconds between asking for a permit and getting it, over the limiter's life. Accurate to a factor of 1.19."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class LimiterStatistics:
    name: str
    limit: int
    effective_limit: int
    """Lower than `limit` while an adaptive limiter finds that the service can handle less."""
    in_flight: int
    waiting: int
    wait: WaitTimes
    tenants: Mapping[str, TenantStatistics]
    holders: tuple[Holder, ...]
    """The permits held longest, at most a few per process."""
    refused: int = 0
    """Executions the service refused."""
    paused_seconds: float = 0.0
    """How much longer nothing starts, because the service asked for a pause."""
    expired: int = 0
    """Permits that were held longer than `max_hold_seconds` and taken back."""
    reclaimed: int = 0
    """Permits that came back because their process died."""
    epoch: str = ""
    """Changes when a cluster's limiter is restarted."""
    leases: tuple[Lease, ...] = field(default=())
