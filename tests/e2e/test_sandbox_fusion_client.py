"""Unchanged third-party clients against our service and real programs: the PyPI package and verl's."""

from __future__ import annotations

import asyncio
import base64
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import sandbox_fusion
from sandbox_fusion import (
    CommandRunStatus,
    RunCodeRequest,
    RunJupyterRequest,
    RunStatus,
    SummaryMapping,
    run_code,
    run_code_async,
    run_concurrent,
    run_jupyter,
    run_jupyter_async,
    summary_run_code_result,
)
from serving import OK, ScriptedSandbox, service, service_in_thread, until

from patience import patient
from toolyard.errors import SandboxBusyError
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Limits, Program
from toolyard.sandbox.remote.sandbox import RemoteSandbox

SUMMARY = SummaryMapping(
    CompileFailed="compile failed", CompileTimeout="compile timeout", RunFailed="run failed", RunTimeout="run timeout"
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with service_in_thread(lambda: LocalSandbox(workers=2)) as base:
        yield base


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


class TestSandboxFusionPackage:
    def run(self, url: str, code: str, language: str = "python", **fields: Any) -> sandbox_fusion.RunCodeResponse:
        request = RunCodeRequest(code=code, language=language, **fields)
        return run_code(request, endpoint=url, max_attempts=1, client_timeout=30)

    def test_a_program_that_works(self, url: str) -> None:
        result = self.run(url, "print('hello')\nimport sys; print('oops', file=sys.stderr)")
        assert (result.status, result.message, result.compile_result) == (RunStatus.Success, "", None)
        assert result.run_result is not None
        assert (result.run_result.status, result.run_result.return_code) == (CommandRunStatus.Finished, 0)
        assert (result.run_result.stdout, result.run_result.stderr) == ("hello\n", "oops\n")

    def test_the_endpoint_may_be_set_once_for_all(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox_fusion.config, "SANDBOX_ENDPOINT", "unset")
        monkeypatch.setattr(sandbox_fusion.config, "DATASET_ENDPOINT", "unset")
        sandbox_fusion.set_endpoint(f"{url}/")
        assert run_code(RunCodeRequest(code="", language="python"), max_attempts=1).status == RunStatus.Success

    def test_stdin_is_read_and_a_program_that_ignores_megabytes_of_it_ends(self, url: str) -> None:
        assert self.run(url, "print(input()[::-1])", stdin="abc").run_result.stdout == "cba\n"
        assert self.run(url, "print(1)", stdin="x" * 3_000_000).status == RunStatus.Success

    def test_files_go_in_and_come_out_byte_for_byte(self, url: str) -> None:
        content = bytes(range(256))
        code = "data = open('in/a.bin', 'rb').read()\nopen('out.bin', 'wb').write(data[::-1])"
        result = self.run(
            url, code, files={"in/a.bin": b64(content), "skipped": None}, fetch_files=["out.bin", "missing"]
        )
        assert result.status == RunStatus.Success
        assert result.files == {"out.bin": b64(content[::-1])}

    def test_files_are_fetched_after_a_failure_too(self, url: str) -> None:
        result = self.run(url, "open('f', 'w').write('x')\nraise SystemExit(3)", fetch_files=["f"])
        assert (result.status, result.run_result.return_code) == (RunStatus.Failed, 3)
        assert result.files == {"f": b64(b"x")}

    def test_a_non_zero_exit_is_failed_and_finished(self, url: str) -> None:
        result = self.run(url, "raise ValueError('no')")
        assert (result.status, result.run_result.status) == (RunStatus.Failed, CommandRunStatus.Finished)
        assert result.run_result.return_code == 1
        assert "ValueError: no" in result.run_result.stderr
        assert summary_run_code_result(result, SUMMARY) == "run failed"

    def test_a_python_syntax_error_is_a_run_failure(self, url: str) -> None:
        result = self.run(url, "def (")
        assert (result.status, result.compile_result) == (RunStatus.Failed, None)
        assert "SyntaxError" in result.run_result.stderr

    def test_a_signal_is_a_negative_return_code(self, url: str) -> None:
        result = self.run(url, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        assert (result.status, result.run_result.return_code) == (RunStatus.Failed, -11)

    def test_a_time_out_has_no_return_code_and_keeps_what_was_printed(self, url: str) -> None:
        begun = time.monotonic()
        result = self.run(url, "print('so far', flush=True)\nwhile True: pass", run_timeout=0.5)
        assert time.monotonic() - begun < patient(5)
        assert (result.status, result.run_result.status) == (RunStatus.Failed, CommandRunStatus.TimeLimitExceeded)
        assert (result.run_result.return_code, result.run_result.stdout) == (None, "so far\n")
        assert summary_run_code_result(result, SUMMARY) == "run timeout"

    @pytest.mark.toolchain("cpp")
    @pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
    def test_a_compile_error_has_a_compile_result_and_no_run(self, url: str) -> None:
        result = self.run(url, "int main() { return nonsense; }", "cpp")
        assert (result.status, result.run_result) == (RunStatus.Failed, None)
        assert "nonsense" in result.compile_result.stderr
        assert summary_run_code_result(result, SUMMARY) == "compile failed"

    def test_a_language_without_a_toolchain_is_a_sandbox_error_that_names_it(self, url: str) -> None:
        with pytest.raises(Exception, match=r"Sandbox responded with error.*lean"):
            self.run(url, "", "lean")

    def test_bash_runs(self, url: str) -> None:
        assert self.run(url, "echo $((6 * 7))", "bash").run_result.stdout == "42\n"

    async def test_the_async_client_works(self, url: str) -> None:
        request = RunCodeRequest(code="print(2)", language="python")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_code_async(request, endpoint=url, client_timeout=30)) for _ in range(20)]
        assert {task.result().run_result.stdout for task in tasks} == {"2\n"}

    def test_run_concurrent_gets_each_its_own_answer(self, url: str) -> None:
        asked = [RunCodeRequest(code=f"print({number})", language="python") for number in range(60)]
        got = run_concurrent(run_code, args=[[one, url] for one in asked], concurrency=20)
        assert [one.run_result.stdout for one in got] == [f"{number}\n" for number in range(60)]

    def test_a_notebook_keeps_its_state_and_survives_a_raising_cell(self, url: str) -> None:
        cells = [
            "a = 123",
            "a",
            "print(a)",
            'import sys; sys.stderr.write("message"); None',
            'raise RuntimeError("error message")',
            "a + 1",
        ]
        request = RunJupyterRequest(cells=cells, files={"in": b64(b"1")}, fetch_files=["in"])
        result = run_jupyter(request, endpoint=url, max_attempts=1, client_timeout=60)
        assert (result.status, result.driver.status) == (RunStatus.Success, CommandRunStatus.Finished)
        assert [cell.stdout for cell in result.cells] == ["", "", "123\n", "", "", ""]
        assert result.cells[1].display[0]["text/plain"] == "123"
        assert result.cells[3].stderr == "message"
        assert [(one["ename"], one["evalue"]) for one in result.cells[4].error] == [("RuntimeError", "error message")]
        assert isinstance(result.cells[4].error[0]["traceback"], list)
        assert result.cells[5].display[0]["text/plain"] == "124"
        assert result.files == {"in": b64(b"1")}

    async def test_a_notebook_out_of_time_is_failed(self, url: str) -> None:
        request = RunJupyterRequest(cells=["print(1)", "while True: pass"], total_timeout=1)
        result = await run_jupyter_async(request, endpoint=url, max_attempts=1, client_timeout=30)
        assert (result.status, result.driver.status) == (RunStatus.Failed, CommandRunStatus.TimeLimitExceeded)
        assert result.cells[0].stdout == "1\n"


def as_verl_does(url: str, code: str, stdin: str, *, compile_timeout: int = 10, run_timeout: int = 10) -> Any:
    """verl's reward client: all eight fields to the full URL; three tries, and again only for 504."""
    payload = {
        "compile_timeout": compile_timeout,
        "run_timeout": run_timeout,
        "code": code,
        "stdin": stdin,
        "memory_limit_MB": 1024,
        "language": "python",
        "files": {},
        "fetch_files": [],
    }
    for attempt in (1, 2, 3):
        response = requests.post(url, json=payload, timeout=compile_timeout + run_timeout + 10)
        if response.status_code == 504 and attempt < 3:
            time.sleep(attempt)
            continue
        response.raise_for_status()
        return response.json()
    raise AssertionError("unreachable")


class TestVerl:
    @pytest.mark.parametrize("code", ["print(int(input()) * 2)", "raise KeyError", "while True: pass"])
    def test_stdout_and_stderr_can_always_be_joined(self, url: str, code: str) -> None:
        result = as_verl_does(f"{url}/run_code", code, "21", run_timeout=1)
        run = result["run_result"]
        assert isinstance(run["stdout"] + run["stderr"], str)
        assert result["status"] == ("Success" if code.startswith("print") else "Failed")

    async def test_a_busy_moment_costs_a_try_and_not_the_reward(self) -> None:
        calls = 0

        async def busy_at_first(program: Program, limits: Limits) -> Execution:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise SandboxBusyError("come back")
            return OK

        async with service(ScriptedSandbox(busy_at_first)) as running:
            result = await asyncio.to_thread(as_verl_does, f"{running.url}/run_code", "print(1)", "")
        assert (result["status"], calls) == ("Success", 2)


class TestRealPrograms:
    async def test_a_client_that_hangs_up_really_stops_its_program(self) -> None:
        code = "import subprocess; subprocess.run(['sleep', '98765.4321'])"
        async with LocalSandbox(workers=1) as sandbox, service(sandbox) as running:
            async with RemoteSandbox(running.url) as remote, asyncio.TaskGroup() as group:
                task = group.create_task(remote.run(Program(code), Limits(run_seconds=60)))
                await until(lambda: bool(processes("98765.4321")))
                task.cancel()
            await until(lambda: not processes("98765.4321"))
            await until(lambda: sandbox.statistics().busy == 0)

    @pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
    async def test_programs_at_once_each_get_their_own_answer(self, count: int) -> None:
        async with (
            LocalSandbox(workers=4) as sandbox,
            service(sandbox, max_wait_seconds=60) as running,
            RemoteSandbox(running.url, connections=1000, margin_seconds=90) as remote,
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(remote.run(Program(f"print({number})"))) for number in range(count)]
        assert [task.result().stdout for task in tasks] == [f"{number}\n" for number in range(count)]

    async def test_a_session_keeps_its_variables_between_requests(self) -> None:
        async with (
            LocalSandbox(workers=1) as sandbox,
            service(sandbox) as running,
            RemoteSandbox(running.url) as remote,
            remote.session() as session,
        ):
            assert (await session.run("x = 20")).ok
            assert (await session.run("x + 1")).display == ({"text/plain": "21"},)
            failed = await session.run("1 / 0")
            assert failed.error is not None
            assert failed.error.ename == "ZeroDivisionError"
            await session.write_files({"data.bin": b"\x00\xff"})
            assert await session.read_files(["data.bin"]) == {"data.bin": b"\x00\xff"}

    async def test_local_and_remote_agree_on_what_became_of_a_program(self) -> None:
        programs = [
            Program("print('é')", stdin="x"),
            Program("import sys; sys.stdout.buffer.write(b'\\xff'); sys.exit(3)"),
            Program("echo $1 >&2; kill -9 $$", "bash"),
        ]
        async with (
            LocalSandbox(workers=1) as sandbox,
            service(sandbox) as running,
            RemoteSandbox(running.url) as remote,
        ):
            for program in programs:
                here, there = await sandbox.run(program), await remote.run(program)
                assert there.run is not None
                assert here.run is not None
                assert (there.verdict, there.exit_code, there.isolation) == (
                    here.verdict,
                    here.exit_code,
                    here.isolation,
                )
                assert (there.run.stdout_bytes, there.run.stderr_bytes) == (
                    here.run.stdout_bytes,
                    here.run.stderr_bytes,
                )


def processes(argument: str) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found
