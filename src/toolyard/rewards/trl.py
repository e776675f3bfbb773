"""Our rewards as TRL's `reward_funcs`. TRL itself is not required.

    GRPOTrainer(reward_funcs=[trl_reward()], …)                    # by the dataset's column `data_source`
    GRPOTrainer(reward_funcs=[trl_reward("gsm8k"), my_own], …)     # a built-in reward, for any data source
    GRPOTrainer(reward_funcs=[trl_reward("code:fraction", rate_limit=64)], …)

Dataset columns: `ground_truth`, or verl's `reward_model` with a `ground_truth` in it; `data_source`, if the reward
depends on it; `extra_info`, if there is one. All answers of a batch are scored concurrently. If a reward could not be
computed it is None, which TRL (1.16) leaves out of its group's mean and does not train on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from toolyard.errors import ConfigError, RewardError
from toolyard.messages import Message
from toolyard.rewards import blocking
from toolyard.rewards.data_sources import scorer_for
from toolyard.rewards.default import DEADLINE_SECONDS, kept_reward
from toolyard.rewards.function import check_call
from toolyard.rewards.protocol import with_prompt
from toolyard.rewards.registry import FinalReward, FunctionReward, load_reward

_log = logging.getLogger(__name__)

_REASONS_SHOWN = 3


def trl_reward(
    reward: str | Callable[..., Any] = "default",
    *,
    name: str | None = None,
    data_source: str | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    **options: Any,
) -> TrlReward:
    """Create a function for `reward_funcs`.

    Args:
        reward: A name that `load_reward` accepts, or a function with verl's arguments, which may be async.
        name: The name TRL reports (`rewards/<name>/mean`). None: the reward's own name.
        data_source: For all rows, if the dataset has no such column.
        deadline_seconds: Time limit per answer, not counting the wait for a slot.
        options: The reward's own settings, as for `load_reward`.

    Raises:
        ConfigError: there is no such reward, or it does not take those options.
        MissingDependencyError: it needs a package that is not installed.
    """
    if not isinstance(reward, str):
        check_call(reward, options)
    elif load_reward(reward, options) is None:
        raise ConfigError(f"reward {reward!r}: it gives no score to train on")
    return TrlReward(reward, name, data_source, deadline_seconds, options)


class TrlReward:
    """Created by `trl_reward`. It can be pickled if the function can: what it opens stays in the process."""

    def __init__(
        self,
        reward: str | Callable[..., Any],
        name: str | None,
        data_source: str | None,
        deadline_seconds: float,
        options: Mapping[str, Any],
    ) -> None:
        called = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
        self.__name__ = name or called.replace(":", "_").replace("/", "_")
        self._reward = reward
        self._data_source = data_source
        self._deadline_seconds = deadline_seconds
        self._options = dict(options)

    def __call__(
        self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """Score a batch.

        Args:
            prompts: Texts or lists of messages. Only rewards that read the prompt use them.
            completions: Texts, or lists of messages, of which the assistant's are scored.
            columns: Dataset columns, with one value per completion.

        Raises:
            ConfigError: no column has the ground truth, or a data source has no reward.
        """
        sources = columns.get("data_source") or [self._data_source or ""] * len(completions)
        if self._reward == "default":
            for source in set(sources):
                scorer_for(source)  # a configuration error, not an answer's
        extras = columns.get("extra_info") or [None] * len(completions)
        asked = ["" if prompt is None else prompt for prompt in prompts or [None] * len(completions)]
        rows = zip(sources, map(_text, completions), extras, asked, strict=True)
        return blocking.run(self._score_all(list(rows), columns))

    async def _score_all(
        self, rows: list[tuple[str, str, Mapping[str, Any] | None, Any]], columns: Mapping[str, Any]
    ) -> list[float | None]:
        reward = await self._loaded()
        truths = _ground_truths(columns, len(rows), required=not reward.reads_the_prompt)
        why: list[str] = []
        mistakes: list[ConfigError] = []

        async def score(
            source: str, text: str, truth: Any, extra: Mapping[str, Any] | None, asked: Any
        ) -> float | None:
            try:
                given = with_prompt(reward, extra or {}, _prompt(asked)) if reward.reads_the_prompt else extra or {}
                found = await reward.score(source, text, truth, given, deadline_seconds=self._deadline_seconds)
            except RewardError as error:
                why.append(str(error))
                return None
            except ConfigError as error:
                mistakes.append(error)
                return None
            return found.value

        async with asyncio.TaskGroup() as group:
            scores = [
                group.create_task(score(source, text, truth, extra, asked))
                for (source, text, extra, asked), truth in zip(rows, truths, strict=True)
            ]
        if mistakes:
            raise mistakes[0]
        if why:
            shown = "\n".join(sorted(set(why))[:_REASONS_SHOWN])
            _log.warning("%s: %d of %d answers have no reward:\n%s", self.__name__, len(why), len(rows), shown)
        return [score.result() for score in scores]

    async def _loaded(self) -> FinalReward:
        named = self._reward
        if isinstance(named, str):
            return await kept_reward(named, self._options)
        key = (TrlReward, named, repr(sorted(self._options.items())))
        return await blocking.kept(key, lambda: FunctionReward(self.__name__, named, self._options))


def _ground_truths(columns: Mapping[str, Any], rows: int, *, required: bool) -> Sequence[Any]:
    if "ground_truth" in columns:
        return columns["ground_truth"]
    if "reward_model" in columns:
        return [model.get("ground_truth") for model in columns["reward_model"]]
    if not required:  # such as a judge
        return [None] * rows
    raise ConfigError(
        "the dataset has neither a column 'ground_truth' nor verl's 'reward_model'; it has "
        f"{', '.join(columns) or 'no others than prompts'}"
    )


def _prompt(asked: Any) -> str | list[Message]:
    if isinstance(asked, str):
        return asked
    messages = cast("Sequence[Mapping[str, Any]]", asked)
    return [Message(str(message.get("role")), _content(message.get("content"))) for message in messages]


def _text(completion: Any) -> str:
    """Return the model's text: the assistant's messages, and of their parts those that are text."""
    if isinstance(completion, str):
        return completion
    messages = cast("Sequence[Mapping[str, Any]]", completion)
    return "\n".join(_content(message.get("content")) for message in messages if message.get("role") == "assistant")


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast("Sequence[Mapping[str, Any]]", content)
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")
