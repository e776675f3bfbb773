"""An OpenTelemetry collector for tests: OTLP over HTTP on loopback, decoded with OpenTelemetry's own protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ERROR = 2


@dataclass
class Received:
    """A span, as it came in."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    is_error: bool
    message: str

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


@dataclass
class Collector:
    url: str
    spans: list[Received] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    status: int = 200
    answering: threading.Event = field(default_factory=threading.Event)
    """Cleared: requests are read and not answered."""

    def traces(self) -> dict[str, list[Received]]:
        """Spans by the request id of their root."""
        roots = {span.trace: span.attributes["toolyard.request_id"] for span in self.spans if not span.parent}
        found: dict[str, list[Received]] = {}
        for span in self.spans:
            found.setdefault(roots[span.trace], []).append(span)
        return found


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not kept.answering.wait(60):
                return
            if kept.status == 200:
                _take(kept, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            kept.paths.add(self.path)
            kept.headers.append(dict(self.headers))
            self.send_response(kept.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept = Collector(f"http://127.0.0.1:{server.server_port}")
        kept.answering.set()
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield kept
        finally:
            kept.status = 503
            kept.answering.set()
            server.shutdown()
            thread.join()


def _take(kept: Collector, body: bytes) -> None:
    request = ExportTraceServiceRequest.FromString(body)
    for group in request.resource_spans:
        kept.resources.append(_attributes(group.resource.attributes))
        for scope in group.scope_spans:
            kept.spans += [
                Received(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _attributes(span.attributes),
                    span.status.code == ERROR,
                    span.status.message,
                )
                for span in scope.spans
            ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
