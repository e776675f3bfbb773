"""What the code judge's tests share."""

from __future__ import annotations

from typing import Any

from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.protocol import Case, CodeResult, Suite, SuiteKind


def fenced(code: str, language: str = "python") -> str:
    return f"Here you are:\n```{language}\n{code}\n```\nDone."


def judge_of(sandbox: Any, **settings: Any) -> CodeJudge:
    return CodeJudge(sandbox=sandbox, enable_global_rate_limit=False, **settings)


async def judged(sandbox: Any, code: str, tests: Any, language: str = "python", **settings: Any) -> CodeResult:
    async with judge_of(sandbox, **settings) as judge:
        return await judge.judge(fenced(code, language), tests)


def verdicts(result: CodeResult) -> list[str]:
    assert [case.index for case in result.cases] == list(range(len(result.cases)))
    return [case.verdict.value for case in result.cases]


def copies(count: int) -> Suite:
    """The program is to print the number that it reads."""
    return Suite(SuiteKind.STDIO, tuple(Case(stdin=f"{number}\n", expected=f"{number}") for number in range(count)))
