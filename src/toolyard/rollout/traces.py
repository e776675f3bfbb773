"""Opens the sender of traces that a run's settings ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolyard.records.traces.opentelemetry import TraceReport, TraceSender


@asynccontextmanager
async def open_traces(
    endpoint: str | None, closed: Callable[[TraceReport], None]
) -> AsyncGenerator[TraceSender | None]:
    """A sender for `endpoint`, or None if there is none. `closed` is told what became of the spans.

    Raises:
        ConfigError: the endpoint is not a URL, or OpenTelemetry is not installed.
    """
    if endpoint is None:
        yield None
        return
    from toolyard.records.traces.opentelemetry import TraceSender

    sender = TraceSender(endpoint)
    try:
        yield sender
    finally:
        closed(await asyncio.to_thread(sender.close))
