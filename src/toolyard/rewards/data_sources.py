"""The table of rewards by data source; you can add to it.

register("my/geometry", "math")                          # a built-in reward by name: see `rewards.registry`
register("my/puzzles*", puzzle_score)                    # a function, for every name with this prefix
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from toolyard.errors import ConfigError
from toolyard.rewards.code.protocol import PRIME_CODE

Scorer = str | Callable[..., Any]
"""A name that `load_reward` accepts, or a function `(data_source, solution_str, ground_truth, extra_info)`, sync or
async, that returns a number or `{"score": number, …}`."""

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
_CONTESTS = frozenset({"codecontests", "apps", "codeforces", "taco"})
"""Data sources that verl scores with `prime_code` if there is no service."""
_NOT_HERE = ("default", "none")

_lock = threading.Lock()


def register(data_source: str, scorer: Scorer, *, replace: bool = False) -> None:
    """Score answers to tasks of `data_source` with `scorer`, in this process and its later forks.

    A `data_source` that ends in `*` matches all names with that prefix. A full name has priority over a prefix, and a
    longer prefix over a shorter one. The trainer decides which processes compute rewards: register in a module that
    they import, such as the one named by `custom_reward_function`.

    Raises:
        ConfigError: it already has another scorer and `replace` is not set; or `scorer` is no name and no function.
    """
    if not data_source or "*" in data_source[:-1]:
        raise ConfigError(f"data source {data_source!r}: expected a name, or a prefix followed by a single *")
    if scorer in _NOT_HERE or not (isinstance(scorer, str) or callable(scorer)):
        raise ConfigError(f"data source {data_source!r}: {scorer!r} is neither the name of a reward nor a function")
    with _lock:
        known = _TABLE.get(data_source, scorer)
        if known != scorer and not replace:
            raise ConfigError(
                f"data source {data_source!r} is already scored by {name_of(known)}; to change that, register it with "
                "replace=True"
            )
        _TABLE[data_source] = scorer


def scorer_for(data_source: str) -> Scorer:
    """Return the scorer registered for `data_source`.

    Raises:
        ConfigError: none is registered. The message lists those that are, and says how to register one.
    """
    if (exact := _TABLE.get(data_source)) is not None:
        return exact
    text = str(data_source)
    beginnings = [key for key in list(_TABLE) if key.endswith("*") and text.startswith(key[:-1])]
    if beginnings:
        return _TABLE[max(beginnings, key=len)]
    raise ConfigError(
        f"data source {data_source!r} has no reward; registered: {', '.join(sorted(_TABLE))}. Register your own: "
        f"toolyard.rewards.data_sources.register({text!r}, 'math' or 'code' or your function)"
    )


def code_settings(data_source: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a code reward, with verl's defaults for that data source where `given` has none."""
    if data_source in _CONTESTS and not given.get("sandbox_fusion_url"):
        return {"without_fences": "whole", "comparison": PRIME_CODE, **given}
    return dict(given)


def registered() -> list[Scorer]:
    return list(_TABLE.values())


def name_of(scorer: Scorer) -> str:
    return repr(scorer) if isinstance(scorer, str) else str(getattr(scorer, "__qualname__", scorer))
