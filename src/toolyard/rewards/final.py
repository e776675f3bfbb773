"""The final reward of a trajectory: by a name of ours, or by a function of the user's with verl's signature.

    gsm8k, gsm8k:flexible, gsm8k:strict     the last number, compared with the ground truth: see `rewards.gsm8k`
    math                                    the last formula, compared with the ground truth: see `rewards.math`
    code                                    the program, run on the test cases: 1.0 if it passes all. See `rewards.code`
    code:fraction                           the share of them that it passes
    code:continuous                         the share of the first `first_n`
    default                                 whichever the task's data source needs: see `rewards.data_sources`
    none                                    there is none
    package.module:function                 found where Python looks, and in the current folder
    path/to/file.py:function

    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, …}

The function may be async. What it returns besides `score` is kept as metrics. A reward that could not be computed is a
`RewardError`: never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toolyard.errors import ConfigError, MissingDependencyError

from . import gsm8k
from .final_function import FunctionReward, check_call
from .final_protocol import FinalReward, FinalScore, GroundTruthError
from .loading import load_function

__all__ = ["FinalReward", "FinalScore", "FunctionReward", "GroundTruthError", "Gsm8kReward", "load_reward"]

Options = Mapping[str, Any]

_NONE = "none"


def load_reward(spec: str, options: Options | None = None) -> FinalReward | None:
    """The final reward of that name; None for `none`. Nothing is opened before the first score.

    Args:
        spec: One of the names above, or where a function is.
        options: The reward's own settings. `code` takes those of `CodeSettings`, a function its keyword arguments.

    The current folder and that of the file are appended to `sys.path`, as `--tools` does it.

    Raises:
        ConfigError: there is no such name, module, file or function, it does not take verl's arguments, or not those
            options.
        MissingDependencyError: it needs a package that is not installed.
    """
    given = dict(options or {})
    try:
        if spec == _NONE:
            _take_none(given)
            return None
        if spec in _NAMED:
            return _NAMED[spec](spec, given)
        # Python has modules `code` and `math` too, which nobody means here.
        if ":" not in spec or spec.partition(":")[0] in _OURS:
            raise ConfigError(f"expected one of {_FORMS}")
        function = load_function(spec)
        check_call(function, given)
    except MissingDependencyError:
        raise
    except ConfigError as error:
        raise ConfigError(f"reward {spec!r}: {error}") from error.__cause__
    return FunctionReward(spec, function, given)


def _take_none(options: Options) -> None:
    if options:
        raise ConfigError(f"takes no options, but was given {', '.join(options)}")


# Those with a name ----------------------------------------------------------------------------------------------------


def _gsm8k(name: str, options: Options) -> FinalReward:
    _take_none(options)
    return Gsm8kReward(name, "strict" if name.endswith(":strict") else "flexible")


def _math(name: str, options: Options) -> FinalReward:
    from .final_math import MathReward

    return MathReward(name, options)


def _code(name: str, options: Options) -> FinalReward:
    from .final_code import CodeReward

    return CodeReward(name, options)


def _default(name: str, options: Options) -> FinalReward:
    from .final_default import DefaultReward

    return DefaultReward(name, options)


_NAMED: Mapping[str, Callable[[str, Options], FinalReward]] = {
    "gsm8k": _gsm8k,
    "gsm8k:flexible": _gsm8k,
    "gsm8k:strict": _gsm8k,
    "math": _math,
    "code": _code,
    "code:fraction": _code,
    "code:continuous": _code,
    "default": _default,
}
"""What they need is imported when they are asked for."""
_OURS = {name.partition(":")[0] for name in _NAMED} | {_NONE}
_FORMS = f"{', '.join((*_NAMED, _NONE))}, module:function or path/to/file.py:function"


class Gsm8kReward(FinalReward):
    """Runs where it is called: it takes microseconds, and never hangs."""

    def __init__(self, name: str, method: gsm8k.Method) -> None:
        self.name = name
        self._method: gsm8k.Method = method

    async def score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        *,
        deadline_seconds: float,
    ) -> FinalScore:
        if ground_truth is None:
            raise GroundTruthError(f"reward {self.name!r}: the task has no ground truth, which this reward needs")
        try:
            return FinalScore(gsm8k.compute_score(solution_str, ground_truth, self._method))
        except ConfigError as error:
            raise GroundTruthError(f"reward {self.name!r}: {error}") from None
