"""`POST /submit` of the service, using `CodeJudge`: answers to dataset rows in SandboxFusion's forms.

    serve(config, sandbox, judge=SubmissionJudge())

A row (`provided_data`) is one of these, distinguished by the form of its `test`:

* a list of `{"input": {"stdin": …}, "output": {"stdout": …}}`, as CommonOJDataset has it;
* `{"code": "assert …"}`, as AutoEvalDataset has it: Python that runs after the answer's program;
* any other form that `read_suite` reads: `inputs` and `outputs`, `test_list`, `test` with `entry_point`, …

`test` and `labels` may be JSON text, as in parquet files. Not supported, and rejected: the server's own datasets, files
besides stdin and stdout, test code in other languages, `custom_extract_logic`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from toolyard.errors import ConfigError, SandboxBusyError
from toolyard.rewards.code.cases import read_suite
from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.protocol import Case, CaseResult, CaseVerdict, CodeSettings, ExtractedCode, Suite, SuiteKind
from toolyard.sandbox.protocol import MIB, Limits, Sandbox
from toolyard.sandbox.wire.programs import KILLED, RunCodeResponse, StageReport
from toolyard.sandbox.wire.submit import EvalResult, EvalTestCase, ExtractedType, SubmitRequest

__all__ = ["SubmissionJudge", "read_row"]

_ENDED = (CaseVerdict.PASSED, CaseVerdict.WRONG_ANSWER)


class SubmissionJudge:
    """The service's judge: see `toolyard.sandbox.service.app.Judge`."""

    async def judge(
        self,
        request: SubmitRequest,
        sandbox: Sandbox,
        limits: Limits,
        *,
        workers: int,
        max_cases: int,
        patience_seconds: float,
    ) -> EvalResult:
        """Judge an answer.

        Raises:
            ConfigError: the row is not one of the forms above, or needs something unsupported.
            SandboxBusyError: no worker was available, or our failure kept a test from running. Safe to retry.
        """
        suite = read_row(request)
        if len(suite.cases) > max_cases:
            raise ConfigError(f"provided_data: {len(suite.cases)} tests; this server takes at most {max_cases}")
        settings = CodeSettings(
            run_seconds=limits.run_seconds,
            compile_seconds=limits.compile_seconds,
            memory_limit_mb=max(1, limits.memory_bytes // MIB),
            without_fences="whole",
            stop_at_first_failure=not request.config.extra.get("run_all_cases", False),
            enable_global_rate_limit=False,
            num_workers=workers,
        )
        judge = CodeJudge(settings, sandbox=sandbox)
        result = await judge.judge(request.completion, suite, patience_seconds=patience_seconds)
        if result.score is None:
            raise SandboxBusyError(f"it could not be judged now: {result.why}")
        code = result.extracted.code or ""
        test_code = "\n".join(case.test for case in suite.cases) or None
        ran = [case for case in result.cases if case.verdict is not CaseVerdict.NOT_RUN]
        return EvalResult(
            id=request.id,
            accepted=result.score == 1.0,
            extracted_code=code,
            full_code=f"{code}\n{test_code}" if code and test_code else None,
            test_code=test_code,
            tests=[_test(case, suite) for case in ran],
            extracted_type=_kind(result.extracted),
        )


def read_row(request: SubmitRequest) -> Suite:
    """Read the tests of the row in `request`.

    Raises:
        ConfigError: it is missing or not supported. The message names the field.
    """
    config = request.config
    if config.custom_extract_logic:
        raise ConfigError("custom_extract_logic: not supported; the answer's last fenced block is the program")
    row = _row(config.provided_data, request.id)
    labels = _decoded(row.get("labels"), "labels")
    named = cast("dict[str, Any]", labels) if isinstance(labels, dict) else {}
    language = config.language or named.get("programming_language") or named.get("execution_language") or None
    if not isinstance(language, str | None):
        raise ConfigError("provided_data.labels: the language is not text")
    tests = _decoded(row.get("test"), "test")
    if isinstance(tests, list) and tests:
        cases = tuple(_stdio(case, index) for index, case in enumerate(cast("list[Any]", tests)))
        return Suite(SuiteKind.STDIO, cases, language=language)
    if isinstance(tests, Mapping) and "code" in tests:
        code = cast("Mapping[str, Any]", tests)
        if code.get("asset"):
            raise ConfigError("provided_data.test.asset: files besides the program are not supported")
        return read_suite({"asserts": [code["code"]], "language": language or "python"})
    return read_suite({**row, "test": tests, "language": row.get("language") or language})


def _row(provided: dict[str, Any] | list[dict[str, Any]] | None, wanted: int | str) -> dict[str, Any]:
    if not provided:
        raise ConfigError("provided_data: missing; this server has no datasets")
    if isinstance(provided, dict):
        return provided
    found = [row for row in provided if str(row.get("id")) == str(wanted)]
    if len(found) != 1:
        raise ConfigError(f"provided_data: {len(found)} of {len(provided)} rows have the id {wanted!r}")
    return found[0]


def _decoded(value: Any, name: str) -> Any:
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"provided_data.{name}: not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"provided_data.{name}: too deeply nested") from None


def _stdio(case: Any, index: int) -> Case:
    streams: list[str] = []
    for side, stream in (("input", "stdin"), ("output", "stdout")):
        where = f"provided_data.test[{index}].{side}"
        given: Any = cast("Mapping[str, Any]", case).get(side) if isinstance(case, Mapping) else None
        if not isinstance(given, Mapping):
            raise ConfigError(f'{where}: expected {{"{stream}": text}}')
        named = cast("Mapping[str, Any]", given)
        if files := [name for name in named if name != stream]:
            raise ConfigError(f"{where}: file {files[0]!r}: only {stream} is supported")
        if not isinstance(named.get(stream, ""), str):
            raise ConfigError(f"{where}.{stream}: expected text")
        streams.append(named.get(stream, ""))
    return Case(stdin=streams[0], expected=streams[1])


def _test(case: CaseResult, suite: Suite) -> EvalTestCase:
    given = suite.cases[case.index]
    test_info_fields: dict[str, Any] | None = None
    if suite.kind is SuiteKind.STDIO:
        test_info_fields = {"input": {"stdin": given.stdin}, "output": {"stdout": given.expected}}
    return EvalTestCase(
        passed=case.verdict is CaseVerdict.PASSED, exec_info=_execution(case, suite), test_info=test_info_fields
    )


def _execution(case: CaseResult, suite: Suite) -> RunCodeResponse:
    late = case.verdict is CaseVerdict.TIME_LIMIT
    failed = case.verdict not in _ENDED or (suite.kind is SuiteKind.ASSERTS and case.verdict is not CaseVerdict.PASSED)
    code = None if late else KILLED if case.exit_code is None else case.exit_code
    stage = StageReport(
        status="TimeLimitExceeded" if late else "Finished",
        execution_time=case.wall_seconds,
        return_code=1 if failed and code == 0 else code,
        stdout=case.stdout,
        stderr=case.stderr or (case.why if failed else ""),
    )
    compiled = case.verdict is CaseVerdict.COMPILE_ERROR
    return RunCodeResponse(
        status="Failed" if failed else "Success",
        compile_result=stage if compiled else None,
        run_result=None if compiled else stage,
    )


def _kind(extracted: ExtractedCode) -> ExtractedType:
    if extracted.code is None:
        return "empty"
    if extracted.chosen is None:
        return "heuristic"
    return "incomplete_fenced" if extracted.unclosed else "fenced"
