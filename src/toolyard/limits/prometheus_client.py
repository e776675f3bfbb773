"""Limiters for Prometheus: `REGISTRY.register(LimiterCollector(limiter))`. Statistics are read on each scrape."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from toolyard.errors import ConfigError, MissingDependencyError
from toolyard.limits.desk import OTHERS
from toolyard.limits.protocol import LimiterStatistics, TenantStatistics

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingDependencyError("prometheus_client", "server", "metrics of a limiter") from error

MAX_TENANTS = 100
"""Tenants with their own series, the busiest first. A tenant may be a trajectory: all would swamp Prometheus."""

_STATES = ("connected", "stalled", "lost")
_GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "up": ("Whether the limiter answered this scrape.", ()),
    "limit": ("Permits that may be in flight.", ()),
    "effective_limit": ("The limit, lowered to what the service can handle.", ()),
    "in_flight": ("Permits in use.", ()),
    "waiting": ("Executions waiting for a permit.", ()),
    "paused_seconds": ("How much longer nothing starts, because the service asked for a pause.", ()),
    "wait_seconds": ("Wait for a permit, over the limiter's life.", ("quantile",)),
    "tenant_in_flight": ("Permits in use by tenant.", ("tenant",)),
    "tenant_waiting": ("Executions waiting for a permit by tenant.", ("tenant",)),
    "leases": ("Processes borrowing from a cluster's limit, by state.", ("state",)),
    "process_permits": ("Permits lent to a process, in use or not.", ("process",)),
    "longest_held_seconds": ("Age of the permit held longest.", ("tenant", "process")),
}
_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "granted": ("Permits granted.", ()),
    "refused": ("Executions the service refused.", ()),
    "expired": ("Permits held too long and taken back.", ()),
    "reclaimed": ("Permits reclaimed because their process died.", ()),
    "tenant_granted": ("Permits granted by tenant; (others): tenants without a series of their own.", ("tenant",)),
}
_log = logging.getLogger(__name__)


@runtime_checkable
class Readable(Protocol):
    """A limiter that can be read from any thread: `LocalLimiter`, `RayLimiter`."""

    @property
    def name(self) -> str: ...
    def read_statistics(self) -> LimiterStatistics: ...


class LimiterCollector(Collector):
    """Metrics `toolyard_limiter_*` of one or more limiters. Use one collector for all limiters of a registry.

    A scrape waits at most `timeout` seconds in total. A limiter that has not answered by then, or that fails, has
    `toolyard_limiter_up` 0 and no other series; the rest of the registry is scraped as usual.
    """

    def __init__(self, *limiters: Readable, timeout: float = 3.0, max_tenants: int = MAX_TENANTS) -> None:
        """`max_tenants`: tenants with their own series, the busiest first. 0: tenants have none, and the permit held
        longest does not name its own, for tenants that come and go."""
        self._limiters = limiters
        self._timeout = timeout
        self._max_tenants = max_tenants
        self._lock = threading.Lock()
        self._others = {limiter.name: _Others() for limiter in limiters}
        if len(self._others) < len(limiters):
            names = sorted(name for name, count in Counter(one.name for one in limiters).items() if count > 1)
            raise ConfigError(f"several limiters are named {', '.join(names)}: metrics need distinct names")

    def describe(self) -> Iterable[Metric]:
        """Tells a registry the metric names without asking any limiter."""
        return _Scrape().families.values()

    def collect(self) -> Iterable[Metric]:
        scrape = _Scrape()
        for name, now in read_all(self._limiters, self._timeout).items():
            scrape.add("up", name, now is not None)
            if now is None:
                continue
            _add_totals(scrape, name, now)
            if self._max_tenants:
                with self._lock:
                    _add_tenants(scrape, name, now.tenants, self._others[name], self._max_tenants)
            _add_processes(scrape, name, now, name_tenant=self._max_tenants > 0)
        return [family for family in scrape.families.values() if family.samples]


def read_all(limiters: Sequence[Readable], timeout: float = 3.0) -> dict[str, LimiterStatistics | None]:
    """The statistics of all limiters by name, within `timeout` seconds; None for those that did not answer."""
    deadline = time.monotonic() + timeout
    asked = [(limiter.name, _ask(limiter)) for limiter in limiters]
    found: dict[str, LimiterStatistics | None] = {}
    for name, answer in asked:
        try:
            found[name] = answer.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # whatever it is, the others must be read
            _log.warning("limiter %r cannot be scraped: %s", name, error or type(error).__name__)
            found[name] = None
    return found


def _ask(limiter: Readable) -> Future[LimiterStatistics]:
    """Read on a separate thread: the limiter may take longer than a scrape can wait."""
    answer: Future[LimiterStatistics] = Future()

    def read() -> None:
        try:
            answer.set_result(limiter.read_statistics())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=read, name=f"scrape of {limiter.name}", daemon=True).start()
    return answer


class _Scrape:
    """The result of one scrape: each metric with all its limiters."""

    def __init__(self) -> None:
        self.families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for key, (text, labels) in _GAUGES.items():
            self.families[key] = GaugeMetricFamily(f"toolyard_limiter_{key}", text, labels=["limiter", *labels])
        for key, (text, labels) in _COUNTERS.items():
            self.families[key] = CounterMetricFamily(f"toolyard_limiter_{key}", text, labels=["limiter", *labels])

    def add(self, key: str, limiter: str, value: float, *labels: str) -> None:
        self.families[key].add_metric([limiter, *labels], value)


def _add_totals(scrape: _Scrape, name: str, now: LimiterStatistics) -> None:
    scrape.add("limit", name, now.limit)
    scrape.add("effective_limit", name, now.effective_limit)
    scrape.add("in_flight", name, now.in_flight)
    scrape.add("waiting", name, now.waiting)
    scrape.add("paused_seconds", name, now.paused_seconds)
    wait = now.wait
    for quantile, seconds in (("0.5", wait.p50), ("0.9", wait.p90), ("0.99", wait.p99), ("1", wait.max)):
        scrape.add("wait_seconds", name, seconds, quantile)
    scrape.add("granted", name, sum(tenant.granted for tenant in now.tenants.values()))
    scrape.add("refused", name, now.refused)
    scrape.add("expired", name, now.expired)
    scrape.add("reclaimed", name, now.reclaimed)


def _add_tenants(
    scrape: _Scrape, name: str, tenants: Mapping[str, TenantStatistics], others: _Others, most: int
) -> None:
    ranked = sorted(tenants, key=lambda name: _busyness(tenants[name]), reverse=True)
    named = [tenant for tenant in ranked if tenant != OTHERS][:most]
    for tenant in named:
        scrape.add("tenant_in_flight", name, tenants[tenant].in_flight, tenant)
        scrape.add("tenant_waiting", name, tenants[tenant].waiting, tenant)
        scrape.add("tenant_granted", name, tenants[tenant].granted, tenant)
    granted = others.count(named, tenants)
    rest = [tenants[tenant] for tenant in tenants.keys() - set(named)]
    if rest or granted:
        scrape.add("tenant_in_flight", name, sum(tenant.in_flight for tenant in rest), OTHERS)
        scrape.add("tenant_waiting", name, sum(tenant.waiting for tenant in rest), OTHERS)
        scrape.add("tenant_granted", name, granted, OTHERS)


def _busyness(tenant: TenantStatistics) -> tuple[int, int]:
    return tenant.in_flight + tenant.waiting, tenant.granted


def _add_processes(scrape: _Scrape, name: str, now: LimiterStatistics, *, name_tenant: bool) -> None:
    if now.epoch:  # a cluster limiter; a local one has no leases
        states = Counter(lease.state for lease in now.leases)
        for state in (*_STATES, *sorted(states.keys() - set(_STATES))):
            scrape.add("leases", name, states[state], state)
    permits: Counter[str] = Counter()
    for lease in now.leases:
        permits[lease.process] += lease.permits  # a process that reconnected has two leases for a while
    for process, count in permits.items():
        scrape.add("process_permits", name, count, process)
    for holder in now.holders[:1]:
        scrape.add("longest_held_seconds", name, holder.seconds, holder.tenant if name_tenant else "", holder.process)


class _Others:
    """Counts permits granted to tenants that have no series of their own.

    Which tenants those are changes from scrape to scrape. A plain sum would shrink when a busy tenant gets its series,
    and Prometheus takes a shrinking counter for a reset: so only the increase since the last scrape is added.
    """

    def __init__(self) -> None:
        self._granted = 0
        self._before: Mapping[str, TenantStatistics] = {}

    def count(self, named: Sequence[str], tenants: Mapping[str, TenantStatistics]) -> int:
        before, self._before = self._before, tenants
        new = sum(tenant.granted for tenant in tenants.values()) - sum(tenant.granted for tenant in before.values())
        for name in named:
            known = before[name].granted if name in before else 0
            new -= max(0, tenants[name].granted - known)
        self._granted += max(0, new)
        return self._granted
