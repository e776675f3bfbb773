"""verl's `default_compute_score`: scores an answer with the reward for its data source.

    score = default_compute_score("openai/gsm8k", "… #### 18", "18")

verl (`reward.custom_reward_function`): `path=pkg://toolyard.rewards name=default_compute_score`, and settings as
`+reward_kwargs.rate_limit=64`. In a Toolyard rollout: `--reward default`, or `toolyard.rewards:default_compute_score`.
TRL: see `rewards.trl`.

Names and aggregations are those of verl's own function: GSM8K is strict, contest problems count the first ten cases,
and without a service they are parsed and compared as by `prime_code`. The difference: mathematics is always 1 or 0,
even where verl gives -1.
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
"""Only a safeguard against hanging forever."""
_OPTIONS = {
    "code": frozenset(CodeSettings.model_fields) - {"aggregation"},
    "math": frozenset({"check_seconds", "children"}),  # verl's memory_limit_mb does not mean its memory
}
"""By name of the reward, without the part after a colon."""
_VERLS_OWN = frozenset({"reward_router_address", "reward_model_tokenizer"})
"""Arguments that verl passes to every reward function while a reward model is running."""


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
    """Score `solution_str` with the reward for `data_source`. Blocks; may be called from many threads at once.

    Args:
        data_source: A registered data source.
        solution_str: Everything the model said.
        ground_truth: The answer; for code, the test cases.
        extra_info: For your own functions.
        sandbox_fusion_url: URL of a service that runs code, or several. None or empty: the embedded sandbox.
        concurrent_semaphore: Held while an answer's code is judged. Executions are limited by `rate_limit`.
        memory_limit_mb: For code.
        deadline_seconds: Time limit for the reward, not counting the wait for a slot.
        kwargs: Settings of `CodeSettings`, for code; `check_seconds` and `children` of `MathSettings`, for mathematics;
            arguments of your own functions, if they take them.

    Returns:
        A plain number, since verl needs the same keys for all answers in a batch. If your own function returns a dict,
        that dict.

    Raises:
        RewardError: it could not be computed. Then there is no reward, rather than 0.
        ConfigError: the data source, an option or the ground truth is invalid.
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
    """In work run by `blocking.run`: return the reward with that name and settings, loaded once and kept open."""

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
    """Reject misspelled settings, but ignore settings for other data sources."""
    known = _VERLS_OWN.union(*_OPTIONS.values())
    if given.keys() <= known:
        return
    for scorer in registered():
        takes = frozenset[str]() if isinstance(scorer, str) else _options_of(scorer)
        if takes is None:
            return
        known |= takes
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(known))}")


def _options_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the keyword arguments it takes besides the task's. None: any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_name) - set(ARGUMENTS)
