"""verl's scorer for answers without a sandbox service (`prime_code`), with its names: only the import line changes.

    score, metadata = compute_score(completion, test_cases, continuous=True)
    results, metadata = apps_check_correctness({"inputs": […], "outputs": […]}, program, timeout=5)

verl runs answers in a fork of the trainer's own process. Here they run in the embedded sandbox, judged by `CodeJudge`.
Outputs are compared as in verl: white space around lines and empty lines are ignored, and numbers may differ by a
relative 1e-5. Answers can use names of common modules (`Counter`, `sqrt`, `List`) without importing them.

docs/guides/verl-rewards.md lists where the values differ from verl's.
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
    """Return whether the Python program in `completion` passes all test cases; `continuous`: the share of the first 10.

    The program is the last block fenced as python, or else the first fenced block. Without any, all of `completion` is
    the program. Test cases have `inputs`, `outputs` and optionally `fn_name`, or any other form `read_suite` reads.

    Raises:
        GroundTruthError: `test_cases` cannot be read.
        RewardError: our failure. Then there is no score: 0 would blame the model for it.
    """
    program = program_in(completion)
    result = _judge(
        completion if program is None else program, test_cases, _TIMEOUT, "continuous" if continuous else "all"
    )
    assert result.score is not None
    details = [_case_metadata(result, index) for index in range(len(result.cases))][: _FIRST_N if continuous else None]
    if continuous:
        return result.score, details
    return result.score == 1.0, details


def apps_check_correctness(
    in_outs: str | Mapping[str, Any], generation: str, timeout: float = 10, debug: bool = True
) -> tuple[list[Result], list[Metadata]]:
    """Return the results of the program `generation` until a case fails, and one dict that explains the failure.

    A result is True, False (a wrong answer), -1 (it crashed, or exceeded `timeout` seconds or its memory) or -2 (it
    does not compile; then it is the only result). `debug` has no effect: nothing is printed.

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
        return results, [_case_metadata(result, case.index)]
    return results, [{}]


check_correctness = apps_check_correctness
"""verl's name for it in `prime_code.utils`."""


def _case_metadata(result: CodeResult, index: int) -> Metadata:
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
    """Wrap the program as the only block of an answer, whatever fences it contains."""
    if suite.kind is SuiteKind.STDIO and "__future__" not in program:  # such imports must come first
        program = _AROUND + program
    fence = "`" * max(3, 1 + max(map(len, _BACKTICKS.findall(program)), default=0))
    return f"{fence}python\n{program}\n{fence}"
