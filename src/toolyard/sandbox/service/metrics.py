"""The service's Prometheus metrics. The state of the pool is read on each scrape, not tracked separately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolyard._version import __version__
from toolyard.sandbox.protocol import CellResult, Execution

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ServedStatistics(Protocol):
    """The state of a sandbox that can be served, as `LocalSandbox.statistics()` reports it."""

    @property
    def workers(self) -> int: ...
    @property
    def busy(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def sessions(self) -> int: ...
    @property
    def isolation(self) -> str: ...
    @property
    def zygotes(self) -> Mapping[str, int]: ...


class ServiceMetrics:
    """One per service, with its own registry, so that two services in one process do not add up."""

    def __init__(self, statistics: Callable[[], ServedStatistics], in_flight: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._executions = Counter(
            "toolyard_executions", "Finished programs, by verdict.", ["language", "verdict"], registry=self._registry
        )
        self._cells = Counter(
            "toolyard_cells", "Cells of notebooks and sessions run to a verdict.", ["verdict"], registry=self._registry
        )
        self._failures = Counter(
            "toolyard_failures", "Programs that could not be run, by error.", ["error"], registry=self._registry
        )
        self._responses = Counter(
            "toolyard_http_responses", "HTTP responses sent.", ["route", "status"], registry=self._registry
        )
        self._queued = Histogram(
            "toolyard_queue_seconds", "Wait for a free worker.", buckets=_SECONDS, registry=self._registry
        )
        self._ran = Histogram("toolyard_run_seconds", "Compilation and run.", buckets=_SECONDS, registry=self._registry)
        # `labels()` takes a lock and builds strings on every call; the hot path looks up its child here instead.
        self._execution_children: dict[tuple[str, str], Counter] = {}
        self._response_children: dict[tuple[str, int], Counter] = {}
        self._registry.register(_Pool(statistics, in_flight))

    def executed(self, language: str, execution: Execution) -> None:
        key = (language, execution.verdict.value)
        child = self._execution_children.get(key)
        if child is None:
            child = self._execution_children[key] = self._executions.labels(*key)
        child.inc()
        self._queued.observe(execution.queue_seconds)
        self._ran.observe(execution.wall_seconds)

    def ran_cell(self, result: CellResult) -> None:
        self._cells.labels(result.verdict.value).inc()

    def failed(self, error: BaseException) -> None:
        self._failures.labels(type(error).__name__).inc()

    def answered(self, route: str, status: int) -> None:
        child = self._response_children.get((route, status))
        if child is None:
            child = self._response_children[route, status] = self._responses.labels(route, str(status))
        child.inc()

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _Pool(Collector):
    def __init__(self, statistics: Callable[[], ServedStatistics], in_flight: Callable[[], int]) -> None:
        self._statistics = statistics
        self._in_flight = in_flight

    def collect(self) -> Iterable[Metric]:
        now = self._statistics()
        yield GaugeMetricFamily("toolyard_in_flight", "Requests running or waiting.", value=self._in_flight())
        yield GaugeMetricFamily("toolyard_waiting", "Programs waiting for a worker.", value=now.waiting)
        yield GaugeMetricFamily("toolyard_workers", "Programs that can run at once.", value=now.workers)
        yield GaugeMetricFamily("toolyard_busy_workers", "Workers running a program.", value=now.busy)
        yield GaugeMetricFamily("toolyard_sessions", "Open sessions.", value=now.sessions)
        zygotes = GaugeMetricFamily("toolyard_zygotes", "Live workers by profile.", labels=["profile"])
        for profile, count in now.zygotes.items():
            zygotes.add_metric([profile], count)
        yield zygotes
        level = GaugeMetricFamily("toolyard_isolation_info", "The isolation level in effect.", labels=["level"])
        level.add_metric([now.isolation], 1)
        yield level
        build = GaugeMetricFamily("toolyard_build_info", "The running version.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
