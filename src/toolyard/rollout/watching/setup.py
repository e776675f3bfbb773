"""Starts what watches a run, as its settings say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from toolyard.records.trajectory import Trajectory
from toolyard.rollout.config import RolloutConfig
from toolyard.rollout.observer import Observer, Observers
from toolyard.rollout.summary import Summary

if TYPE_CHECKING:
    from toolyard.records.traces.opentelemetry import TraceReport, TraceSender


@asynccontextmanager
async def watched(
    config: RolloutConfig, observer: Observer, sent: Callable[[TraceReport], None]
) -> AsyncGenerator[Observer]:
    """Start what `config.logs`, `config.metrics` and `config.otel` ask for. Yields the observer for the run; `sent` is
    told at the end what became of the traces, if there are any.

    Raises:
        ConfigError: the log cannot be written, the port cannot be used, or the traces' endpoint is not a URL.
        MissingDependencyError: prometheus-client or OpenTelemetry is not installed.
    """
    observers: list[Observer] = []
    async with AsyncExitStack() as stack:
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
        if config.otel is not None:
            from toolyard.records.traces.opentelemetry import TraceSender

            sender = TraceSender(config.otel)
            stack.push_async_callback(_close, sender, sent)
            observers.append(_Sending(sender))
        if observers:
            observer = Observers(*observers, observer)
        if server is not None:
            observer.note(f"metrics: {server.url}/metrics")
        yield observer


class _Sending(Observer):
    def __init__(self, sender: TraceSender) -> None:
        self._sender = sender

    def ended(self, trajectory: Trajectory, summary: Summary) -> None:
        self._sender.send(trajectory)


async def _close(sender: TraceSender, sent: Callable[[TraceReport], None]) -> None:
    sent(await asyncio.to_thread(sender.close))
