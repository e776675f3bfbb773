"""Sends the spans of trajectories to an OpenTelemetry collector, over OTLP/HTTP, in a thread of its own.

A run never waits for the collector: spans that do not fit into a bounded queue, or that the collector does not take,
are dropped and counted. Headers, time-outs, certificates, compression and resource attributes come from the standard
`OTEL_*` variables, which OpenTelemetry reads itself.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import shorten
from urllib.parse import urlsplit

from toolyard._version import __version__
from toolyard.errors import ConfigError, MissingDependencyError
from toolyard.messages import JSON
from toolyard.records.traces.spans import Span, span_id_of, spans_of, trace_id_of
from toolyard.records.trajectory import Trajectory

try:
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
except ImportError as error:
    raise MissingDependencyError("opentelemetry", "otel", "sending traces") from error

FROM_ENVIRONMENT = "env"
"""As an endpoint: the one in OTEL_EXPORTER_OTLP_ENDPOINT, or a collector on this machine."""
_MAX_QUEUED = 1 << 15
"""Spans that wait to be sent; about 20 MB."""
_BATCH = 1024
"""Spans in one request to the collector. A trace is not split."""
_CLOSE_SECONDS = 5.0
"""How long the end of a run waits for the rest to be sent."""
_CLOSE_SECONDS_IF_FAILING = 1.0
_MOST_CHARS = 200
"""Maximum characters of the exporter's message about a failure."""
_SCOPE = InstrumentationScope("toolyard", __version__)


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What became of the spans of a run."""

    endpoint: str
    sent: int
    dropped: int
    without_times: int
    """Trajectories that have no traces, because they do not say when they began."""
    problem: str
    """Why the last spans were dropped; empty if none were."""

    def __str__(self) -> str:
        dropped = f", {self.dropped} dropped ({self.problem})" if self.dropped else ""
        old = f"; {self.without_times} trajectories do not say when they began" if self.without_times else ""
        return f"traces: {self.sent} spans sent to {self.endpoint}{dropped}{old}"

    def as_json(self) -> JSON:
        return {
            "endpoint": self.endpoint,
            "spans_sent": self.sent,
            "spans_dropped": self.dropped,
            "trajectories_without_times": self.without_times,
            "problem": self.problem or None,
        }


class TraceSender:
    """Call `send` from any thread, and `close` once. Neither raises because of the collector."""

    def __init__(self, endpoint: str) -> None:
        """
        Raises:
            ConfigError: the endpoint is not a URL.
        """
        url = None if endpoint == FROM_ENVIRONMENT else _traces_url(endpoint)
        self._exporter = trace_exporter.OTLPSpanExporter(endpoint=url)
        self._endpoint = url or "the collector of OTEL_EXPORTER_OTLP_ENDPOINT"
        self._resource = Resource({"service.name": "toolyard"}).merge(OTELResourceDetector().detect())
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, list[Span]]] = deque()
        self._waiting = 0
        """Spans in the queue or on their way."""
        self._sent = self._dropped = self._without_times = 0
        self._problem = ""
        self._failing = self._closing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="toolyard traces", daemon=True)
        self._thread.start()

    def send(self, trajectory: Trajectory) -> None:
        """Queue the spans of a trajectory that has ended, or drop them if the queue is full."""
        spans = spans_of(trajectory)
        with self._changed:
            if not spans:
                self._without_times += 1
            elif self._closing or self._waiting + len(spans) > _MAX_QUEUED:
                self._drop(len(spans), "the collector is too slow: the queue was full")
            else:
                self._queue.append((trace_id_of(trajectory), spans))
                self._waiting += len(spans)
                self._changed.notify()

    def close(self) -> TraceReport:
        """Send the rest, for a few seconds at most; what is left then is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            patience = _CLOSE_SECONDS_IF_FAILING if self._failing else _CLOSE_SECONDS
        self._thread.join(patience)
        with self._changed:
            self._closed = True
            if self._waiting:
                self._drop(self._waiting, self._problem or f"no answer within {patience:g} s")
        self._exporter.shutdown()
        problem = self._problem if self._dropped else ""
        return TraceReport(self._endpoint, self._sent, self._dropped, self._without_times, problem)

    # ---------------------------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        logger = logging.getLogger(trace_exporter.__name__)
        logger.addFilter(self._overhear)
        try:
            while batch := self._next():
                spans = [span for trace_id, trace in batch for span in self._readable(trace_id, trace)]
                self._count(len(spans), sent=self._exported(spans))
        finally:
            logger.removeFilter(self._overhear)

    def _exported(self, spans: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
            return False

    def _next(self) -> list[tuple[int, list[Span]]]:
        """Whole traces; empty if there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            batch = list[tuple[int, list[Span]]]()
            size = 0
            while self._queue and not self._closed and (not batch or size + len(self._queue[0][1]) <= _BATCH):
                batch.append(self._queue.popleft())
                size += len(batch[-1][1])
            return batch

    def _count(self, spans: int, *, sent: bool) -> None:
        with self._changed:
            self._failing = not sent
            if self._closed:  # already counted as dropped
                return
            self._waiting -= spans
            if sent:
                self._sent += spans
            else:
                self._drop(spans, self._problem or "the collector refused them")

    def _drop(self, spans: int, why: str) -> None:
        self._dropped += spans
        self._problem = why

    def _overhear(self, record: logging.LogRecord) -> bool:
        """Keep what the exporter would log from this thread: it is reported once, at the end."""
        if record.thread != self._thread.ident:
            return True
        self._problem = shorten(record.getMessage(), _MOST_CHARS, placeholder=" …")
        self._failing = True
        return False

    def _readable(self, trace_id: int, spans: list[Span]) -> Iterable[ReadableSpan]:
        contexts = [
            SpanContext(trace_id, span_id_of(trace_id, index), is_remote=False, trace_flags=TraceFlags(1))
            for index in range(len(spans))
        ]
        for context, span in zip(contexts, spans, strict=True):
            yield ReadableSpan(
                span.name,
                context,
                None if span.parent is None else contexts[span.parent],
                self._resource,
                span.attributes,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
                start_time=int(span.start * 1e9),
                end_time=int(span.end * 1e9),
                instrumentation_scope=_SCOPE,
            )


def _traces_url(endpoint: str) -> str:
    """The URL for traces: as OpenTelemetry does, `/v1/traces` is added to a URL without a path."""
    try:
        parts = urlsplit(endpoint)
        _ = parts.port  # checked when it is read
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"otel {endpoint!r}: expected a URL as http://127.0.0.1:4318, or `{FROM_ENVIRONMENT}`")
    return f"{endpoint.rstrip('/')}/v1/traces" if parts.path in ("", "/") else endpoint
