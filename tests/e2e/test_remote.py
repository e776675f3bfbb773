"""`RemoteSandbox` against our service, against a foreign one, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time

import pytest
from serving import (
    OK,
    ScriptedSandbox,
    forever,
    http,
    peer,
    raising,
    returning,
    server_process,
    service,
    until_busy,
)

from patience import patient
from toolyard.errors import (
    ConfigError,
    ProgramError,
    SandboxBusyError,
    SandboxClosedError,
    SandboxError,
    ToolchainMissingError,
    ToolyardError,
)
from toolyard.sandbox.protocol import Execution, Limits, Program, Sandbox, StageResult, Verdict
from toolyard.sandbox.remote.sandbox import RemoteSandbox, Retries

FOREIGN_OK = {
    "status": "Success",
    "message": "",
    "compile_result": None,
    "run_result": {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "1\n", "stderr": ""},
    "executor_pod_name": None,
    "files": {},
}


class TestOurService:
    @pytest.mark.parametrize(
        "execution",
        [
            OK,
            Execution(
                Verdict.FAILED,
                StageResult(Verdict.FAILED, 3, b"\xff\x00", "é".encode(), True, False, 0.5, 0.25, 1 << 20),
                StageResult(Verdict.OK, 0, b"", b"warning: x"),
                {"out.bin": b"\x00\xff"},
                "namespaces",
                0.125,
                True,
            ),
            Execution(Verdict.MEMORY_EXCEEDED, StageResult(Verdict.MEMORY_EXCEEDED, None, b"partial")),
            Execution(Verdict.CPU_EXCEEDED, StageResult(Verdict.CPU_EXCEEDED, None)),
            Execution(Verdict.COMPILE_FAILED, None, StageResult(Verdict.TIMED_OUT, None)),
        ],
    )
    async def test_an_execution_arrives_as_it_left(self, execution: Execution) -> None:
        async with service(ScriptedSandbox(returning(execution))) as running, RemoteSandbox(running.url) as remote:
            assert await remote.run(Program("x")) == execution

    async def test_everything_a_program_is_given_arrives(self) -> None:
        sandbox = ScriptedSandbox()
        program = Program(
            "x", "cpp", stdin=b"\xff", files={"a": b"\x00"}, fetch_files=["b"], args=["-v"], env={"K": "V"}
        )
        limits = Limits(run_seconds=1.5, cpu_seconds=1, memory_bytes=12345678, processes=7)
        async with service(sandbox) as running, RemoteSandbox(running.url) as remote:
            await remote.run(program, limits)
        (arrived, arrived_limits) = sandbox.programs[0]
        assert (arrived.stdin, arrived.files, [*arrived.args], arrived.env) == (
            b"\xff",
            {"a": b"\x00"},
            ["-v"],
            {"K": "V"},
        )
        assert arrived_limits == limits

    @pytest.mark.parametrize("error", [ProgramError("bad"), ToolchainMissingError("bad"), SandboxError("bad")])
    async def test_an_error_arrives_as_the_class_it_was(self, error: ToolyardError) -> None:
        async with service(ScriptedSandbox(raising(error))) as running, RemoteSandbox(running.url) as remote:
            with pytest.raises(type(error), match="bad") as caught:
                await remote.run(Program("x"))
        assert type(caught.value) is type(error)
        assert caught.value.retryable == error.retryable

    @pytest.mark.parametrize("suffix", ["", "/", "/run_code", "/run_code/"])
    async def test_the_url_may_be_the_base_or_the_full_one(self, suffix: str) -> None:
        async with service(ScriptedSandbox()) as running, RemoteSandbox(running.url + suffix) as remote:
            assert (await remote.run(Program("x"))).ok

    async def test_the_token_comes_from_the_argument_or_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with service(ScriptedSandbox(), token="s3cret") as running:
            async with RemoteSandbox(running.url, "s3cret") as remote:
                assert (await remote.run(Program("x"))).ok
            monkeypatch.setenv("TOOLYARD_SANDBOX_TOKEN", "s3cret")
            async with RemoteSandbox(running.url) as remote:
                assert (await remote.run(Program("x"))).ok

    async def test_a_wrong_token_is_not_worth_another_try(self) -> None:
        async with service(ScriptedSandbox(), token="s3cret") as running, RemoteSandbox(running.url, "no") as remote:
            with pytest.raises(SandboxError, match="token") as caught:
                await remote.run(Program("x"))
        assert not caught.value.retryable

    async def test_cancelling_a_run_stops_the_program_over_there(self) -> None:
        sandbox = ScriptedSandbox(forever)
        async with service(sandbox) as running, RemoteSandbox(running.url) as remote, asyncio.TaskGroup() as group:
            task = group.create_task(remote.run(Program("x")))
            await sandbox.started.wait()
            task.cancel()
            async with asyncio.timeout(patient(2)):
                await sandbox.cancelled.wait()

    async def test_a_thousand_at_once_share_the_connections_and_all_come_back(self) -> None:
        async def act(program: Program, limits: Limits) -> Execution:
            await asyncio.sleep(0.001)
            return OK

        async with (
            service(ScriptedSandbox(act, workers=8)) as running,
            RemoteSandbox(running.url, connections=32) as remote,
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(remote.run(Program("x"))) for _ in range(1000)]
        assert all(task.result().ok for task in tasks)

    async def test_waiting_for_a_connection_does_not_eat_into_the_deadline(self) -> None:
        async def act(program: Program, limits: Limits) -> Execution:
            await asyncio.sleep(0.2)
            return OK

        limits = Limits(run_seconds=0.1, compile_seconds=0.1)
        async with (
            service(ScriptedSandbox(act)) as running,
            RemoteSandbox(running.url, connections=1, margin_seconds=1) as remote,
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(remote.run(Program("x"), limits)) for _ in range(8)]
        assert all(task.result().ok for task in tasks)

    async def test_a_program_too_large_for_the_server_is_the_programs_fault(self) -> None:
        async with service(ScriptedSandbox(), max_request_bytes=1000) as running, RemoteSandbox(running.url) as remote:
            with pytest.raises(ProgramError, match="413"):
                await remote.run(Program("#" * 2000))


class TestForeignService:
    async def test_its_plain_answer_is_an_execution_of_unknown_isolation(self) -> None:
        async with peer(http(200, FOREIGN_OK)) as server, RemoteSandbox(server.url) as remote:
            execution = await remote.run(Program("print(1)"), Limits(run_seconds=3))
        assert (execution.verdict, execution.stdout, execution.isolation) == (Verdict.OK, "1\n", "unknown")
        sent = json.loads(server.requests[0])
        assert (sent["code"], sent["run_timeout"], sent["memory_limit_MB"]) == ("print(1)", 3, -1)

    async def test_what_it_would_silently_ignore_is_refused(self) -> None:
        async with peer(http(200, FOREIGN_OK)) as server, RemoteSandbox(server.url) as remote:
            with pytest.raises(ProgramError, match="ignored the program's args"):
                await remote.run(Program("x", args=["-v"]))

    async def test_its_own_failure_may_be_tried_again_by_the_caller(self) -> None:
        failed = {**FOREIGN_OK, "status": "SandboxError", "message": "no space", "run_result": None}
        async with peer(http(200, failed)) as server, RemoteSandbox(server.url) as remote:
            with pytest.raises(SandboxError, match="no space") as caught:
                await remote.run(Program("x"))
        assert caught.value.retryable
        assert len(server.requests) == 1

    async def test_it_has_no_sessions_and_the_error_says_so(self) -> None:
        async with peer(http(404, {"detail": "Not Found"})) as server, RemoteSandbox(server.url) as remote:
            with pytest.raises(SandboxError, match="no sessions") as caught:
                async with remote.session():
                    raise AssertionError("unreachable")
        assert not caught.value.retryable


class TestTriesAgain:
    @pytest.mark.parametrize("status", [429, 503, 504])
    async def test_a_busy_server_is_asked_again_after_the_time_it_named(self, status: int) -> None:
        script = (http(status, "", Retry_After="1"), http(200, FOREIGN_OK))
        begun = time.monotonic()
        async with peer(*script) as server, RemoteSandbox(server.url) as remote:
            assert (await remote.run(Program("x"))).ok
        assert len(server.requests) == 2
        assert 1 <= time.monotonic() - begun < patient(3)

    async def test_a_server_that_stays_busy_is_given_up_after_the_allowed_tries(self) -> None:
        async with (
            peer(http(504, "", Retry_After="0")) as server,
            RemoteSandbox(server.url, retries=Retries(attempts=3)) as remote,
        ):
            with pytest.raises(SandboxBusyError):
                await remote.run(Program("x"))
        assert len(server.requests) == 3

    async def test_a_server_that_names_too_long_a_time_is_given_up_at_once(self) -> None:
        async with (
            peer(http(503, "", Retry_After="3600")) as server,
            RemoteSandbox(server.url, retries=Retries(seconds=10)) as remote,
        ):
            with pytest.raises(SandboxBusyError) as caught:
                await remote.run(Program("x"))
        assert (len(server.requests), caught.value.retry_after) == (1, 3600)

    @pytest.mark.parametrize("header", ["inf", "nan", "-5"])
    async def test_a_retry_after_that_makes_no_sense_is_ignored(self, header: str) -> None:
        async with (
            peer(http(503, "", Retry_After=header)) as server,
            RemoteSandbox(server.url, retries=Retries(attempts=2)) as remote,
        ):
            with pytest.raises(SandboxBusyError) as caught:
                await remote.run(Program("x"))
        assert (len(server.requests), caught.value.retry_after) == (2, None)

    async def test_a_server_that_comes_up_late_is_found(self) -> None:
        async with peer(http(200, FOREIGN_OK)) as probe:
            port = int(probe.url.rsplit(":", 1)[1])

        async def come_up() -> None:
            await asyncio.sleep(0.2)
            server = await stack.enter_async_context(peer(http(200, FOREIGN_OK), port=port))
            assert server.url == probe.url

        async with (
            contextlib.AsyncExitStack() as stack,
            RemoteSandbox(probe.url, retries=Retries(attempts=30)) as remote,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(come_up())
            assert (await remote.run(Program("x"))).ok

    async def test_nobody_there_is_a_retryable_failure_of_the_service(self) -> None:
        async with peer(None) as gone:
            pass
        async with RemoteSandbox(gone.url, retries=Retries(attempts=2)) as remote:
            with pytest.raises(SandboxError, match="cannot connect") as caught:
                await remote.run(Program("x"))
        assert caught.value.retryable

    async def test_an_idle_connection_that_was_closed_is_replaced(self) -> None:
        async with peer(http(200, FOREIGN_OK), None, http(200, FOREIGN_OK)) as server:
            async with RemoteSandbox(server.url) as remote:
                assert (await remote.run(Program("x"))).ok
                assert (await remote.run(Program("x"))).ok
            assert len(server.requests) == 3


class TestDoesNotTryAgain:
    async def test_a_fresh_connection_that_broke_in_mid_request(self) -> None:
        async with peer(None) as server, RemoteSandbox(server.url) as remote:
            with pytest.raises(SandboxError, match="broke the connection") as caught:
                await remote.run(Program("x"))
        assert caught.value.retryable
        assert len(server.requests) == 1

    async def test_a_reused_connection_that_broke_under_a_running_program(self) -> None:
        async with peer(http(200, FOREIGN_OK), 1.1) as server, RemoteSandbox(server.url) as remote:
            assert (await remote.run(Program("x"))).ok
            with pytest.raises(SandboxError, match="broke the connection"):
                await remote.run(Program("x"))
        assert len(server.requests) == 2

    async def test_a_server_killed_in_mid_request(self) -> None:
        async with (
            server_process(takes=60, grace=0) as (process, url),
            RemoteSandbox(url) as remote,
            asyncio.TaskGroup() as group,
        ):

            async def run() -> None:
                with pytest.raises(SandboxError, match="broke the connection") as caught:
                    await remote.run(Program("x"))
                assert caught.value.retryable

            group.create_task(run())
            await until_busy(url)
            process.send_signal(signal.SIGKILL)

    async def test_a_deadline_that_passed(self) -> None:
        async with (
            peer(silent=True) as server,
            RemoteSandbox(server.url, margin_seconds=0.1) as remote,
        ):
            with pytest.raises(SandboxError, match=r"no answer within 0\.3 s") as caught:
                await remote.run(Program("x"), Limits(run_seconds=0.1, compile_seconds=0.1))
        assert caught.value.retryable
        assert len(server.requests) == 1

    @pytest.mark.parametrize(
        ("reply", "kind", "retryable"),
        [
            (http(500, "oops"), SandboxError, True),
            (http(502, "bad gateway"), SandboxError, True),
            (http(404, {"detail": "Not Found"}), SandboxError, False),
            (http(307, "", Location="/elsewhere"), SandboxError, False),
            (http(403, "no"), SandboxError, False),
            (http(200, "<html>"), SandboxError, False),
            (http(200, {"status": "Weird"}), SandboxError, False),
            (http(422, {"detail": []}), ProgramError, False),
            (http(413, ""), ProgramError, False),
        ],
    )
    async def test_an_answer_it_can_do_nothing_with(
        self, reply: bytes, kind: type[ToolyardError], retryable: bool
    ) -> None:
        async with peer(reply) as server, RemoteSandbox(server.url) as remote:
            with pytest.raises(kind) as caught:
                await remote.run(Program("x"))
        assert caught.value.retryable is retryable
        assert len(server.requests) == 1


def test_it_is_a_sandbox() -> None:
    assert isinstance(RemoteSandbox("http://localhost:1"), Sandbox)


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://host", "http://", "http://host/run_code?x=1"])
def test_a_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="sandbox URL"):
        RemoteSandbox(url)


@pytest.mark.parametrize("enter", [True, False])
async def test_a_closed_sandbox_says_so(enter: bool) -> None:
    remote = RemoteSandbox("http://127.0.0.1:1")
    if enter:
        async with remote:
            pass
    with pytest.raises(SandboxClosedError, match="not open"):
        await remote.run(Program("x"))
