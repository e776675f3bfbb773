"""The final reward that each task's data source needs, by the table of `rewards.data_sources`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from toolyard.errors import ConfigError, RewardError

from .code_protocol import Aggregation, CodeSettings
from .data_sources import Scorer, code_settings, scorer_for
from .final import load_reward
from .final_function import FunctionReward
from .final_options import read_options
from .final_protocol import FinalReward, FinalScore


class DefaultReward(FinalReward):
    """Others behind one name, each loaded when the first task needs it. Its options are those of `code`."""

    reads_the_task: ClassVar[bool] = True

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """
        Raises:
            ConfigError: an option is unknown or wrong.
        """
        self.name = name
        self._options = dict(options or {})
        read_options(CodeSettings, self._options, aggregation=Aggregation.ALL)
        self._loaded: dict[tuple[str | int, bool], FinalReward] = {}

    async def score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        *,
        deadline_seconds: float,
    ) -> FinalScore:
        try:
            reward = self._for(data_source)
        except ConfigError as error:
            raise RewardError(f"reward {self.name!r}: {error}") from error
        return await reward.score(
            data_source, solution_str, ground_truth, extra_info, deadline_seconds=deadline_seconds
        )

    async def close(self) -> None:
        async with AsyncExitStack() as stack:  # all of them, also if one cannot be closed
            while self._loaded:
                stack.push_async_callback(self._loaded.popitem()[1].close)

    def _for(self, data_source: str) -> FinalReward:
        scorer = scorer_for(data_source)
        options = code_settings(data_source, self._options)
        # A function's id stays its own: the reward holds it.
        key = scorer if isinstance(scorer, str) else id(scorer), options != self._options
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = self._load(scorer, options)
        return found

    def _load(self, scorer: Scorer, options: Mapping[str, Any]) -> FinalReward:
        if not isinstance(scorer, str):
            return FunctionReward(getattr(scorer, "__qualname__", str(scorer)), scorer)
        loaded = load_reward(scorer, options if scorer.partition(":")[0] == "code" else None)
        assert loaded is not None  # the table does not take `none`
        return loaded
