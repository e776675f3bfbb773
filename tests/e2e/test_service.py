"""The service over real sockets, around a scripted sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from serving import (
    HEAD,
    OK,
    ScriptedSandbox,
    forever,
    post_code,
    raising,
    raw,
    request,
    returning,
    service,
    until,
)

from patience import patient
from toolyard import __version__
from toolyard.errors import ProgramError, SandboxError, ToolchainMissingError
from toolyard.sandbox.protocol import Execution, Limits, Program, StageResult, Verdict
from toolyard.sandbox.service.server import ServiceConfig


class TestRoutes:
    async def test_a_program_runs_and_the_answer_has_sandbox_fusions_fields(self) -> None:
        async with service(ScriptedSandbox()) as running:
            got = await post_code(running)
        assert got.status == 200
        assert got.json == {
            "status": "Success",
            "message": "",
            "compile_result": None,
            "run_result": {
                "status": "Finished",
                "execution_time": 0.001,
                "return_code": 0,
                "stdout": "1\n",
                "stderr": "",
            },
            "executor_pod_name": None,
            "files": {},
        }

    async def test_ping_answers_pong(self) -> None:
        async with service(ScriptedSandbox()) as running:
            assert (await request(f"{running.url}/v1/ping")).json == "pong"

    async def test_health_reports_isolation_pool_and_version(self) -> None:
        async with service(ScriptedSandbox(workers=3)) as running:
            got = await request(f"{running.url}/healthz")
        assert got.status == 200
        assert got.json == {
            "status": "ok",
            "service": "toolyard",
            "version": __version__,
            "isolation": "full",
            "in_flight": 0,
            "pool": {"workers": 3, "busy": 0, "waiting": 0, "sessions": 0, "zygotes": {"light": 2}},
        }

    async def test_metrics_count_verdicts_answers_and_the_pool(self) -> None:
        async with service(ScriptedSandbox()) as running:
            await post_code(running)
            await request(f"{running.url}/run_code", "POST", b"{")
            text = (await request(f"{running.url}/metrics")).body.decode()
        for line in (
            'toolyard_executions_total{language="python",verdict="ok"} 1.0',
            'toolyard_http_responses_total{route="/run_code",status="200"} 1.0',
            'toolyard_http_responses_total{route="/run_code",status="422"} 1.0',
            "toolyard_queue_seconds_count 1.0",
            "toolyard_run_seconds_count 1.0",
            "toolyard_in_flight 0.0",
            "toolyard_waiting 0.0",
            "toolyard_workers 2.0",
            'toolyard_isolation_info{level="full"} 1.0',
            'toolyard_zygotes{profile="light"} 2.0',
        ):
            assert line in text.splitlines()

    async def test_a_client_cannot_fill_the_metrics_with_languages(self) -> None:
        async with service(ScriptedSandbox(raising(ProgramError("unknown language")))) as running:
            for number in range(3):
                await post_code(running, language=f"made-up-{number}")
                await post_code(running, language=f"made-up-{number}", toolyard={})
            text = (await request(f"{running.url}/metrics")).body.decode()
        assert "made-up" not in text
        assert 'toolyard_failures_total{error="ProgramError"} 3.0' in text
        assert 'toolyard_http_responses_total{route="/run_code",status="422"} 3.0' in text

    @pytest.mark.parametrize(
        ("method", "path", "status", "text"),
        [
            ("GET", "/nowhere", 404, "Not Found"),
            ("GET", "/run_code", 405, "Method Not Allowed"),
            ("POST", "/v1/ping", 405, "Method Not Allowed"),
        ],
    )
    async def test_wrong_paths_and_methods_get_a_detail(self, method: str, path: str, status: int, text: str) -> None:
        async with service(ScriptedSandbox()) as running:
            got = await request(running.url + path, method)
        assert (got.status, got.json) == (status, {"detail": text})

    async def test_a_trailing_slash_redirects_and_keeps_the_method(self) -> None:
        async with service(ScriptedSandbox()) as running:
            got = await request(f"{running.url}/run_code/", "POST", {"code": "", "language": "python"})
            assert (got.status, got.headers["location"]) == (307, f"{running.url}/run_code")


class TestRefusals:
    async def test_malformed_json_is_422_in_fastapis_shape(self) -> None:
        async with service(ScriptedSandbox()) as running:
            for body in (b"", b"{", b"\xff\xfe", b"[]", b'{"code": "\\ud800", "language": "python"}'):
                got = await request(f"{running.url}/run_code", "POST", body)
                assert got.status == 422
                assert [set(item) for item in got.json["detail"]] == [{"type", "loc", "msg"}]
                assert got.json["detail"][0]["loc"][0] == "body"

    async def test_wrong_types_are_422_and_each_is_located(self) -> None:
        async with service(ScriptedSandbox()) as running:
            got = await request(f"{running.url}/run_code", "POST", {"code": 1, "run_timeout": "soon"})
        assert got.status == 422
        assert [(item["type"], item["loc"]) for item in got.json["detail"]] == [
            ("string_type", ["body", "code"]),
            ("missing", ["body", "language"]),
            ("float_parsing", ["body", "run_timeout"]),
        ]

    async def test_a_declared_huge_body_is_413_and_the_client_gets_to_read_it(self) -> None:
        async with service(ScriptedSandbox(), max_request_bytes=100_000) as running:
            got = await post_code(running, "#" * 200_000)
        assert (got.status, got.json) == (413, {"detail": "the request body is larger than 100000 bytes"})

    async def test_a_huge_body_of_unknown_length_is_413_too(self) -> None:
        async def endless() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"#" * 10_000

        async with (
            service(ScriptedSandbox(), max_request_bytes=100_000) as running,
            aiohttp.ClientSession() as session,
            session.post(
                f"{running.url}/run_code", data=endless(), headers={"Content-Type": "application/json"}
            ) as response,
        ):
            assert response.status == 413

    async def test_a_client_that_never_stops_sending_is_cut_off(self) -> None:
        async with service(ScriptedSandbox(), max_request_bytes=1000) as running, raw(running) as (reader, writer):
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"1000\r\n" + b"#" * 0x1000 + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0)
            assert (await post_code(running)).status == 200

    async def test_a_client_that_asks_before_sending_a_huge_body_is_told_at_once(self) -> None:
        async with service(ScriptedSandbox(), max_request_bytes=1000) as running, raw(running) as (reader, writer):
            writer.write(HEAD + b"Content-Length: 9999\r\nExpect: 100-continue\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")

    async def test_a_body_in_many_pieces_is_one_body(self) -> None:
        body = json.dumps({"code": "x" * 1000, "language": "python"}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        sandbox = ScriptedSandbox()
        async with (
            service(sandbox) as running,
            aiohttp.ClientSession() as session,
            session.post(
                f"{running.url}/run_code", data=pieces(), headers={"Content-Type": "application/json"}
            ) as response,
        ):
            assert response.status == 200
        assert sandbox.programs[0][0].code == "x" * 1000

    async def test_a_client_too_slow_to_send_gets_408_and_held_no_worker_meanwhile(self) -> None:
        sandbox = ScriptedSandbox(workers=1)
        async with service(sandbox, max_request_seconds=0.3) as running, raw(running) as (reader, writer):
            writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")
            assert (await post_code(running)).status == 200
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")

    async def test_a_client_too_slow_to_read_holds_no_worker(self) -> None:
        big = Execution(Verdict.OK, StageResult(Verdict.OK, 0, b"x" * 20_000_000))
        sandbox = ScriptedSandbox(returning(big), workers=1)
        async with service(sandbox, max_wait_seconds=2) as running, raw(running) as (_, writer):
            body = b'{"code": "", "language": "python"}'
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            await sandbox.started.wait()
            assert (await post_code(running)).status == 200


class TestToken:
    async def test_without_the_token_nothing_runs_and_nothing_is_told(self) -> None:
        sandbox = ScriptedSandbox()
        async with service(sandbox, token="s3cret") as running:
            for given in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "s3cret"},
                {"Authorization": "Bearer"},
            ):
                for method, path in (("POST", "/run_code"), ("GET", "/metrics"), ("GET", "/nowhere")):
                    got = await request(running.url + path, method, **given)
                    assert (got.status, got.headers["www-authenticate"]) == (401, "Bearer")
        assert sandbox.programs == []

    async def test_with_the_token_it_runs(self) -> None:
        async with service(ScriptedSandbox(), token="s3cret") as running:
            body = {"code": "", "language": "python"}
            got = await request(f"{running.url}/run_code", "POST", body, Authorization="Bearer s3cret")
        assert got.status == 200

    async def test_probes_need_no_token(self) -> None:
        async with service(ScriptedSandbox(), token="s3cret") as running:
            for path in ("/v1/ping", "/healthz"):
                assert (await request(running.url + path)).status == 200

    def test_the_token_is_not_in_the_configs_repr(self) -> None:
        assert "s3cret" not in repr(ServiceConfig(token="s3cret"))


class TestFailures:
    @pytest.mark.parametrize(
        "error", [SandboxError("worker died"), ProgramError("worker died"), ToolchainMissingError("worker died")]
    )
    async def test_a_failure_is_200_with_sandbox_error_and_no_result(self, error: Exception) -> None:
        async with service(ScriptedSandbox(raising(error))) as running:
            got = await post_code(running)
        assert got.status == 200
        assert (got.json["status"], got.json["message"]) == ("SandboxError", "worker died")
        assert (got.json["compile_result"], got.json["run_result"]) == (None, None)

    async def test_bad_base64_is_sandbox_error_and_nothing_runs(self) -> None:
        sandbox = ScriptedSandbox()
        async with service(sandbox) as running:
            got = await post_code(running, files={"a.txt": "!!"})
        assert (got.status, got.json["status"], got.json["run_result"]) == (200, "SandboxError", None)
        assert "a.txt" in got.json["message"]
        assert sandbox.programs == []

    async def test_a_bug_of_ours_is_sandbox_error_too_and_the_service_lives_on(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with service(ScriptedSandbox(raising(ZeroDivisionError("oops")))) as running:
            got = await post_code(running)
            assert (got.status, got.json["status"]) == (200, "SandboxError")
            assert "oops" in got.json["message"]
            assert (await request(f"{running.url}/v1/ping")).status == 200
        assert "ZeroDivisionError" in caplog.text


class TestBackPressure:
    @pytest.mark.parametrize("status", [504, 429, 503])
    async def test_what_cannot_start_in_time_is_told_to_come_back(self, status: int) -> None:
        sandbox = ScriptedSandbox(forever, workers=1)
        async with service(sandbox, max_wait_seconds=0.1, busy_status=status) as running, asyncio.TaskGroup() as group:
            first = group.create_task(post_code(running))
            await sandbox.started.wait()
            got = await post_code(running)
            assert (got.status, got.headers["retry-after"]) == (status, "3")
            running.cancel_all()
            assert (await first).status == 503

    async def test_a_full_queue_turns_the_next_one_away_at_once(self) -> None:
        sandbox = ScriptedSandbox(forever, workers=1)
        async with service(sandbox, max_waiting=1, max_wait_seconds=60) as running, asyncio.TaskGroup() as group:
            group.create_task(post_code(running))
            await sandbox.started.wait()
            group.create_task(post_code(running))
            await until(lambda: sandbox.statistics().waiting == 1)
            got = await post_code(running)
            assert (got.status, got.headers["retry-after"]) == (504, "1")
            running.cancel_all()

    async def test_a_thousand_at_once_are_all_answered(self) -> None:
        async def act(program: Program, limits: Limits) -> Execution:
            await asyncio.sleep(0.001)
            return OK

        async with (
            service(ScriptedSandbox(act, workers=8)) as running,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):

            async def one() -> int:
                body = {"code": "print(1)", "language": "python"}
                async with session.post(f"{running.url}/run_code", json=body) as response:
                    await response.read()
                    return response.status

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one()) for _ in range(1000)]
        assert [task.result() for task in tasks] == [200] * 1000


class TestDisconnect:
    async def test_a_client_that_hangs_up_stops_its_program(self) -> None:
        sandbox = ScriptedSandbox(forever, workers=1)
        async with service(sandbox) as running:
            async with raw(running) as (_, writer):
                body = b'{"code": "", "language": "python"}'
                writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
                await sandbox.started.wait()
            async with asyncio.timeout(patient(2)):
                await sandbox.cancelled.wait()
            text = (await request(f"{running.url}/metrics")).body.decode()
            assert 'toolyard_http_responses_total{route="/run_code",status="499"} 1.0' in text
            assert "toolyard_in_flight 0.0" in text

    async def test_a_client_that_hangs_up_while_waiting_leaves_the_queue(self) -> None:
        sandbox = ScriptedSandbox(forever, workers=1)
        async with service(sandbox, max_wait_seconds=60) as running, asyncio.TaskGroup() as group:
            first = group.create_task(post_code(running))
            await sandbox.started.wait()
            second = group.create_task(post_code(running))
            await until(lambda: sandbox.statistics().waiting == 1)
            second.cancel()
            await until(lambda: sandbox.statistics().waiting == 0)
            running.cancel_all()
            await first

    async def test_a_client_that_hangs_up_while_sending_runs_nothing(self) -> None:
        sandbox = ScriptedSandbox()
        async with service(sandbox) as running:
            async with raw(running) as (_, writer):
                writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")
                await writer.drain()
            assert (await request(f"{running.url}/v1/ping")).status == 200
        assert sandbox.programs == []
