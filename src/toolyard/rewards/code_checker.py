"""A task's own checker: a Python program that reads `input`, `output` and `expected`, and decides by its exit code."""

from __future__ import annotations

from dataclasses import replace

from toolyard.errors import ConfigError
from toolyard.sandbox.protocol import Execution, Program, Sandbox, Verdict

from .code_protocol import CaseResult, CaseVerdict
from .code_verdicts import Plan, last_line, one_line, raised


async def check(sandbox: Sandbox, plan: Plan, result: CaseResult, execution: Execution) -> CaseResult:
    """The result of a case whose program ran well, as the checker sees it.

    One that breaks (it raises, hangs, crashes, ends with another exit code than 0 and 1) is asked once more, about the
    expected output. If it accepts that, it was the program's output that it could not make sense of.

    Raises:
        ConfigError: the checker failed.
    """
    assert execution.run is not None
    said = await _ask(sandbox, plan, result.index, execution.run.stdout_bytes)
    if said.verdict is Verdict.OK:
        return result
    why = last_line(said.stderr) or last_line(said.stdout)
    if said.exit_code != 1 or raised(said.stderr):
        ending = said.verdict.value if said.exit_code is None else f"exit code {said.exit_code}"
        once_more = await _ask(sandbox, plan, result.index, _text(plan.suite.cases[result.index].expected))
        if once_more.verdict is not Verdict.OK:
            why = one_line(why) or "it says nothing"
            raise ConfigError(f"case {result.index}: the checker failed ({ending}): {why}")
        why = f"it cannot make sense of the output: {why or ending}"
    return replace(
        result, verdict=CaseVerdict.WRONG_ANSWER, why=one_line(f"the checker refuses it: {why}".rstrip(": "))
    )


async def _ask(sandbox: Sandbox, plan: Plan, index: int, output: bytes) -> Execution:
    case = plan.suite.cases[index]
    files = {"input": _text(case.stdin), "output": output, "expected": _text(case.expected)}
    assert plan.suite.checker is not None
    return await sandbox.run(Program(plan.suite.checker, "python", files=files), plan.limits)


def _text(value: object) -> bytes:
    return ("" if value is None else str(value)).encode("utf-8", "surrogatepass")
