"""Convert what the sandbox reports to results of test cases. Pure, apart from the time that comparing takes."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from typing import Any

from toolyard.errors import ConfigError, SandboxError
from toolyard.rewards.code import harness as code_harness
from toolyard.rewards.code.comparison import difference
from toolyard.rewards.code.harness import Harness, HarnessReport
from toolyard.rewards.code.protocol import CaseResult, CaseVerdict, Comparison, Suite
from toolyard.rewards.code.values import value_difference
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program, StageResult, Verdict
from toolyard.sandbox.remote.http import failure

_KEPT_CHARS = 64 * 1024
"""Maximum characters each of stdout and stderr in a result: a batch has many thousands of results."""
_KEPT_VALUE_CHARS = 4096
_WHY_CHARS = 400
_FLOOD = MIB
"""Bytes. From here on, a SandboxFusion service may have truncated output, or killed the program, without saying so."""
_PIPE = 64 * 1024
"""Bytes kept by a service that does not read while the program writes: SandboxFusion cuts outputs of 300 KB."""
_LAST_CHARACTER = 4
"""Maximum bytes of a character that was cut in half."""
_TRACEBACK = "Traceback (most recent call last):"
_NOT_COMPILED = ("SyntaxError", "IndentationError", "TabError", "RecursionError")
_PLACE = re.compile(r'^  File ".*", line \d+$', re.MULTILINE)
_WITHOUT_PLACE = ("cannot contain null bytes", "during compilation", "encoding problem: ")
_OUT_OF_MEMORY = {
    "cpp": "std::bad_alloc",
    "java": "java.lang.OutOfMemoryError",
    "nodejs": "JavaScript heap out of memory",
    "rust": "memory allocation of ",
    "go": "runtime: out of memory",
}
"""What a program of that language prints when it is denied memory, rather than killed."""


@dataclass(frozen=True, slots=True)
class JudgePlan:
    """How one answer is run against one suite."""

    suite: Suite
    program: Program
    """Without stdin."""
    limits: Limits
    comparison: Comparison
    harness: Harness | None
    """None: the program reads stdin and writes stdout itself."""
    chosen_by_answer: bool
    """Whether the answer, not the task, chose the language."""

    @property
    def longest_case(self) -> float:
        """Seconds that one case may take without waiting. A checker may run twice."""
        runs = 1 if self.suite.checker is None else 3
        return self.limits.compile_seconds + runs * self.limits.run_seconds

    def stdin(self, index: int) -> str:
        case = self.suite.cases[index]
        return case.stdin if self.harness is None else self.harness.stdin(case, index)


def read_execution(plan: JudgePlan, index: int, execution: Execution, tries: int) -> CaseResult:
    """Return the result of a case that ran. With a checker, which runs later, PASSED means that it ran normally.

    Raises:
        ConfigError: the suite's own code failed.
        SandboxError: the program did not start, which is safe to retry; or the service truncated a right output.
    """
    if execution.run is None:
        return _uncompiled(plan, index, execution, tries)
    stdout, report = execution.run.stdout_bytes, None
    if plan.harness is not None:
        report = plan.harness.read(stdout, plan.suite.cases[index].expected)
        stdout = report.printed
        if report.word == code_harness.TASK_FAILED:
            raise ConfigError(f"case {index}: the suite's own code failed before the answer ran: {report.value}")
        if report.word is None:
            why = last_line(execution.stderr) or _ending(execution.run)
            raise SandboxError(f"the harness did not start ({execution.verdict.value}): {why}")
    text = stdout.decode("utf-8", "backslashreplace")
    if execution.verdict is not Verdict.OK:
        verdict, why = _failure(plan, execution)
    elif report is not None:
        verdict, why = _by_report(plan, index, report, execution)
    elif plan.suite.checker is not None:
        verdict, why = CaseVerdict.PASSED, ""
    else:
        verdict, why = _by_output(plan, index, text, execution)
    returned = _returned(report) if report is not None and report.word == code_harness.RETURNED else None
    return case_result(index, verdict, execution.run, why, text, returned, tries)


def case_result(
    index: int, verdict: CaseVerdict, stage: StageResult, why: str, stdout: str, returned: Any = None, tries: int = 1
) -> CaseResult:
    return CaseResult(
        index, verdict, cut(stdout), cut(stage.stderr), stage.exit_code, stage.wall_seconds, stage.cpu_seconds,
        stage.max_memory_bytes, one_line(why), returned, tries,
    )  # fmt: skip


def _uncompiled(plan: JudgePlan, index: int, execution: Execution, tries: int) -> CaseResult:
    stage = execution.compile
    if stage is None:
        raise SandboxError("the sandbox reports neither a run nor a compilation")
    if stage.verdict is Verdict.TIMED_OUT:
        why = f"the compiler was stopped after {plan.limits.compile_seconds:g} s"
    elif stage.verdict in (Verdict.OK, Verdict.FAILED):
        output = stage.stderr or stage.stdout
        errors = (line for line in output.splitlines() if "error" in line.lower())
        why = next(errors, "") or last_line(output) or "the compiler refused it"
    else:
        why = f"the compiler ended with {stage.verdict.value}"
    return case_result(index, CaseVerdict.COMPILE_ERROR, stage, why, stage.stdout, tries=tries)


def _failure(plan: JudgePlan, execution: Execution) -> tuple[CaseVerdict, str]:
    limits, stage = plan.limits, execution.run
    assert stage is not None
    match execution.verdict:
        case Verdict.TIMED_OUT:
            return CaseVerdict.TIME_LIMIT, f"stopped after {limits.run_seconds:g} s"
        case Verdict.CPU_EXCEEDED:
            return CaseVerdict.TIME_LIMIT, "stopped at its limit of processor time"
        case Verdict.MEMORY_EXCEEDED:
            return CaseVerdict.MEMORY_LIMIT, f"used more than {limits.memory_bytes // MIB} MiB"
        case Verdict.OUTPUT_EXCEEDED:
            return CaseVerdict.RUNTIME_ERROR, f"wrote more than {limits.flood_bytes} bytes"
        case Verdict.DISK_EXCEEDED:
            return CaseVerdict.RUNTIME_ERROR, f"wrote more than {limits.disk_bytes} bytes of files"
        case _:
            pass
    stderr = stage.stderr
    last = last_line(stderr)
    language = plan.program.language
    if language == "python":
        if last.partition(":")[0].endswith("MemoryError"):
            return CaseVerdict.MEMORY_LIMIT, last
        if was_not_compiled(stderr):
            return CaseVerdict.COMPILE_ERROR, last
    if language in _OUT_OF_MEMORY and _OUT_OF_MEMORY[language] in stderr:
        return CaseVerdict.MEMORY_LIMIT, last
    if _is_foreign(execution) and stage.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        # Only the service kills a program there. It reports timeouts, so what remains is memory, or a flood.
        written = max(len(stage.stdout_bytes), len(stage.stderr_bytes))
        if written >= _FLOOD:
            return CaseVerdict.RUNTIME_ERROR, f"killed by the service after {written} bytes of output"
        return CaseVerdict.MEMORY_LIMIT, "killed by the service, which does not say why"
    return CaseVerdict.RUNTIME_ERROR, last or _ending(stage)


def was_not_compiled(stderr: str) -> bool:
    """Whether this is how Python rejects a program's text: a location in it, and no line that ran.

    A program may also print the word `SyntaxError`, about its input.
    """
    last = last_line(stderr)
    if last.partition(":")[0] not in _NOT_COMPILED or _TRACEBACK in stderr:
        return False
    return any(words in last for words in _WITHOUT_PLACE) or _PLACE.search(stderr) is not None


def raised(stderr: str) -> bool:
    """Whether a Python program ended with an exception."""
    return _TRACEBACK in stderr or was_not_compiled(stderr)


def _by_report(plan: JudgePlan, index: int, report: HarnessReport, execution: Execution) -> tuple[CaseVerdict, str]:
    assert execution.run is not None
    match report.word:
        case code_harness.RETURNED:
            why = value_difference(report.value, plan.suite.cases[index].expected, plan.comparison)
            return (CaseVerdict.PASSED, "") if why is None else (CaseVerdict.WRONG_ANSWER, why)
        case code_harness.ODD:
            return CaseVerdict.WRONG_ANSWER, f"returned {report.value}"
        case code_harness.PASSED:
            return CaseVerdict.PASSED, ""
        case code_harness.FAILED:
            return CaseVerdict.WRONG_ANSWER, _failed_test(report.value)
        case _ if execution.run.stdout_truncated:
            return CaseVerdict.WRONG_ANSWER, _too_long(plan)
        case _ if _is_foreign(execution) and len(execution.run.stdout_bytes) >= _FLOOD:
            return CaseVerdict.WRONG_ANSWER, "printed more than the service keeps"
        case _:
            done = "returned" if plan.suite.function else "was tested"
            return CaseVerdict.RUNTIME_ERROR, f"ended with exit code 0 before it {done}"


def _by_output(plan: JudgePlan, index: int, text: str, execution: Execution) -> tuple[CaseVerdict, str]:
    assert execution.run is not None
    expected = plan.suite.cases[index].expected
    why = difference(text, expected, plan.comparison)
    if why is None and execution.run.stdout_truncated:
        why = _too_long(plan)
    if why is not None and _is_foreign(execution) and may_be_truncated(text, expected):
        raise failure(f"the service kept only {len(text)} bytes of the output, which is right so far", retryable=False)
    return (CaseVerdict.PASSED, "") if why is None else (CaseVerdict.WRONG_ANSWER, why)


def may_be_truncated(stdout: str, expected: str) -> bool:
    """Whether it could be the start of a right output that a service truncated.

    Below a megabyte only if it ends within a line: a program that stops too early usually completes its last line.
    """
    most = len(expected)
    long = _FLOOD <= len(stdout) < most or (_PIPE <= len(stdout) < most and not stdout.endswith("\n"))
    return long and expected.startswith(stdout[:-_LAST_CHARACTER])


def _is_foreign(execution: Execution) -> bool:
    return execution.isolation == "unknown"


def _failed_test(value: Any) -> str:
    """Describe a failed test as the harness reported it; a forged report may contain anything."""
    match value:
        case [int(line), str(source), str(message)]:
            return f"test line {line}: {source}" + (f": {message}" if message else "")
        case _:
            return "a test failed"


def _too_long(plan: JudgePlan) -> str:
    return f"printed more than {plan.limits.output_bytes} bytes"


def _returned(report: HarnessReport) -> Any:
    if report.size <= _KEPT_VALUE_CHARS:
        return report.value
    return json.dumps(report.value)[:_KEPT_VALUE_CHARS] + "…"


def _ending(stage: StageResult) -> str:
    code = stage.exit_code
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2].strip()


def one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WHY_CHARS else f"{text[:_WHY_CHARS]}…"


def cut(text: str) -> str:
    """Keep the start and the end, which has the exception."""
    if len(text) <= _KEPT_CHARS:
        return text
    half = _KEPT_CHARS // 2
    return f"{text[:half]}\n… ({len(text) - 2 * half} characters omitted) …\n{text[-half:]}"
