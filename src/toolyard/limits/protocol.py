"""What a limiter promises, and what it tells about itself.

A *permit* is the right to run one execution. A *tenant* is the unit of fairness: a job, a tool, a trajectory; whoever
asks for the permit says which. A *holder* is a permit in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

DEFAULT_NAME = "rate-limiter"
"""The limiter that all code interpreters, code judges and execution pools share, by the name that verl gave it."""


@runtime_checkable
class Permit(Protocol):
    """One right to run. Entered once, with `async with` or, from a thread, with `with`.

    Entering waits for its turn; leaving gives it back, whatever happened inside. Cancelling while it waits, or in the
    very moment it is granted, loses nothing.

    Raises, on entering:
        LimiterTimeoutError: its turn did not come within `timeout` seconds.
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
        """The service sent this execution away: it is full (429), or `unavailable` (503).

        An adaptive limiter lowers its limit; `retry_after` seconds pass before anybody starts again. A
        `SandboxBusyError` that leaves the block counts as this.
        """
        ...


@runtime_checkable
class Limiter(Protocol):
    """At most `limit` permits in flight at any moment.

    Waiting is first come, first served within a tenant, and weighted fair between tenants: of two that both wait, one
    of twice the weight starts twice as often. Nobody waits while a permit is free.
    """

    @property
    def limit(self) -> int: ...

    def permit(self, tenant: str = "", *, weight: float = 1.0, timeout: float | None = None, label: str = "") -> Permit:
        """A permit, not yet taken: enter it. `label` names the execution in `statistics()`, should it hang."""
        ...

    async def resize(self, limit: int) -> None:
        """Change the limit. Downwards, what runs goes on, and nothing starts until few enough are left."""
        ...

    async def statistics(self) -> LimiterStatistics: ...

    async def close(self) -> None:
        """Let go: whoever waits gets a `LimiterClosedError`; permits in use are given back as they end."""
        ...


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    weight: float
    in_flight: int
    waiting: int
    granted: int
    """Permits ever given to it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A permit in use. Those held longest come first: a hung one is found at the top."""

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
    """Since it was last heard of. A process that is alive but says nothing keeps its permits, and is found here."""
    state: str
    """`connected`; `stalled`: connected, but silent; `lost`: its connection broke, its permits come back soon."""


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Seconds between asking for a permit and getting it, over the limiter's life. Exact to a factor of 1.19."""

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
    """Lower than `limit` while an adaptive limiter finds that the service carries less."""
    in_flight: int
    waiting: int
    wait: WaitTimes
    tenants: Mapping[str, TenantStatistics]
    holders: tuple[Holder, ...]
    """The ones held longest, at most a few of each process."""
    refused: int = 0
    """Executions the service sent away."""
    paused_seconds: float = 0.0
    """How much longer nothing starts, because the service asked for it."""
    expired: int = 0
    """Permits that were held longer than `max_hold_seconds` and taken back."""
    reclaimed: int = 0
    """Permits that came back because their process died."""
    epoch: str = ""
    """Changes when a cluster's limiter is restarted."""
    leases: tuple[Lease, ...] = field(default=())
