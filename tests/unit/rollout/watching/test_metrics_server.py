"""The endpoint of a run, and what clients may do to it."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import patient
from toolyard.errors import ConfigError
from toolyard.rollout.config import MetricsConfig
from toolyard.rollout.watching import server as module
from toolyard.rollout.watching.page import StatusPage
from toolyard.rollout.watching.prometheus_client import RunMetrics
from toolyard.rollout.watching.server import MetricsServer


class Slow:
    """Readings that take as long as a test wants."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.reading = self.most = 0

    def exposition(self) -> bytes:
        self.reading += 1
        self.most = max(self.most, self.reading)
        self.go.wait(30)
        self.reading -= 1
        return b"x 1\n"

    def page(self) -> StatusPage:
        return RunMetrics().page()


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def server(slow: Slow) -> Iterator[MetricsServer]:
    with MetricsServer(MetricsConfig(), slow) as server:
        yield server


def test_nobody_reads_half_an_address(slow: Slow, tmp_path: Path) -> None:
    with MetricsServer(MetricsConfig(), slow, str(tmp_path)) as server:
        with no_file_may_grow(), pytest.raises(ConfigError, match=r"cannot write .*\.metrics: File too large"):
            server.opened(1, 0)
        assert list(tmp_path.iterdir()) == [], "the file appears with its content, or not at all"
        server.opened(1, 0)
        assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {".metrics": server.url}
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def no_file_may_grow() -> Iterator[None]:
    """As on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def connected(server: MetricsServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=patient(10))


def said(server: MetricsServer, data: bytes) -> bytes:
    with connected(server) as client:
        client.sendall(data)
        with contextlib.suppress(OSError):  # it may have hung up
            client.shutdown(socket.SHUT_WR)
        return rest(client)


def rest(client: socket.socket) -> bytes:
    parts = list[bytes]()
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def get(path: str, host: str = "127.0.0.1") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def test_it_serves_two_pages_and_nothing_else(server: MetricsServer) -> None:
    answer = said(server, get("/metrics"))
    assert answer.startswith(b"HTTP/1.0 200")
    assert b"text/plain; version=0.0.4" in answer
    assert answer.endswith(b"\r\n\r\nx 1\n")
    assert b'"planned":0' in said(server, get("/status?x=1"))
    for path in ("/", "/metrics/../../etc/passwd", "/" + 60_000 * "a"):
        assert said(server, get(path)).startswith(b"HTTP/1.0 404"), path[:40]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET /metrics\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999\r\n\r\nx",
        b"GET /" + 200_000 * b"a",
        b"GET / HTTP/1.1\r\n" + 500 * b"A: b\r\n" + b"\r\n",
        b"\0" * 1000,
        b"",
    ],
    ids=["tls", "http 0.9", "post", "long line", "headers", "zeros", "nothing"],
)
def test_garbage_is_refused_and_the_next_client_served(server: MetricsServer, data: bytes) -> None:
    assert b" 200 " not in said(server, data).partition(b"\r\n")[0]
    assert b" 200 " in said(server, get("/metrics")).partition(b"\r\n")[0]


def test_a_web_page_that_points_its_name_here_reads_nothing(server: MetricsServer) -> None:
    assert said(server, get("/status", "evil.example")).startswith(b"HTTP/1.0 421")
    assert said(server, b"GET /status HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 421")
    assert said(server, get("/status", "localhost:9464")).startswith(b"HTTP/1.0 200")


def test_clients_that_say_nothing_are_dropped_and_hold_up_nobody(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 0.2)
    silent = [connected(server) for _ in range(module._MAX_CONNECTIONS - 1)]
    assert b" 200 " in said(server, get("/metrics"))
    for client in silent:
        assert rest(client) == b"", "hung up"
        client.close()


def test_a_flood_is_bounded_and_read_one_at_a_time(server: MetricsServer, slow: Slow) -> None:
    slow.go.clear()
    clients = [connected(server) for _ in range(60)]
    for client in clients:
        client.sendall(get("/metrics"))
    threads = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
    assert len(threads) <= module._MAX_CONNECTIONS
    slow.go.set()
    answers = [rest(client) for client in clients]
    for client in clients:
        client.close()
    assert 1 <= sum(b"x 1\n" in answer for answer in answers) <= 60
    assert slow.most == 1


def test_leaving_closes_it_at_once_even_in_the_middle_of_an_answer(slow: Slow) -> None:
    slow.go.clear()
    with MetricsServer(MetricsConfig(), slow) as server:
        client = connected(server)
        client.sendall(get("/metrics"))
        while not slow.reading:
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < patient(2)
    slow.go.set()
    client.close()
    with pytest.raises(ConnectionRefusedError):
        connected(server)


def test_an_error_in_a_reading_is_logged_and_costs_one_answer(
    server: MetricsServer, slow: Slow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(slow, "exposition", broken)
    assert said(server, get("/metrics")) == b""
    assert "the metrics endpoint failed" in caplog.text
    assert b" 200 " in said(server, get("/status"))


def test_addresses_that_cannot_be_used() -> None:
    with MetricsServer(MetricsConfig(host="::1"), Slow()) as six:
        assert six.url.startswith("http://[::1]:")
    for host in ("256.1.1.1", "203.0.113.7", "a" * 300):
        with pytest.raises(ConfigError, match="cannot listen"):
            MetricsServer(MetricsConfig(host=host), Slow())
