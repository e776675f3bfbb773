"""Opens the sender of traces that a run's settings ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from toolyard.records.trajectory import Trajectory
from toolyard.rollout.observer import Observer
from toolyard.rollout.summary import Summary

if TYPE_CHECKING:
    from toolyard.records.traces.opentelemetry import TraceReport, TraceSender


class _Sending(Observer):
    def __init__(self, sender: TraceSender) -> None:
        self._sender = sender

    def ended(self, trajectory: Trajectory, summary: Summary) -> None:
        self._sender.send(trajectory)


@asynccontextmanager
async def open_traces(endpoint: str | None, closed: Callable[[TraceReport], None]) -> AsyncGenerator[Observer]:
    """An observer that sends the traces of a run, if there is an endpoint. `closed` is told what became of the spans.

    Raises:
        ConfigError: the endpoint is not a URL, or OpenTelemetry is not installed.
    """
    if endpoint is None:
        yield Observer()
        return
    from toolyard.records.traces.opentelemetry import TraceSender

    sender = TraceSender(endpoint)
    try:
        yield _Sending(sender)
    finally:
        closed(await asyncio.to_thread(sender.close))
