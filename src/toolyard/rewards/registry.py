"""Load the final reward of a trajectory: a built-in one by name, or your own function with verl's signature.

    gsm8k, gsm8k:flexible, gsm8k:strict     the last number, compared with the ground truth: see `rewards.gsm8k`
    math                                    the last formula, compared with the ground truth: see `rewards.math`
    code                                    the program, run on the test cases: 1.0 if it passes all. See `rewards.code`
    code:fraction                           the share of test cases that it passes
    code:continuous                         the share of the first `first_n` test cases
    judge                                   what a language model says: see `rewards.judge`
    default                                 the reward for the task's data source: see `rewards.data_sources`
    none                                    no final reward
    package.module:function                 imported from Python's path or the current folder
    path/to/file.py:function

    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, …}

The function may be async. Of what it returns besides `score`, `reason`, `extracted` and `expected` explain the score,
and the rest becomes metrics. A reward that could not be computed is a
`RewardError`, never 0.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from toolyard.errors import ConfigError, MissingDependencyError, RewardError
from toolyard.rewards import gsm8k
from toolyard.rewards.code.protocol import Aggregation, CodeSettings
from toolyard.rewards.data_sources import Scorer, code_settings, scorer_for
from toolyard.rewards.function import FunctionReward, check_call
from toolyard.rewards.protocol import FinalReward, FinalScore, GroundTruthError, read_options

__all__ = ["FinalReward", "FinalScore", "FunctionReward", "GroundTruthError", "Gsm8kReward", "load_reward"]

Options = Mapping[str, Any]

_NONE = "none"


def load_reward(spec: str, options: Options | None = None) -> FinalReward | None:
    """Load the final reward with that name; None for `none`. Nothing is opened before the first score.

    Args:
        spec: One of the names above, or the location of a function.
        options: The reward's own settings. `code` takes those of `CodeSettings`, `judge` those of
            `JudgeSettings`, a function its keyword arguments.

    The current folder and the file's folder are appended to `sys.path`, as with `--tools`.

    Raises:
        ConfigError: there is no such name, module, file or function, or it does not take verl's arguments or these
            options.
        MissingDependencyError: it needs a package that is not installed.
    """
    given = dict(options or {})
    try:
        if spec == _NONE:
            _refuse_options(given)
            return None
        if spec in _NAMED:
            return _NAMED[spec](spec, given)
        # Python also has modules `code` and `math`, which are never meant here.
        if ":" not in spec or spec.partition(":")[0] in _OURS:
            raise ConfigError(f"expected one of {_FORMS}")
        function = load_function(spec)
        check_call(function, given)
    except MissingDependencyError:
        raise
    except ConfigError as error:
        raise ConfigError(f"reward {spec!r}: {error}") from error.__cause__
    return FunctionReward(spec, function, given)


def _refuse_options(options: Options) -> None:
    if options:
        raise ConfigError(f"takes no options, but was given {', '.join(options)}")


# Built-in rewards -----------------------------------------------------------------------------------------------------


def _gsm8k(name: str, options: Options) -> FinalReward:
    _refuse_options(options)
    return Gsm8kReward(name, "strict" if name.endswith(":strict") else "flexible")


def _math(name: str, options: Options) -> FinalReward:
    from toolyard.rewards.math.reward import MathReward

    return MathReward(name, options)


def _code(name: str, options: Options) -> FinalReward:
    from toolyard.rewards.code.reward import CodeReward

    return CodeReward(name, options)


def _judge(name: str, options: Options) -> FinalReward:
    from toolyard.rewards.judge.reward import JudgeReward

    return JudgeReward(name, options)


def _default(name: str, options: Options) -> FinalReward:
    return DefaultReward(name, options)


_NAMED: Mapping[str, Callable[[str, Options], FinalReward]] = {
    "gsm8k": _gsm8k,
    "gsm8k:flexible": _gsm8k,
    "gsm8k:strict": _gsm8k,
    "math": _math,
    "code": _code,
    "code:fraction": _code,
    "code:continuous": _code,
    "judge": _judge,
    "default": _default,
}
"""Their dependencies are imported on demand."""
_OURS = {name.partition(":")[0] for name in _NAMED} | {_NONE}
_FORMS = f"{', '.join((*_NAMED, _NONE))}, module:function or path/to/file.py:function"


class Gsm8kReward(FinalReward):
    """Runs directly in the event loop: it takes microseconds and never hangs."""

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
            value, why = gsm8k.explained_score(solution_str, ground_truth, self._method)
        except ConfigError as error:
            raise GroundTruthError(f"reward {self.name!r}: {error}") from None
        return FinalScore(value, explanation=why)


# The final reward for each task's data source, from the table in `rewards.data_sources`.


class DefaultReward(FinalReward):
    """Several rewards under one name, each loaded when the first task needs it. Its options are those of `code`."""

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
        async with AsyncExitStack() as stack:  # all of them, even if closing one fails
            while self._loaded:
                stack.push_async_callback(self._loaded.popitem()[1].close)

    def _for(self, data_source: str) -> FinalReward:
        scorer = scorer_for(data_source)
        options = code_settings(data_source, self._options)
        # The id stays unique: the reward keeps the function alive.
        key = scorer if isinstance(scorer, str) else id(scorer), options != self._options
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = self._load(scorer, options)
        return found

    def _load(self, scorer: Scorer, options: Mapping[str, Any]) -> FinalReward:
        if not isinstance(scorer, str):
            return FunctionReward(getattr(scorer, "__qualname__", str(scorer)), scorer)
        loaded = load_reward(scorer, options if scorer.partition(":")[0] == "code" else None)
        assert loaded is not None  # the table never contains `none`
        return loaded


# A user's function, by `package.module:function` or `path/to/file.py:function`.


def load_function(spec: str) -> Callable[..., Any]:
    """Load the function. A file is run again each time; a module is imported once, as usual.

    Raises:
        ConfigError: there is no such module, file or name, it is not a function, or importing it failed.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError("expected module:function or path/to/file.py:function")
    module = _from_file(Path(place)) if place.endswith(".py") else _module(place)
    found: Any = module
    for step in name.split("."):
        if not hasattr(found, step):
            public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            there = ", ".join(public) or "none"
            raise ConfigError(f"{place} has no {name!r}; functions in it: {there}")
        found = getattr(found, step)
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__} and cannot be called")
    return found


def _module(name: str) -> ModuleType:
    _add_to_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"no module named {error.name!r} on Python's path or in the current folder; install it, add its "
                "folder to PYTHONPATH, or write path/to/file.py:function"
            ) from None
        raise ConfigError(f"importing {name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    if not os.path.isfile(path):
        raise ConfigError(f"no such file: {str(path)!r} (current folder: {os.getcwd()})")
    path = path.absolute()
    _add_to_path(os.getcwd())
    _add_to_path(str(path.parent))
    # A unique name, so that a file called json.py does not shadow the json module.
    name = f"toolyard_reward_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise ConfigError(f"running {path} failed: {type(error).__name__}: {error}") from error
        raise
    return module


def _add_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a json.py there does not shadow the json module
