"""What a final reward is, whoever computes it. `final.load_reward` makes them by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from toolyard.errors import ConfigError, RewardError


class GroundTruthError(RewardError, ConfigError):
    """The task has no ground truth that the reward could use: the task's fault, and the same again next time."""


@dataclass(frozen=True, slots=True)
class FinalScore:
    """What a final reward said."""

    value: float
    """Finite."""
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What came with the score, in JSON's terms. `why`, where there is one, says in a line why it is not better."""


class FinalReward(ABC):
    """Scores whole responses, many at once. Whoever loaded it closes it, or uses it by `async with`."""

    name: str
    reads_the_task: ClassVar[bool] = False
    """Whether `data_source` and `extra_info` can make a difference."""

    @abstractmethod
    async def score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        *,
        deadline_seconds: float,
    ) -> FinalScore:
        """What `solution_str` is worth. The same for the same arguments, as far as that lies with us.

        Raises:
            RewardError: it could not be computed within `deadline_seconds` of its turn, or not at all; the message
                holds the traceback, if there is one. Time that the answer itself takes, within limits of the reward's
                own, does not count.
            GroundTruthError: the ground truth is missing or is not of the kind that this reward needs.
        """

    async def close(self) -> None:  # noqa: B027  (most rewards have nothing to give back)
        """Give back what scoring opened: a sandbox, processes. After the last `score`; closing twice is allowed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
