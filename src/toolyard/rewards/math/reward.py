"""The final reward that compares mathematical expressions."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from toolyard.errors import MissingDependencyError, RewardError
from toolyard.rewards.explanation import explain
from toolyard.rewards.math.scorer import DEADLINE_SECONDS, MathChecker, MathScore
from toolyard.rewards.protocol import FinalReward, FinalScore, GroundTruthError, read_options


class MathSettings(BaseModel):
    """Options of `math`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    check_seconds: PositiveFloat = DEADLINE_SECONDS
    """Time limit for one answer, unless its deadline is shorter. An answer that takes longer to check is wrong."""
    children: PositiveInt = 2
    """Maximum number of concurrent processes."""
    memory_limit_mb: int = Field(default=1024, ge=256)
    """Memory limit of each process. An answer that needs more is wrong."""


class MathReward(FinalReward):
    """Has its own processes, started by the first answers."""

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Check the options.

        Raises:
            ConfigError: an option is unknown or wrong.
            MissingDependencyError: math-verify is not installed.
        """
        self.name = name
        self.settings = read_options(MathSettings, options or {})
        if importlib.util.find_spec("math_verify") is None:
            raise MissingDependencyError("math-verify", "math", f"the reward {name!r}")
        self._checker = MathChecker(children=self.settings.children, memory_limit_mb=self.settings.memory_limit_mb)

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
            raise GroundTruthError(f"reward {self.name!r}: the task has no ground truth, which this reward needs")
        seconds = min(deadline_seconds, self.settings.check_seconds)
        try:
            found = await self._checker.score(solution_str, ground_truth, deadline_seconds=seconds)
        except GroundTruthError as error:
            raise GroundTruthError(f"reward {self.name!r}: {error}") from None
        except RewardError as error:
            raise RewardError(f"reward {self.name!r}: {error}") from error
        why = explain(_why(found, seconds), extracted=found.extracted, expected=found.expected)
        return FinalScore(found.value, {"timed_out": found.timed_out}, why)

    async def close(self) -> None:
        self._checker.close()  # not in a thread: none can be started at interpreter exit


def _why(found: MathScore, seconds: float) -> str:
    if found.timed_out:
        return f"the answer could not be checked within {seconds:g} s"
    if found.extracted is None:
        return "no expression in the answer"
    return f"the answer {found.extracted} {'equals' if found.value == 1.0 else 'is not'} {found.expected}"
