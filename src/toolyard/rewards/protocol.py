"""The interface of final rewards. `registry.load_reward` creates them by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ValidationError

from toolyard.errors import ConfigError, RewardError
from toolyard.messages import Message
from toolyard.rewards.explanation import Explanation


class GroundTruthError(RewardError, ConfigError):
    """The task's ground truth is missing or unusable for the reward: the task's fault, so a retry does not help."""


PROMPT = "prompt"
"""In `extra_info`, for rewards that read the prompt: what the model was asked, as text."""


@dataclass(frozen=True, slots=True)
class FinalScore:
    """The result of a final reward."""

    value: float
    """Finite."""
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What came with the score, as JSON."""
    explanation: Explanation | None = None
    """Why it is this value; None if the reward does not say."""


class FinalReward(ABC):
    """Scores whole responses, many concurrently. Close it after loading it, or use it with `async with`."""

    name: str
    reads_the_task: ClassVar[bool] = False
    """Whether `data_source` and `extra_info` can affect the score."""
    reads_the_prompt: ClassVar[bool] = False
    """Whether it needs `extra_info[PROMPT]`."""

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
        """Score `solution_str`. Deterministic as far as we control it.

        Raises:
            RewardError: it could not be computed within `deadline_seconds`, not counting the wait for a slot, or not at
                all; the message has the traceback, if any. Time that the answer itself takes, within the reward's own
                limits, does not count.
            GroundTruthError: the ground truth is missing or has the wrong form for this reward.
        """

    async def close(self) -> None:  # noqa: B027  (most rewards have nothing to release)
        """Release what scoring opened: a sandbox, processes. Call it after the last `score`; calling it twice is ok."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def with_prompt(reward: FinalReward, extra_info: Mapping[str, Any], prompt: Sequence[Message] | str) -> dict[str, Any]:
    """Return `extra_info` as the reward needs it. `prompt`: everything before the answer."""
    if not reward.reads_the_prompt:
        return dict(extra_info)
    if not isinstance(prompt, str):
        alone = len(prompt) == 1
        prompt = "\n\n".join(one.content if alone else f"[{one.role}]\n{one.content}" for one in prompt)
    return {**extra_info, PROMPT: prompt}


# Options of a final reward, validated by the model that documents them.


T = TypeVar("T", bound=BaseModel)

_VALUE_CHARS = 80


def read_options(model: type[T], options: Mapping[str, Any], **fixed: Any) -> T:
    """Build the settings from `options`; `fixed` ones cannot be set as options.

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
