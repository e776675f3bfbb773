"""The HTTP endpoint of a run: `/metrics` and `/status`, served by threads of its own."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any, Protocol, Self

from toolyard.errors import ConfigError
from toolyard.hosts import OwnNames
from toolyard.rollout.config import MetricsConfig
from toolyard.rollout.observer import Observer
from toolyard.rollout.watching.page import ADDRESS_FILE, StatusPage
from toolyard.whole_file import whole_file

_log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 5.0
"""For a client that sends or reads slowly."""
_MAX_CONNECTIONS = 16
_POLL_SECONDS = 0.1


class Readings(Protocol):
    """What is served."""

    def exposition(self) -> bytes: ...
    def page(self) -> StatusPage: ...


class MetricsServer(Observer):
    """Serves from the moment it is created until its block is left.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, config: MetricsConfig, readings: Readings, folder: str | None = None) -> None:
        """`folder`: the dump's, where `toolyard top` finds the address."""
        try:
            self._server = _Server(config, readings)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"metrics: cannot listen on {config.host} port {config.port}: {why}. Choose another with "
                "--metrics-port, or 0 for any free port"
            ) from None
        shown = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{shown}:{self._server.server_address[1]}"
        self._folder = folder
        self._file: Path | None = None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="toolyard metrics", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def opened(self, total: int, done: int) -> None:
        """From now on, the dump's folder is this run's alone."""
        if self._folder is not None:
            self._file = Path(self._folder, ADDRESS_FILE)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self._file) as file:  # `toolyard top` may look for it at this moment
                file.write(self.url.encode())


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64
    block_on_close = False

    def __init__(self, config: MetricsConfig, readings: Readings) -> None:
        self.address_family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self.readings = readings
        self.names = OwnNames(config.host)
        self.reading = threading.Lock()
        """One at a time: a crowd of readers must not take the run's time."""
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((config.host, config.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that hung up is not worth a line
            _log.exception("the metrics endpoint failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _PATIENCE_SECONDS

    def do_GET(self) -> None:
        readings, path = self.server.readings, self.path.partition("?")[0]
        if not self.server.names.include(self.headers.get("Host", "")):
            self._answer(421, "text/plain", b"this is not the host you are looking for; see metrics.host\n")
        elif path == "/metrics":
            with self.server.reading:
                found = readings.exposition()
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", found)
        elif path == "/status":
            with self.server.reading:
                found = readings.page().model_dump_json().encode()
            self._answer(200, "application/json", found)
        else:
            self._answer(404, "text/plain", b"there are /metrics and /status\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are not worth a line each."""
