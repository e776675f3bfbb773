"""What a final reward is, whoever computes it. `final.load_reward` makes them by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ValidationError

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


# Options of a final reward, checked by the model that documents them.


T = TypeVar("T", bound=BaseModel)

_VALUE_CHARS = 80


def read_options(model: type[T], options: Mapping[str, Any], **fixed: Any) -> T:
    """The settings that `options` are; `fixed` ones are no options.

    Raises:
        ConfigError: an option is unknown or wrong; the message names it, and the known ones.
    """
    known = ", ".join(key for key in model.model_fields if key not in fixed)
    if taken := [key for key in options if key in fixed]:
        raise ConfigError(f"unknown option {taken[0]!r}; known: {known}")
    try:
        return model.model_validate({**options, **fixed})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            raise ConfigError(f"unknown option {where!r}; known: {known}") from None
        raise ConfigError(f"option {where!r}: {first['msg']}; given: {str(first['input'])[:_VALUE_CHARS]!r}") from None
