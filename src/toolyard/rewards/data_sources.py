"""Which reward a data source needs: a table that anybody may add to, and verl's `default_compute_score` on top of it.

    score = default_compute_score("openai/gsm8k", "… #### 18", "18")

    register("my/geometry", "math")                          # one of ours, by its name: see `rewards.final`
    register("my/puzzles*", puzzle_score)                    # all that begin so, by a function with verl's arguments

verl (`reward.custom_reward_function`): `path=pkg://toolyard.rewards name=default_compute_score`, and settings as
`+reward_kwargs.rate_limit=64`. A rollout of ours: `--reward default`, or `toolyard.rewards:default_compute_score`. TRL:
see `rewards.trl`.

Names and aggregations are those of verl's own function: GSM8K is strict, contest problems count the first ten cases,
and without a service they are read and compared as by `prime_code`. What differs is that mathematics is 1 or 0
everywhere, also where verl gives -1.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from toolyard.errors import ConfigError, RewardError

from . import blocking
from .code_protocol import PRIME_CODE, CodeSettings
from .final import FinalReward, load_reward
from .final_function import ARGUMENTS, read_returned

Scorer = str | Callable[..., Any]
"""A name that `load_reward` knows, or a function `(data_source, solution_str, ground_truth, extra_info)` that returns a
number or `{"score": number, …}`, and may be async."""

DEADLINE_SECONDS = 3600.0
"""Against hanging for ever, no more."""

_TABLE: dict[str, Scorer] = {
    "openai/gsm8k": "gsm8k:strict",
    "toolyard/word-problems": "gsm8k",
    "toolyard/made-problems": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
    "math_dapo": "math",
    "math_dapo_reasoning": "math",
    "aime*": "math",
    "numina_*": "math",
    "codecontests": "code:continuous",
    "apps": "code:continuous",
    "codeforces": "code:continuous",
    "taco": "code:continuous",
    "livecodebench*": "code",
    "openai_humaneval": "code",
    "mbpp": "code",
}
_OPTIONS = {
    "code": frozenset(CodeSettings.model_fields) - {"aggregation"},
    "math": frozenset({"check_seconds", "children"}),  # its memory is not what verl calls memory_limit_mb
}
"""By the name of the reward, without what comes after a colon."""
_CONTESTS = frozenset({"codecontests", "apps", "codeforces", "taco"})
"""What verl scores by `prime_code` where there is no service."""
_VERLS_OWN = frozenset({"reward_router_address", "reward_model_tokenizer"})
"""What verl hands to every reward function while a reward model is up."""
_NOT_HERE = ("default", "none")

_lock = threading.Lock()


def register(data_source: str, scorer: Scorer, *, replace: bool = False) -> None:
    """Score answers to tasks of `data_source` by `scorer`, in this process and its later forks.

    A `data_source` that ends in `*` stands for all that begin so. A name in full goes before them, and a longer
    beginning before a shorter one. Which processes compute rewards is the trainer's affair: register in a module that
    they import, such as the one that `custom_reward_function` names.

    Raises:
        ConfigError: it has another scorer already, and `replace` is not set; or `scorer` is no name and no function.
    """
    if not data_source or "*" in data_source[:-1]:
        raise ConfigError(f"data source {data_source!r}: expected a name, or the beginning of one and a single *")
    if scorer in _NOT_HERE or not (isinstance(scorer, str) or callable(scorer)):
        raise ConfigError(f"data source {data_source!r}: {scorer!r} is neither the name of a reward nor a function")
    with _lock:
        known = _TABLE.get(data_source, scorer)
        if known != scorer and not replace:
            raise ConfigError(
                f"data source {data_source!r} is scored by {_name(known)} already; to change that, register it with "
                "replace=True"
            )
        _TABLE[data_source] = scorer


def scorer_for(data_source: str) -> Scorer:
    """
    Raises:
        ConfigError: none is registered for it. The message says which are, and how to register one.
    """
    if (exact := _TABLE.get(data_source)) is not None:
        return exact
    text = str(data_source)
    beginnings = [key for key in list(_TABLE) if key.endswith("*") and text.startswith(key[:-1])]
    if beginnings:
        return _TABLE[max(beginnings, key=len)]
    raise ConfigError(
        f"data source {data_source!r} has no reward; registered are {', '.join(sorted(_TABLE))}. Register yours: "
        f"toolyard.rewards.data_sources.register({text!r}, 'math' or 'code' or a function of yours)"
    )


def code_settings(data_source: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a code reward, with verl's defaults for that data source where `given` says nothing."""
    if data_source in _CONTESTS and not given.get("sandbox_fusion_url"):
        return {"without_fences": "whole", "comparison": PRIME_CODE, **given}
    return dict(given)


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
    score, others = read_returned(returned, f"data source {task[0]!r}: {_name(function)}")
    return {"score": score, **others} if isinstance(returned, Mapping) else score


def _check_options(given: Mapping[str, Any]) -> None:
    """A misspelt setting must not be silently without effect; one for other data sources than this must be."""
    known = _VERLS_OWN.union(*_OPTIONS.values())
    if given.keys() <= known:
        return
    for scorer in list(_TABLE.values()):
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


def _name(scorer: Scorer) -> str:
    return repr(scorer) if isinstance(scorer, str) else str(getattr(scorer, "__qualname__", scorer))
