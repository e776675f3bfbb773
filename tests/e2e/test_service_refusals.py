"""What the service refuses, and what it costs: hostile requests over real sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import (
    HEAD,
    EchoSession,
    Got,
    ScriptedSandbox,
    forever,
    http,
    peer,
    post_code,
    raw,
    request,
    service,
    until,
    with_session,
)

from toolyard.errors import ConfigError, ProgramError, SandboxBusyError, SandboxError
from toolyard.sandbox.protocol import GIB, MIB, Limits, Program
from toolyard.sandbox.remote.sandbox import RemoteSandbox, Retries
from toolyard.sandbox.service.server import RunningService, ServiceConfig, listen, read_tokens

PROGRAM = {"code": "print(1)", "language": "python"}


async def answer_to(running: RunningService, content: bytes, *, seconds: float = 10) -> tuple[int, bytes]:
    """The status and everything that came until the server hung up."""
    async with asyncio.timeout(seconds), raw(running) as (reader, writer):
        writer.write(content)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        told = await reader.read()
        return int(told.split()[1]), told


def sentence(got: Got) -> str:
    detail = got.json["detail"]
    return detail if isinstance(detail, str) else detail[0]["msg"]


class TestNames:
    @pytest.mark.parametrize(
        "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "", "192.168.1.1", "[::1", "a b"]
    )
    @pytest.mark.parametrize(("method", "path"), [("POST", "/run_code"), ("GET", "/metrics"), ("POST", "/v1/sessions")])
    async def test_a_foreign_host_is_421_and_nothing_runs(self, host: str, method: str, path: str) -> None:
        sandbox = with_session(EchoSession())
        async with service(sandbox) as running:
            body = None if method == "GET" else PROGRAM
            got = await request(running.url + path, method, body, Host=host)
        assert got.status == 421
        assert "--allow-host" in sentence(got)
        assert sandbox.programs == []

    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]", "127.9.9.9"])
    async def test_loopback_by_any_name_is_served(self, host: str) -> None:
        async with service(ScriptedSandbox()) as running:
            assert (await request(f"{running.url}/run_code", "POST", PROGRAM, Host=host)).status == 200

    async def test_two_hosts_are_421(self) -> None:
        async with service(ScriptedSandbox()) as running:
            told = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
            assert (await answer_to(running, told))[0] == 421

    @pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost.evil.example", "file://", ""])
    async def test_a_foreign_origin_is_403_and_nothing_runs(self, origin: str) -> None:
        sandbox = ScriptedSandbox()
        async with service(sandbox) as running:
            got = await request(f"{running.url}/run_code", "POST", PROGRAM, Origin=origin)
        assert got.status == 403
        assert "page" in sentence(got)
        assert sandbox.programs == []

    async def test_its_own_origin_is_served(self) -> None:
        async with service(ScriptedSandbox()) as running:
            got = await request(f"{running.url}/run_code", "POST", PROGRAM, Origin=running.url)
        assert got.status == 200

    async def test_names_are_allowed_one_by_one_or_below_a_domain(self) -> None:
        async with service(ScriptedSandbox(), allow_hosts=("Sandbox", "*.cluster.local")) as running:
            for host, status in [
                ("sandbox:8080", 200),
                ("a.cluster.local", 200),
                ("cluster.local", 421),
                ("acluster.local", 421),
                ("sandbox.evil.example", 421),
            ]:
                assert (await request(f"{running.url}/v1/ping", Host=host)).status == status
            assert (await request(f"{running.url}/v1/ping", Origin="https://sandbox")).status == 200

    async def test_a_remote_sandbox_under_a_foreign_name_says_so_and_does_not_try_again(self) -> None:
        async with peer(http(421, {"detail": "--allow-host"})) as server, RemoteSandbox(server.url) as remote:
            with pytest.raises(SandboxError, match=r"refused.*--allow-host") as caught:
                await remote.run(Program("print(1)"))
        assert not caught.value.retryable
        assert len(server.requests) == 1

    async def test_beyond_loopback_addresses_and_the_machines_own_name_are_fine(self) -> None:
        async with service(ScriptedSandbox(), host="0.0.0.0", allow_remote=True) as running:
            url = running.url.replace("0.0.0.0", "127.0.0.1")
            for host in ("10.1.2.3:8080", "[fe80::1]", socket.gethostname(), "localhost"):
                assert (await request(f"{url}/v1/ping", Host=host)).status == 200
            assert (await request(f"{url}/v1/ping", Host="evil.example")).status == 421


class TestContentType:
    @pytest.mark.parametrize(
        "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", ""]
    )
    @pytest.mark.parametrize("path", ["/run_code", "/run_jupyter", "/run_cases", "/v1/sessions"])
    async def test_another_type_than_json_is_415_and_nothing_runs(self, kind: str, path: str) -> None:
        sandbox = ScriptedSandbox()
        async with service(sandbox) as running:
            got = await request(running.url + path, "POST", PROGRAM, Content_Type=kind)
        assert got.status == 415
        assert "application/json" in sentence(got)
        assert sandbox.programs == []

    async def test_no_type_at_all_is_415(self) -> None:
        async with service(ScriptedSandbox()) as running:
            body = json.dumps(PROGRAM).encode()
            head = b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            assert (await answer_to(running, head % len(body) + body))[0] == 415

    @pytest.mark.parametrize(
        "kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.toolyard+json"]
    )
    async def test_json_by_any_spelling_is_served(self, kind: str) -> None:
        async with service(ScriptedSandbox()) as running:
            assert (await request(f"{running.url}/run_code", "POST", PROGRAM, Content_Type=kind)).status == 200


class TestHeaders:
    @pytest.mark.parametrize("options", [{}, {"token": "s3cret"}])
    async def test_a_header_without_end_is_431_and_holds_nobody_up(self, options: dict[str, Any]) -> None:
        async with service(ScriptedSandbox(), **options) as running, raw(running) as (reader, writer):
            writer.write(b"GET /v1/ping HTTP/1.1\r\nHost: localhost\r\nX: ")
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 60 * MIB and not reader.at_eof():
                    writer.write(b"a" * MIB)
                    await writer.drain()
                    sent += MIB
                    await asyncio.sleep(0)
            assert sent < 20 * MIB, "what the sockets' buffers hold, and no more"
            began = time.monotonic()
            assert (await request(f"{running.url}/v1/ping")).status == 200
            assert time.monotonic() - began < 1

    @pytest.mark.parametrize(
        "head",
        [
            b"GET /v1/ping HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 66_000,
            b"GET /v1/ping HTTP/1.1\r\nHost: localhost" + b"\r\nX: a" * 20_000,
            b"GET /v1/ping?" + b"a" * 66_000 + b" HTTP/1.1\r\nHost: localhost",
        ],
        ids=["long", "many", "address"],
    )
    async def test_more_than_64_kb_are_431_also_in_one_piece(self, head: bytes) -> None:
        async with service(ScriptedSandbox()) as running:
            status, told = await answer_to(running, head + b"\r\n\r\n")
        assert status == 431
        assert b"65536 bytes" in told

    async def test_60_kb_are_served(self) -> None:
        async with service(ScriptedSandbox()) as running:
            head = b"GET /v1/ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"a" * 60_000
            assert (await answer_to(running, head + b"\r\n\r\n"))[0] == 200

    async def test_a_trailer_without_end_is_cut_off(self) -> None:
        async with service(ScriptedSandbox()) as running, raw(running) as (reader, writer):
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(60):
                    writer.write(b"a" * MIB)
                    await writer.drain()
                    await asyncio.sleep(0)
                    if reader.at_eof():
                        break
                else:
                    pytest.fail("60 MB of it were taken")
            assert (await post_code(running)).status == 200

    async def test_a_client_that_never_finishes_its_headers_is_sent_away(self) -> None:
        async with service(ScriptedSandbox(), max_request_seconds=0.3) as running:
            assert (await answer_to(running, b"GET /v1/ping HTTP/1.1\r\nHost: local"))[0] == 408
            async with asyncio.timeout(10), raw(running) as (reader, _):
                assert await reader.read() == b"", "one that says nothing gets no answer"


class TestBodies:
    async def test_a_declared_body_above_the_limit_is_refused_before_it_is_sent(self) -> None:
        async with service(ScriptedSandbox(), max_request_bytes=1000) as running, raw(running) as (reader, writer):
            writer.write(HEAD + b"Content-Length: 99999999\r\n\r\n")
            async with asyncio.timeout(5):
                assert (await reader.readline()).startswith(b"HTTP/1.1 413")

    async def test_a_chunked_one_is_refused_as_soon_as_it_is_above(self) -> None:
        async with service(ScriptedSandbox(), max_request_bytes=1000) as running, raw(running) as (reader, writer):
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1000\r\n" + b"#" * 0x1000 + b"\r\n")
            async with asyncio.timeout(5):
                assert (await reader.readline()).startswith(b"HTTP/1.1 413")

    @pytest.mark.parametrize("refused", ["401", "415"])
    async def test_nor_does_the_body_of_a_refused_request_go_on_for_ever(self, refused: str) -> None:
        options = {"token": "t"} if refused == "401" else {}
        head = b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with (
            service(ScriptedSandbox(), max_request_seconds=0.5, **options) as running,
            asyncio.timeout(20),
            raw(running) as (reader, writer),
        ):
            writer.write(head)
            assert refused.encode() in await reader.readuntil(b"}")
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"1\r\n#\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)

    async def test_a_client_that_asked_first_and_was_refused_is_hung_up_on(self) -> None:
        """It will not send the body, and what it sends next must not be taken for one."""
        async with service(ScriptedSandbox(), token="t") as running:
            status, told = await answer_to(running, HEAD + b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n")
        assert status == 401
        assert b"100 Continue" not in told

    async def test_unfinished_bodies_of_many_clients_cost_bounded_memory(self) -> None:
        """Each is below the limit of one request; together they may hold `max_buffered_bytes`."""
        part = b"#" * 200_000
        async with (
            service(ScriptedSandbox(), max_request_bytes=MIB, max_buffered_bytes=2 * MIB) as running,
            contextlib.AsyncExitStack() as stack,
        ):
            clients = [await stack.enter_async_context(raw(running)) for _ in range(20)]
            for _, writer in clients:
                writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % MIB + part)
            refused: list[bytes] = []

            async def listen_to(reader: asyncio.StreamReader) -> None:
                refused.append(await reader.readuntil(b"\r\n\r\n"))

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(listen_to(reader)) for reader, _ in clients]
                await until(lambda: len(refused) >= 10)
                await asyncio.sleep(0.2)
                for task in tasks:
                    task.cancel()
            assert len(refused) == 10
            assert all(answer.startswith(b"HTTP/1.1 504") and b"retry-after: 1\r\n" in answer for answer in refused)
            assert (await post_code(running)).status == 200
            await stack.aclose()
            await asyncio.sleep(0.1)
            assert (await post_code(running, "#" * 900_000)).status == 200, "it came back"

    async def test_what_waits_for_a_worker_counts_too(self) -> None:
        sandbox = ScriptedSandbox(forever, workers=1)
        async with (
            service(sandbox, max_buffered_bytes=1500, max_wait_seconds=60) as running,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(post_code(running, "#" * 1000))
            await sandbox.started.wait()
            assert (await post_code(running, "#" * 1000)).status == 504
            running.cancel_all()

    async def test_a_hundred_slow_clients_are_all_told_408(self) -> None:
        async with service(ScriptedSandbox(), max_request_seconds=0.5) as running:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(answer_to(running, HEAD + b"Content-Length: 10\r\n\r\n{")) for _ in range(100)
                ]
            assert {task.result()[0] for task in tasks} == {408}


class TestMaxima:
    @pytest.mark.parametrize(
        ("fields", "name", "most"),
        [
            ({"run_timeout": 1e308}, "run_timeout", "3600 s"),
            ({"run_timeout": 3601}, "run_timeout", "3600 s"),
            ({"compile_timeout": 1e9}, "compile_timeout", "3600 s"),
            ({"memory_limit_MB": 1_000_000}, "memory_limit_MB", "16384 MB"),
            ({"toolyard": {"limits": {"run_seconds": 4000}}}, "run_timeout", "3600 s"),
            ({"toolyard": {"limits": {"memory_bytes": 1 << 50}}}, "memory_limit_MB", "16384 MB"),
            ({"toolyard": {"limits": {"processes": 1_000_000}}}, "processes", "4096"),
            ({"toolyard": {"limits": {"disk_bytes": 1 << 50}}}, "disk_bytes", str(16 * GIB)),
        ],
    )
    @pytest.mark.parametrize("path", ["/run_code", "/run_cases"])
    async def test_more_than_the_server_allows_is_422_and_names_the_maximum(
        self, path: str, fields: dict[str, Any], name: str, most: str
    ) -> None:
        sandbox = ScriptedSandbox()
        async with service(sandbox) as running:
            got = await request(running.url + path, "POST", {**PROGRAM, "stdins": ["1"], **fields})
        assert got.status == 422
        assert name in sentence(got)
        assert f"at most {most}" in sentence(got)
        assert got.json["detail"][0]["loc"][0] == "body"
        assert sandbox.programs == []

    async def test_the_maximum_itself_is_served_and_can_be_set(self) -> None:
        async with service(ScriptedSandbox(), max_limits=Limits(run_seconds=20)) as running:
            assert (await post_code(running, run_timeout=20)).status == 200
            assert (await post_code(running, run_timeout=20.5)).status == 422

    async def test_notebooks_sessions_and_cells_have_the_same_maxima(self) -> None:
        async with service(with_session(EchoSession())) as running:
            got = await request(f"{running.url}/run_jupyter", "POST", {"cells": [], "total_timeout": 1e308})
            assert (got.status, got.json["detail"][0]["loc"]) == (422, ["body", "total_timeout"])
            sessions = f"{running.url}/v1/sessions"
            got = await request(sessions, "POST", {"limits": {"memory_bytes": 1 << 50}})
            assert got.status == 422
            assert "16384 MB" in sentence(got)
            opened = (await request(sessions, "POST", {})).json["session_id"]
            got = await request(f"{sessions}/{opened}/cells", "POST", {"code": "1", "seconds": 1e308})
            assert (got.status, got.json["detail"][0]["loc"]) == (422, ["body", "seconds"])

    async def test_a_remote_sandbox_says_it_in_words(self) -> None:
        async with service(ScriptedSandbox()) as running, RemoteSandbox(running.url) as remote:
            with pytest.raises(ProgramError, match="at most 3600 s"):
                await remote.run(Program("print(1)"), Limits(run_seconds=7200))

    def test_defaults_above_the_maxima_are_refused_at_the_start(self) -> None:
        with pytest.raises(ConfigError, match="run_timeout"):
            listen(ServiceConfig(port=0, limits=Limits(run_seconds=20), max_limits=Limits(run_seconds=10)))

    @pytest.mark.parametrize(
        "fields",
        [
            {"files": dict.fromkeys(map(str, range(11)), "")},
            {"fetch_files": list(map(str, range(11)))},
            {"files": {"a": base64.b64encode(b"x" * 600).decode(), "b": base64.b64encode(b"x" * 600).decode()}},
        ],
        ids=["number", "fetched", "bytes"],
    )
    async def test_too_many_files_are_413(self, fields: dict[str, Any]) -> None:
        sandbox = with_session(EchoSession())
        async with service(sandbox, max_files=10, max_file_bytes=1000) as running:
            for path, body in (("/run_code", PROGRAM), ("/run_cases", PROGRAM), ("/run_jupyter", {})):
                got = await request(running.url + path, "POST", {**body, "stdins": [], "cells": [], **fields})
                assert got.status == 413
                assert "at most 10" in sentence(got)
            opened = (await request(f"{running.url}/v1/sessions", "POST", {})).json["session_id"]
            url = f"{running.url}/v1/sessions/{opened}/files"
            if "files" in fields:
                assert (await request(url, "PUT", fields)).status == 413
            else:
                query = "&".join(f"name={name}" for name in fields["fetch_files"])
                assert (await request(f"{url}?{query}")).status == 413
        assert sandbox.programs == []

    async def test_a_remote_session_asks_for_many_names_in_several_requests(self) -> None:
        session = EchoSession()
        names = [f"{number}-" + "long" * 30 for number in range(2000)]
        session.files = dict.fromkeys(names, b"x")
        async with (
            service(with_session(session)) as running,
            RemoteSandbox(running.url) as remote,
            remote.session() as opened,
        ):
            assert await opened.read_files(names) == session.files


class TestClients:
    TOKENS = read_tokens(["alice a1", "bob b2", "alice a3"])

    async def post(self, running: RunningService, token: str, path: str = "/run_code", body: Any = PROGRAM) -> Got:
        return await request(running.url + path, "POST", body, Authorization=f"Bearer {token}")

    async def test_each_of_several_tokens_is_let_in_and_nothing_else(self) -> None:
        async with service(ScriptedSandbox(), tokens=self.TOKENS) as running:
            assert [(await self.post(running, token)).status for token in ("a1", "b2", "a3")] == [200] * 3
            for token in ("", "alice", "alice a1", "a", "A1", "a1b2", "\xff"):
                assert (await self.post(running, token)).status == 401

    async def test_one_clients_requests_in_flight_do_not_shut_out_another(self) -> None:
        sandbox = ScriptedSandbox(forever, workers=4)
        async with (
            service(sandbox, tokens=self.TOKENS, max_in_flight_per_client=2) as running,
            asyncio.TaskGroup() as group,
        ):
            for token in ("a1", "a3"):
                group.create_task(self.post(running, token))
            await until(lambda: len(sandbox.programs) == 2)
            got = await self.post(running, "a1")
            assert (got.status, got.headers["retry-after"]) == (429, "1")
            assert "alice" in sentence(got)
            group.create_task(self.post(running, "b2"))
            await until(lambda: len(sandbox.programs) == 3)
            assert (await request(f"{running.url}/v1/ping")).status == 200
            running.cancel_all()
        async with service(ScriptedSandbox(), tokens=self.TOKENS, max_in_flight_per_client=1) as running:
            assert [(await self.post(running, "a1")).status for _ in range(3)] == [200] * 3, "they are counted down"

    async def test_without_tokens_a_client_is_an_address_and_half_sent_requests_count(self) -> None:
        async with service(ScriptedSandbox(), max_in_flight_per_client=1) as running:
            async with raw(running) as (_, writer):
                writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
                await asyncio.sleep(0.2)
                for claimed in ({}, {"X-Forwarded-For": "192.0.2.7"}):
                    got = await request(f"{running.url}/run_code", "POST", PROGRAM, **claimed)
                    assert got.status == 429
                    assert "127.0.0.1" in sentence(got)
            await asyncio.sleep(0.2)
            assert (await post_code(running)).status == 200

    async def test_sessions_are_limited_in_all_and_for_each_client(self) -> None:
        sandbox = with_session(EchoSession())
        async with service(sandbox, tokens=self.TOKENS, max_sessions=3, max_sessions_per_client=2) as running:

            async def opened(token: str) -> int:
                got = await self.post(running, token, "/v1/sessions", {})
                assert got.status == 201 or got.headers["retry-after"] == "1"
                return got.status

            assert [await opened(token) for token in ("a1", "a3", "a1", "b2", "b2")] == [201, 201, 429, 201, 429]

    async def test_a_remote_sandbox_takes_429_for_busy(self) -> None:
        async with (
            service(with_session(EchoSession()), max_sessions=0) as running,
            RemoteSandbox(running.url, retries=Retries(attempts=1)) as remote,
        ):
            with pytest.raises(SandboxBusyError):
                await remote.session().__aenter__()

    @pytest.mark.parametrize(
        ("lines", "why"),
        [
            (["a b c"], "NAME"),
            (["a same", "b same"], "same token"),
            (["a b\x7f"], "ASCII"),
            (["a ü"], "ASCII"),
            ([], "no token"),
        ],
    )
    def test_tokens_that_cannot_be_meant_are_refused_without_showing_them(self, lines: list[str], why: str) -> None:
        with pytest.raises(ConfigError, match=why) as caught:
            read_tokens(lines)
        assert "same" not in str(caught.value).replace("same token", "")

    def test_comments_and_names_are_optional(self) -> None:
        found = read_tokens(["# team", "", "s3cret", "alice  a1  "])
        assert [(token.name, token.secret) for token in found] == [("default", "s3cret"), ("alice", "a1")]
        assert "s3cret" not in repr(found)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command.split(), *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


class TestTLS:
    async def test_a_remote_sandbox_with_the_ca_file_is_served(
        self, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cert, key = certificate
        async with service(ScriptedSandbox(), tls_cert=cert, tls_key=key, token="t") as running:
            assert running.url.startswith("https://")
            async with RemoteSandbox(running.url, "t", ca_file=cert) as remote:
                assert (await remote.run(Program("print(1)"))).run is not None
            monkeypatch.setenv("TOOLYARD_SANDBOX_CA_FILE", str(cert))
            async with RemoteSandbox(running.url, "t") as remote:
                assert (await remote.run(Program("print(1)"))).run is not None

    async def test_without_it_the_certificate_is_refused_and_not_tried_again(
        self, certificate: tuple[Path, Path]
    ) -> None:
        cert, key = certificate
        async with service(ScriptedSandbox(), tls_cert=cert, tls_key=key) as running:
            async with RemoteSandbox(running.url) as remote:
                with pytest.raises(SandboxError, match="certificate") as caught:
                    await remote.run(Program("print(1)"))
            assert not caught.value.retryable

    async def test_plain_http_gets_nothing(self, certificate: tuple[Path, Path]) -> None:
        cert, key = certificate
        async with service(ScriptedSandbox(), tls_cert=cert, tls_key=key) as running:
            async with asyncio.timeout(10), raw(running) as (reader, writer):
                writer.write(b"GET /v1/ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    assert b"pong" not in await reader.read()
            context = ssl.create_default_context(cafile=str(cert))
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{running.url}/v1/ping", ssl=context) as response,
            ):
                assert await response.json() == "pong"

    @pytest.mark.parametrize("broken", ["missing", "swapped", "no cert"])
    def test_what_cannot_be_used_is_named_at_the_start(
        self, certificate: tuple[Path, Path], tmp_path: Path, broken: str
    ) -> None:
        cert, key = certificate
        options = {
            "missing": {"tls_cert": tmp_path / "nowhere.pem", "tls_key": key},
            "swapped": {"tls_cert": key, "tls_key": cert},
            "no cert": {"tls_key": key},
        }[broken]
        with pytest.raises(ConfigError, match=r"nowhere\.pem|key\.pem|certificate"):
            listen(ServiceConfig(port=0, **options))

    def test_a_ca_file_that_is_none_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"nowhere\.pem"):
            RemoteSandbox("https://localhost:1", ca_file=tmp_path / "nowhere.pem")
