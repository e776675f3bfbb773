from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from toolyard.errors import (
    IsolationError,
    ProgramError,
    SandboxBusyError,
    SandboxError,
    ToolchainMissingError,
    ToolyardError,
)
from toolyard.sandbox.protocol import (
    MIB,
    CellError,
    CellResult,
    Execution,
    Limits,
    Program,
    StageResult,
    Verdict,
)
from toolyard.sandbox.wire import notebook as wire_notebook
from toolyard.sandbox.wire import programs as wire

DEFAULTS = Limits(run_seconds=7, compile_seconds=8, memory_bytes=9 * MIB, processes=33)


def ask(**fields: object) -> wire.RunCodeRequest:
    return wire.RunCodeRequest.model_validate_json(json.dumps({"code": "x", "language": "python", **fields}))


def answer(execution: Execution) -> dict:
    return json.loads(wire.write_response(execution, extended=False).model_dump_json())


def ended(verdict: Verdict, exit_code: int | None, **more: object) -> Execution:
    return Execution(verdict, StageResult(verdict, exit_code, b"out", b"err", wall_seconds=0.5), **more)  # pyright: ignore


def foreign(**fields: object) -> wire.ExtendedRunCodeResponse:
    return wire.ExtendedRunCodeResponse.model_validate_json(json.dumps({"status": "Success", "message": "", **fields}))


def stage(**fields: object) -> dict[str, object]:
    return {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "o", "stderr": "e", **fields}


class TestRequest:
    def test_left_out_fields_have_sandbox_fusions_defaults(self) -> None:
        request = ask()
        assert (request.compile_timeout, request.run_timeout, request.memory_limit_mb) == (10, 10, -1)
        assert (request.stdin, request.files, request.fetch_files) == (None, {}, [])

    def test_numeric_strings_are_coerced_and_unknown_fields_ignored(self) -> None:
        request = ask(run_timeout="3.5", compile_timeout="4", memory_limit_MB="256", colour="blue")
        _, limits = wire.read_request(request, DEFAULTS)
        assert (limits.run_seconds, limits.compile_seconds, limits.memory_bytes) == (3.5, 4, 256 * MIB)

    def test_what_the_client_does_not_say_is_the_servers_default(self) -> None:
        assert wire.read_request(ask(), DEFAULTS)[1] == DEFAULTS
        assert wire.read_request(ask(run_timeout=10), DEFAULTS)[1] == DEFAULTS.model_copy(update={"run_seconds": 10.0})

    @pytest.mark.parametrize("limit", [0, -1, -1000])
    def test_no_memory_limit_means_the_servers_default(self, limit: int) -> None:
        assert wire.read_request(ask(memory_limit_MB=limit), DEFAULTS)[1].memory_bytes == 9 * MIB

    @pytest.mark.parametrize("seconds", [0, -1, "nan", "inf", "soon", None])
    def test_a_time_limit_that_is_none_is_refused(self, seconds: object) -> None:
        with pytest.raises(ValidationError):
            ask(run_timeout=seconds)

    def test_a_memory_limit_beyond_any_machine_is_refused(self) -> None:
        with pytest.raises(ValidationError):
            ask(memory_limit_MB=2**60)

    def test_files_are_base64_and_null_is_skipped(self) -> None:
        program, _ = wire.read_request(ask(files={"a": "AAH/", "b": None, "c": ""}), DEFAULTS)
        assert program.files == {"a": b"\x00\x01\xff", "c": b""}

    def test_base64_with_line_breaks_is_base64(self) -> None:
        content = bytes(range(256))
        lines = base64.encodebytes(content).decode()
        assert wire.read_request(ask(files={"a": lines}), DEFAULTS)[0].files == {"a": content}

    @pytest.mark.parametrize("content", ["!!!", "AAA", "AAAA\u00e9", "=AAA"])
    def test_what_is_not_base64_is_the_requests_fault_and_named(self, content: str) -> None:
        with pytest.raises(ProgramError, match=r"data/in\.bin"):
            wire.read_request(ask(files={"data/in.bin": content}), DEFAULTS)

    def test_the_body_we_post_has_all_eight_names_of_sandbox_fusion(self) -> None:
        limits = Limits(memory_bytes=1024 * MIB)
        body = json.loads(wire.write_request(Program("x", stdin="in", files={"f": b"1"}), limits))
        assert body | {"toolyard": None} == {
            "code": "x",
            "language": "python",
            "compile_timeout": 10,
            "run_timeout": 10,
            "memory_limit_MB": 1024,
            "stdin": "in",
            "files": {"f": "MQ=="},
            "fetch_files": [],
            "toolyard": None,
        }

    def test_a_memory_limit_that_nobody_set_is_for_our_own_service_alone(self) -> None:
        body = wire.write_request(Program("x"), Limits(run_seconds=3))
        assert json.loads(body)["memory_limit_MB"] == -1
        assert wire.read_request(wire.RunCodeRequest.model_validate_json(body), DEFAULTS)[1].memory_bytes == 1024 * MIB

    def test_text_that_json_cannot_carry_is_the_programs_fault(self) -> None:
        with pytest.raises(ProgramError, match="JSON"):
            wire.write_request(Program("print('\ud800')"), Limits())

    @pytest.mark.parametrize(
        ("program", "what"),
        [
            (Program("", args=["-v"]), "args"),
            (Program("", env={"A": "1"}), "env"),
            (Program("", stdin=b"\xff"), "stdin that is not UTF-8"),
            (Program("", stdin=b"plain"), None),
        ],
    )
    def test_what_a_foreign_server_would_ignore_is_known(self, program: Program, what: str | None) -> None:
        assert wire.needs_extras(program) == what


class TestResponse:
    def test_success(self) -> None:
        assert answer(ended(Verdict.OK, 0, files={"f": b"\xff"})) == {
            "status": "Success",
            "message": "",
            "compile_result": None,
            "run_result": stage(execution_time=0.5, stdout="out", stderr="err"),
            "executor_pod_name": None,
            "files": {"f": "/w=="},
        }

    @pytest.mark.parametrize(("verdict", "code"), [(Verdict.FAILED, 3), (Verdict.SIGNALED, -11)])
    def test_a_non_zero_exit_and_a_signal_are_failed_and_finished(self, verdict: Verdict, code: int) -> None:
        body = answer(ended(verdict, code))
        assert (body["status"], body["run_result"]["status"], body["run_result"]["return_code"]) == (
            "Failed",
            "Finished",
            code,
        )

    @pytest.mark.parametrize("verdict", [Verdict.TIMED_OUT, Verdict.CPU_EXCEEDED])
    @pytest.mark.parametrize("code", [None, -9, -24])
    def test_a_time_limit_has_no_return_code(self, verdict: Verdict, code: int | None) -> None:
        body = answer(ended(verdict, code))
        assert body["status"] == "Failed"
        assert body["run_result"] == stage(
            status="TimeLimitExceeded", execution_time=0.5, return_code=None, stdout="out", stderr="err"
        )

    @pytest.mark.parametrize(
        ("verdict", "word"),
        [(Verdict.MEMORY_EXCEEDED, "memory"), (Verdict.OUTPUT_EXCEEDED, "output"), (Verdict.DISK_EXCEEDED, "disk")],
    )
    def test_another_limit_looks_killed_and_stderr_names_it(self, verdict: Verdict, word: str) -> None:
        run = answer(ended(verdict, None))["run_result"]
        assert (run["status"], run["return_code"]) == ("Finished", -9)
        assert run["stderr"] == f"err\nKilled: the {word} limit was exceeded.\n"

    def test_a_compile_error_has_no_run(self) -> None:
        compiled = StageResult(Verdict.FAILED, 1, b"", b"error: expected ;")
        body = answer(Execution(Verdict.COMPILE_FAILED, None, compiled))
        assert (body["status"], body["run_result"], body["compile_result"]["return_code"]) == ("Failed", None, 1)

    def test_streams_of_a_stage_that_ran_are_never_null(self) -> None:
        run = answer(Execution(Verdict.OK, StageResult(Verdict.OK, 0)))["run_result"]
        assert (run["stdout"], run["stderr"]) == ("", "")

    def test_bytes_that_are_no_text_are_escaped(self) -> None:
        body = answer(Execution(Verdict.OK, StageResult(Verdict.OK, 0, b"a\xffb")))
        assert body["run_result"]["stdout"] == "a\\xffb"

    def test_a_failure_of_ours_has_a_message_and_no_stage(self) -> None:
        body = json.loads(wire.write_failure(SandboxError("worker died"), extended=False).model_dump_json())
        assert body == {
            "status": "SandboxError",
            "message": "worker died",
            "compile_result": None,
            "run_result": None,
            "executor_pod_name": None,
            "files": {},
        }

    def test_a_failure_without_words_still_has_a_message(self) -> None:
        assert wire.write_failure(SandboxError(), extended=False).message == "SandboxError"


seconds = st.floats(0, 1e6)
stages = st.builds(
    StageResult,
    st.sampled_from([verdict for verdict in Verdict if verdict is not Verdict.COMPILE_FAILED]),
    st.none() | st.integers(-64, 255),
    st.binary(),
    st.binary() | st.text().map(str.encode),
    st.booleans(),
    st.booleans(),
    seconds,
    seconds,
    st.integers(0, 2**50),
)
ran = st.builds(
    lambda run, compiled, **more: Execution(run.verdict, run, compiled, **more),
    stages,
    st.none() | stages,
    files=st.dictionaries(st.text(), st.binary()),
    isolation=st.sampled_from(["full", "namespaces", "none"]),
    queue_seconds=seconds,
    compile_cached=st.booleans(),
)
rejected = st.builds(
    lambda compiled: Execution(Verdict.COMPILE_FAILED, None, compiled),
    stages.filter(lambda compiled: compiled.verdict is not Verdict.OK),
)


@given(ran | rejected)
def test_an_execution_arrives_as_it_left_when_both_ends_are_ours(execution: Execution) -> None:
    sent = wire.write_response(execution, extended=True).model_dump_json()
    assert wire.read_response(wire.ExtendedRunCodeResponse.model_validate_json(sent)) == execution


programs = st.builds(
    Program,
    st.text(),
    st.sampled_from(["python", "cpp"]),
    stdin=st.none() | st.text() | st.binary(),
    files=st.dictionaries(st.text(), st.binary()),
    fetch_files=st.lists(st.text()),
    args=st.lists(st.text()),
    env=st.dictionaries(st.text(), st.text()),
)
limits = st.builds(
    Limits,
    run_seconds=st.floats(0.001, 1e6),
    memory_bytes=st.integers(1, 2**50),
    cpu_seconds=st.none() | st.floats(0.001, 1e6),
    processes=st.integers(1, 1000),
)


@given(programs, limits)
def test_a_program_and_its_limits_arrive_as_they_left_when_both_ends_are_ours(program: Program, asked: Limits) -> None:
    request = wire.RunCodeRequest.model_validate_json(wire.write_request(program, asked))
    arrived, arrived_limits = wire.read_request(request, DEFAULTS)

    def told(one: Program) -> tuple[object, ...]:
        stdin = one.stdin.encode() if isinstance(one.stdin, str) else one.stdin
        return (one.code, one.language, stdin, one.files, [*one.fetch_files], [*one.args], dict(one.env))

    assert told(arrived) == told(program)
    assert arrived_limits == asked


class TestForeignServer:
    @pytest.mark.parametrize(
        ("run", "verdict", "code"),
        [
            (stage(), Verdict.OK, 0),
            (stage(return_code=2), Verdict.FAILED, 2),
            (stage(return_code=-6), Verdict.SIGNALED, -6),
            (stage(status="TimeLimitExceeded", return_code=None), Verdict.TIMED_OUT, None),
        ],
    )
    def test_endings_become_verdicts(self, run: dict, verdict: Verdict, code: int | None) -> None:
        execution = wire.read_response(foreign(status="Failed", run_result=run))
        assert (execution.verdict, execution.exit_code, execution.stdout, execution.stderr) == (verdict, code, "o", "e")
        assert execution.isolation == "unknown"

    def test_null_streams_are_empty(self) -> None:
        execution = wire.read_response(foreign(run_result=stage(stdout=None, stderr=None, execution_time=None)))
        assert (execution.stdout, execution.stderr, execution.wall_seconds) == ("", "", 0)

    def test_a_failed_compilation_without_a_run_is_a_verdict(self) -> None:
        execution = wire.read_response(foreign(status="Failed", compile_result=stage(return_code=1)))
        assert (execution.verdict, execution.run, execution.stderr) == (Verdict.COMPILE_FAILED, None, "e")

    def test_sandbox_error_is_the_services_failure_and_may_be_tried_again(self) -> None:
        with pytest.raises(SandboxError, match="no disk") as caught:
            wire.read_response(foreign(status="SandboxError", message="no disk"))
        assert caught.value.retryable

    @pytest.mark.parametrize(
        "fields",
        [
            {"run_result": stage(status="Error")},
            {"status": "Success"},
            {"compile_result": stage()},
            {"run_result": stage(return_code=None)},
            {"run_result": stage(), "files": {"a": "!"}},
        ],
    )
    def test_an_answer_that_makes_no_sense_is_never_scored(self, fields: dict) -> None:
        with pytest.raises(SandboxError):
            wire.read_response(foreign(**fields))


@pytest.mark.parametrize(
    "error",
    [ProgramError("p"), ToolchainMissingError("t"), SandboxError("s"), IsolationError("i"), SandboxBusyError("b")],
)
def test_an_error_of_ours_arrives_as_the_class_it_was(error: ToolyardError) -> None:
    sent = wire.write_failure(error, extended=True).model_dump_json()
    with pytest.raises(type(error), match=str(error)) as caught:
        wire.read_response(wire.ExtendedRunCodeResponse.model_validate_json(sent))
    assert caught.value.retryable == error.retryable


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "ConfigError", "annotations", "Nonsense", ""])
def test_a_server_cannot_make_us_raise_anything_but_its_own_failures(name: str) -> None:
    assert type(wire.named_error(name, "m", retryable=False)) is SandboxError


def cell(verdict: Verdict = Verdict.OK, **fields: object) -> CellResult:
    return CellResult(verdict, "out", "err", **fields)  # pyright: ignore


def notebook(*cells: CellResult, out_of_time: bool = False) -> dict:
    response = wire_notebook.write_notebook(cells, seconds=1.5, out_of_time=out_of_time, files={"f": b"1"})
    return json.loads(response.model_dump_json())


class TestNotebook:
    def test_a_raising_cell_is_reported_and_leaves_the_notebook_successful(self) -> None:
        raised = CellError("ValueError", "no", ("line 1", "line 2"))
        body = notebook(cell(display=({"text/plain": "3"},)), cell(Verdict.FAILED, error=raised))
        assert body == {
            "status": "Success",
            "message": "",
            "driver": {"status": "Finished", "execution_time": 1.5, "return_code": 0, "stdout": "", "stderr": ""},
            "cells": [
                {"stdout": "out", "stderr": "err", "display": [{"text/plain": "3"}], "error": []},
                {
                    "stdout": "out",
                    "stderr": "err",
                    "display": [],
                    "error": [{"ename": "ValueError", "evalue": "no", "traceback": ["line 1", "line 2"]}],
                },
            ],
            "executor_pod_name": None,
            "files": {"f": "MQ=="},
        }

    def test_a_cell_out_of_time_fails_the_notebook_and_says_why(self) -> None:
        body = notebook(cell(Verdict.TIMED_OUT), cell())
        assert (body["status"], body["driver"]["status"], body["driver"]["return_code"]) == (
            "Failed",
            "TimeLimitExceeded",
            None,
        )
        assert body["cells"][0]["error"][0]["ename"] == "TIMED_OUT"

    def test_running_out_of_total_time_between_cells_fails_the_notebook(self) -> None:
        assert notebook(cell(), out_of_time=True)["driver"]["status"] == "TimeLimitExceeded"

    def test_a_killed_interpreter_fails_the_notebook_and_names_the_limit(self) -> None:
        body = notebook(cell(Verdict.MEMORY_EXCEEDED, session_lost=True))
        assert (body["status"], body["driver"]["return_code"]) == ("Failed", -9)
        assert "memory" in body["driver"]["stderr"]

    def test_another_kernel_is_refused_by_name(self) -> None:
        request = wire_notebook.RunJupyterRequest(cells=[], kernel="julia")
        with pytest.raises(ProgramError, match="julia"):
            wire_notebook.check_kernel(request)
