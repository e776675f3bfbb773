"""The final reward that runs the answer's program on the task's test cases, which are its ground truth."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from toolyard.errors import OURS, ConfigError, LimiterError, RewardError, ToolyardError
from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.protocol import Aggregation, CodeResult, CodeSettings
from toolyard.rewards.protocol import FinalReward, FinalScore, GroundTruthError, read_options

_WHY_CHARS = 300


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
            result = await self._judge.judge(
                solution_str, ground_truth, tenant=tenant, patience_seconds=deadline_seconds
            )
        except ToolyardError as error:
            message = f"reward {self.name!r}: {error}"
            if isinstance(error, ConfigError) and not isinstance(error, LimiterError):
                raise GroundTruthError(message) from error
            raise RewardError(message) from error
        if result.score is None:
            raise RewardError(f"reward {self.name!r}: {result.why}", whose=OURS)
        return FinalScore(result.score, _extras(result))

    async def close(self) -> None:
        await self._judge.close()


def _extras(result: CodeResult) -> dict[str, Any]:
    """Keep it small: it is stored with every trajectory, so no program output except in `why`."""
    extras: dict[str, Any] = {
        "passed": result.passed,
        "cases": len(result.cases),
        "verdicts": result.counts(),
        "blocks": result.extracted.blocks,
        "seconds": round(result.wall_seconds, 6),
    }
    if result.why:
        why = " ".join(result.why.split())
        extras["why"] = why if len(why) <= _WHY_CHARS else f"{why[:_WHY_CHARS]}…"
    return extras
