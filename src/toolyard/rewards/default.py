"""verl's `default_compute_score`: an answer scored by the reward that its data source needs.

    score = default_compute_score("openai/gsm8k", "… #### 18", "18")

verl (`reward.custom_reward_function`): `path=pkg://toolyard.rewards name=default_compute_score`, and settings as
`+reward_kwargs.rate_limit=64`. A rollout of ours: `--reward default`, or `toolyard.rewards:default_compute_score`. TRL:
see `rewards.trl`.

Names and aggregations are those of verl's own function: GSM8K is strict, contest problems count the first ten cases,
and without a service they are read and compared as by `prime_code`. What differs is that mathematics is 1 or 0
everywhere, also where verl gives -1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from toolyard.errors import ConfigError, RewardError
from toolyard.rewards import blocking
from toolyard.rewards.code.protocol import CodeSettings
from toolyard.rewards.data_sources import code_settings, name_of, registered, scorer_for
from toolyard.rewards.function import ARGUMENTS, read_returned
from toolyard.rewards.protocol import FinalReward
from toolyard.rewards.registry import load_reward

DEADLINE_SECONDS = 3600.0
"""Against hanging for ever, no more."""
_OPTIONS = {
    "code": frozenset(CodeSettings.model_fields) - {"aggregation"},
    "math": frozenset({"check_seconds", "children"}),  # its memory is not what verl calls memory_limit_mb
}
"""By the name of the reward, without what comes after a colon."""
_VERLS_OWN = frozenset({"reward_router_address", "reward_model_tokenizer"})
"""What verl hands to every reward function while a reward model is up."""


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | Sequence[str] | None = None,
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
    memory_limit_mb: int | None = None,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """What `solution_str` is worth, by the reward that `data_source` needs. Blocks; for any thread, and many at once.

    Args:
        data_source: One that is registered.
        solution_str: All that the model said.
        ground_truth: The answer; for code, the test cases.
        extra_info: For functions of yours.
        sandbox_fusion_url: URL of a service that runs code, or several. None or empty: the embedded sandbox.
        concurrent_semaphore: Held while an answer's code is judged. Executions are limited by `rate_limit`.
        memory_limit_mb: For code.
        deadline_seconds: After which there is no reward, once its turn has come.
        kwargs: Settings of `CodeSettings`, for code; `check_seconds` and `children` of `MathSettings`, for mathematics;
            arguments of functions of yours, for those that take them.

    Returns:
        A plain number, since verl wants the same keys of all answers in a batch. Where a function of yours returns a
        dict, that dict.

    Raises:
        RewardError: it could not be computed. There is no reward then, and never 0 for that.
        ConfigError: the data source, an option or the ground truth is not usable.
    """
    scorer = scorer_for(data_source)
    options = {
        "sandbox_fusion_url": sandbox_fusion_url,
        "concurrent_semaphore": concurrent_semaphore,
        "memory_limit_mb": memory_limit_mb,
    }
    options = {key: value for key, value in options.items() if value is not None} | kwargs
    _check_options(kwargs)
    task = (data_source, solution_str, ground_truth, dict(extra_info or {}))
    try:
        if not isinstance(scorer, str):
            return _call(scorer, task, options)
        kind = scorer.partition(":")[0]
        settings = {key: value for key, value in options.items() if key in _OPTIONS.get(kind, ())}
        if kind == "code":
            settings = code_settings(data_source, settings)
        with concurrent_semaphore if kind == "code" and concurrent_semaphore is not None else nullcontext():
            return blocking.run(_score(scorer, settings, task, deadline_seconds))
    except (RewardError, ConfigError):
        raise
    except Exception as error:
        raise RewardError(f"data source {data_source!r}: {type(error).__name__}: {error}") from error


async def _score(
    name: str, settings: Mapping[str, Any], task: tuple[str, str, Any, dict[str, Any]], deadline_seconds: float
) -> float:
    reward = await kept_reward(name, settings)
    return (await reward.score(*task, deadline_seconds=deadline_seconds)).value


async def kept_reward(name: str, settings: Mapping[str, Any]) -> FinalReward:
    """In work that `blocking.run` runs: the reward of that name with these settings, loaded once and kept open."""

    def load() -> FinalReward:
        reward = load_reward(name, settings)
        assert reward is not None
        return reward

    return await blocking.kept((name, repr(sorted(settings.items()))), load)


# Functions ------------------------------------------------------------------------------------------------------------


def _call(
    function: Callable[..., Any], task: tuple[str, str, Any, dict[str, Any]], options: Mapping[str, Any]
) -> float | dict[str, Any]:
    takes = _options_of(function)
    given = {key: value for key, value in options.items() if takes is None or key in takes}
    returned: Any = function(**dict(zip(ARGUMENTS, task, strict=True)), **given)
    if inspect.iscoroutine(returned):
        returned = blocking.run(returned)
    score, others = read_returned(returned, f"data source {task[0]!r}: {name_of(function)}")
    return {"score": score, **others} if isinstance(returned, Mapping) else score


def _check_options(given: Mapping[str, Any]) -> None:
    """A misspelt setting must not be silently without effect; one for other data sources than this must be."""
    known = _VERLS_OWN.union(*_OPTIONS.values())
    if given.keys() <= known:
        return
    for scorer in registered():
        takes = frozenset[str]() if isinstance(scorer, str) else _options_of(scorer)
        if takes is None:
            return
        known |= takes
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"option {unknown[0]!r}: no reward takes it; known are {', '.join(sorted(known))}")


def _options_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """Keyword arguments that it takes besides the task's. None: any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some builtins nobody knows it
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_name) - set(ARGUMENTS)
