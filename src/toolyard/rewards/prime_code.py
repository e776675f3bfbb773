"""verl's scorer for answers without a sandbox service (`prime_code`), by its names: an import line is all that changes.

    score, metadata = compute_score(completion, test_cases, continuous=True)
    results, metadata = apps_check_correctness({"inputs": […], "outputs": […]}, program, timeout=5)

verl runs answers in a fork of the trainer's own process. Here they run in the embedded sandbox, judged by `CodeJudge`.
Outputs are compared as verl does: white space around lines and empty lines do not count, and numbers may differ by
1e-5 of their size. Answers find the names of common modules (`Counter`, `sqrt`, `List`) without importing them.

Where the values differ from verl's is listed in docs/rewards.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolyard.errors import OURS, ConfigError, LimiterError, RewardError
from toolyard.rewards import blocking
from toolyard.rewards.code.cases import read_suite
from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.protocol import PRIME_CODE, CaseVerdict, CodeResult, CodeSettings, Suite, SuiteKind
from toolyard.rewards.protocol import GroundTruthError
from toolyard.rewards.sandbox_fusion.program import STAR_IMPORTS, program_in

__all__ = ["apps_check_correctness", "check_correctness", "compute_score"]

Result = bool | int
Metadata = dict[str, Any]

FAILED, NOT_COMPILED = -1, -2

_FIRST_N = 10
_TIMEOUT = 10
_DEPTH = 600_000
_NAMES = "; ".join(f"from {module} import *" for module in STAR_IMPORTS.split())
_MODULES = f"import {', '.join(module for module in STAR_IMPORTS.split() if module not in ('builtins', 'typing'))}"
_AROUND = f"{_NAMES}; {_MODULES}; sys.setrecursionlimit({_DEPTH})\n"
_BACKTICKS = re.compile(r"`+")


def compute_score(
    completion: str, test_cases: str | Mapping[str, Any], continuous: bool = False
) -> tuple[bool | float, list[Metadata]]:
    """Whether the Python program in `completion` passes all test cases; `continuous`: the share of the first ten.

    The program is the last block fenced as python, or else the first fenced one. Without any, all of `completion` is
    the program. Test cases have `inputs`, `outputs` and maybe `fn_name`, or any other form that `read_suite` reads.

    Raises:
        GroundTruthError: `test_cases` cannot be read.
        RewardError: our failure. There is no score then: 0 would blame the model for it.
    """
    program = program_in(completion)
    result = _judge(
        completion if program is None else program, test_cases, _TIMEOUT, "continuous" if continuous else "all"
    )
    assert result.score is not None
    told = [_told(result, index) for index in range(len(result.cases))][: _FIRST_N if continuous else None]
    if continuous:
        return result.score, told
    return result.score == 1.0, told


def apps_check_correctness(
    in_outs: str | Mapping[str, Any], generation: str, timeout: float = 10, debug: bool = True
) -> tuple[list[Result], list[Metadata]]:
    """What the program `generation` does on each case, until one is not right; and one dict that says why it is not.

    A result is True, False (a wrong answer), -1 (it crashed, ran out of `timeout` seconds or out of memory) or -2 (it
    does not compile; then it is the only one). `debug` has no effect: nothing is printed here.

    Raises:
        GroundTruthError, RewardError: as `compute_score`.
    """
    result = _judge(generation, in_outs, timeout, "all")
    results: list[Result] = []
    for case in result.cases:
        match case.verdict:
            case CaseVerdict.PASSED:
                results.append(True)
                continue
            case CaseVerdict.WRONG_ANSWER:
                results.append(False)
            case CaseVerdict.COMPILE_ERROR:
                results = [NOT_COMPILED]
            case _:
                results.append(FAILED)
        return results, [_told(result, case.index)]
    return results, [{}]


check_correctness = apps_check_correctness
"""verl's own name for it, in `prime_code.utils`."""


def _told(result: CodeResult, index: int) -> Metadata:
    case = result.cases[index]
    if case.verdict in (CaseVerdict.PASSED, CaseVerdict.NOT_RUN):
        return {}
    if case.verdict is CaseVerdict.WRONG_ANSWER:
        return {"error_message": "Wrong Answer", "error": case.why, "output": case.stdout or case.returned}
    return {"error": case.why, "traceback": case.stderr}


def _judge(program: str, tests: str | Mapping[str, Any], seconds: float, aggregation: str) -> CodeResult:
    try:
        suite = read_suite(tests)
        result = blocking.run(_judged(_answer(program, suite), suite, seconds, aggregation))
    except LimiterError as error:
        raise RewardError(str(error), whose=OURS) from error
    except ConfigError as error:
        raise GroundTruthError(f"test cases: {error}") from error
    if result.score is None:
        raise RewardError(result.why, whose=OURS)
    return result


async def _judged(answer: str, suite: Suite, seconds: float, aggregation: str) -> CodeResult:
    settings = CodeSettings.model_validate(
        {"aggregation": aggregation, "run_seconds": seconds, "comparison": PRIME_CODE, "first_n": _FIRST_N}
    )
    judge = await blocking.kept((CodeJudge, settings.model_dump_json()), lambda: CodeJudge(settings))
    return await judge.judge(answer, suite)


def _answer(program: str, suite: Suite) -> str:
    """The program as the one block of an answer, whatever fences are in it."""
    if suite.kind is SuiteKind.STDIO and "__future__" not in program:  # which has to come first
        program = _AROUND + program
    fence = "`" * max(3, 1 + max(map(len, _BACKTICKS.findall(program)), default=0))
    return f"{fence}python\n{program}\n{fence}"
