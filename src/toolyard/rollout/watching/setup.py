"""Starts what watches a run, as its settings say."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.observer import Observer, Observers


@contextmanager
def watched(config: RolloutConfig, observer: Observer) -> Generator[Observer]:
    """Start what `config.logs` and `config.metrics` ask for. Yields the observer for the run.

    Raises:
        ConfigError: the log cannot be written, or the port cannot be used.
        MissingDependencyError: prometheus-client is not installed.
    """
    observers: list[Observer] = []
    with ExitStack() as stack:
        if config.logs is not None:
            from toolyard.rollout.watching.logs import LogObserver, logging_to

            stack.enter_context(logging_to(config.logs))
            observers.append(LogObserver())
        server = None
        if config.metrics is not None:
            from toolyard.rollout.watching.prometheus_client import RunMetrics
            from toolyard.rollout.watching.server import MetricsServer

            metrics = RunMetrics()
            server = stack.enter_context(MetricsServer(config.metrics, metrics, config.rollout_data_dir))
            observers += [metrics, server]
        if observers:
            observer = Observers(*observers, observer)
        if server is not None:
            observer.note(f"metrics: {server.url}/metrics")
        yield observer
