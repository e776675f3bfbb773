"""The final reward that runs the answer's program on the task's test cases, which are its ground truth."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from toolyard.errors import OURS, ConfigError, LimiterError, RewardError, ToolyardError
from toolyard.rewards.code.cases import read_suite
from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.ledger import FAILED
from toolyard.rewards.code.protocol import Aggregation, CaseVerdict, CodeResult, CodeSettings, Suite, SuiteKind
from toolyard.rewards.explanation import Explanation, explain
from toolyard.rewards.protocol import FinalReward, FinalScore, GroundTruthError, read_options


class CodeReward(FinalReward):
    """One judge for all answers. The first answer opens its sandbox.

    The deadline limits what is not the program's fault. Neither the wait for a slot, while others are judged, counts
    toward it, nor the time the program takes within its own limits, and it restarts with every case that ends.
    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Check the options.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        self.name = name
        how = name.partition(":")[2]
        aggregation = Aggregation(how) if how else Aggregation.ALL
        self._judge = CodeJudge(read_options(CodeSettings, options or {}, aggregation=aggregation))
        self._numbers = itertools.count(1)

    async def score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        *,
        deadline_seconds: float,
    ) -> FinalScore:
        if ground_truth is None:
            raise GroundTruthError(f"reward {self.name!r}: the task has no ground truth, which must be the test cases")
        # Its own tenant: at the limiter, each answer waits like a trajectory's tool call, not behind all answers.
        tenant = f"reward-{next(self._numbers)}"
        try:
            suite = read_suite(ground_truth)
            result = await self._judge.judge(solution_str, suite, tenant=tenant, patience_seconds=deadline_seconds)
        except ToolyardError as error:
            message = f"reward {self.name!r}: {error}"
            if isinstance(error, ConfigError) and not isinstance(error, LimiterError):
                raise GroundTruthError(message) from error
            raise RewardError(message) from error
        if result.score is None:
            raise RewardError(f"reward {self.name!r}: {result.why}", whose=OURS)
        return FinalScore(result.score, _extras(result), _explanation(result, suite))

    async def close(self) -> None:
        await self._judge.close()


def _extras(result: CodeResult) -> dict[str, Any]:
    """Keep it small: it is stored with every trajectory, so no program output."""
    return {
        "passed": result.passed,
        "cases": len(result.cases),
        "verdicts": result.counts(),
        "blocks": result.extracted.blocks,
        "seconds": round(result.wall_seconds, 6),
    }


def _explanation(result: CodeResult, suite: Suite) -> Explanation:
    """Explain by the first failed case. Cases are counted from 1."""
    code = result.extracted.code
    failed = next((case for case in result.cases if case.verdict in FAILED), None)
    if failed is None:
        left = len(result.cases) - result.passed
        passed = "the case passed" if result.passed == 1 else f"all {result.passed} cases passed"
        passed += f", {left} not run" if left else ""
        return explain(passed if code is not None else result.why, extracted=code)
    what = failed.verdict.value.replace("_", " ") + (f": {failed.why}" if failed.why else "")
    if failed.verdict is CaseVerdict.COMPILE_ERROR:
        return explain(what, extracted=code)
    case = suite.cases[failed.index]
    expected = case.test if suite.kind is SuiteKind.ASSERTS else case.expected
    return explain(f"case {failed.index + 1} of {len(result.cases)}: {what}", extracted=code, expected=expected)
