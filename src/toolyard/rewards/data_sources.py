"""Which reward a data source needs: a table that anybody may add to.

register("my/geometry", "math")                          # a built-in reward by name: see `rewards.registry`
register("my/puzzles*", puzzle_score)                    # a function, for every name that starts so
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from toolyard.errors import ConfigError
from toolyard.rewards.code.protocol import PRIME_CODE

Scorer = str | Callable[..., Any]
"""A name that `load_reward` knows, or a function `(data_source, solution_str, ground_truth, extra_info)` that returns a
number or `{"score": number, …}`, and may be async."""

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
"""What verl scores by `prime_code` where there is no service."""
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
                f"data source {data_source!r} is scored by {name_of(known)} already; to change that, register it with "
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


def registered() -> list[Scorer]:
    return list(_TABLE.values())


def name_of(scorer: Scorer) -> str:
    return repr(scorer) if isinstance(scorer, str) else str(getattr(scorer, "__qualname__", scorer))
