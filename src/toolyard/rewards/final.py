"""The final reward of a trajectory: by a name of ours, or by a function of the user's with verl's signature.

    gsm8k, gsm8k:flexible, gsm8k:strict     the last number, compared with the ground truth: see `rewards.gsm8k`
    none                                    there is none
    package.module:function                 found where Python looks, and in the current folder
    path/to/file.py:function

    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, …}

The function may be async. What it returns besides `score` is kept as metrics. A reward that could not be computed is a
`RewardError`: never 0.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import to_jsonable_python

from toolyard.errors import ConfigError, RewardError

from . import gsm8k
from .loading import load_function
from .threads import Threads

_METHODS: Mapping[str, gsm8k.Method] = {"gsm8k": "flexible", "gsm8k:flexible": "flexible", "gsm8k:strict": "strict"}
_NONE = "none"
_FORMS = f"{', '.join((*_METHODS, _NONE))}, module:function or path/to/file.py:function"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRACE_CHARS = 10_000
_VALUE_CHARS = 80


class GroundTruthError(RewardError, ConfigError):
    """The task has no ground truth that the reward could use: the task's fault, and the same again next time."""


@dataclass(frozen=True, slots=True)
class FinalScore:
    """What a final reward said."""

    value: float
    """Finite."""
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What came with the score, in JSON's terms."""


class FinalReward(ABC):
    """Scores whole responses. Made by `load_reward`."""

    name: str

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
        """What `solution_str` is worth. The same for the same arguments, as far as that lies with us.

        Raises:
            RewardError: it could not be computed within `deadline_seconds` of its begin, or not at all; the message
                holds the traceback, if there is one.
            GroundTruthError: the ground truth is missing or is not of the kind that this reward needs.
        """


def load_reward(spec: str) -> FinalReward | None:
    """The final reward of that name; None for `none`.

    The current folder and that of the file are appended to `sys.path`, as `--tools` does it.

    Raises:
        ConfigError: there is no such name, module, file or function, or it does not take verl's arguments.
    """
    if spec == _NONE:
        return None
    if spec in _METHODS:
        return Gsm8kReward(spec, _METHODS[spec])
    if ":" not in spec:
        raise ConfigError(f"reward {spec!r}: expected one of {_FORMS}")
    try:
        function = load_function(spec)
        _check_signature(function)
    except ConfigError as error:
        raise ConfigError(f"reward {spec!r}: {error}") from error.__cause__
    return FunctionReward(spec, function)


def _check_signature(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some builtins nobody knows it
        return
    try:
        signature.bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise ConfigError(
            f"the function takes {signature}, and would be called with the keywords {', '.join(_ARGUMENTS)}: {error}"
        ) from None


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


class FunctionReward(FinalReward):
    """A function of the user's.

    An async one runs in the event loop, which it must not block; when it is late it is cancelled, and has to end then.
    Another one runs in a thread, at most `max_running` at the same time; waiting for a thread does not count towards
    the deadline. A thread cannot be stopped: one that is late is abandoned and goes on until the function returns. With
    `max_hung` such threads, further calls are refused until one of them ends.
    """

    def __init__(self, name: str, function: Callable[..., Any], *, max_running: int = 32, max_hung: int = 32) -> None:
        self.name = name
        self._function = function
        self._threads = Threads(f"reward {name!r}", max_running, max_hung)
        called: Any = getattr(function, "__call__", None)  # noqa: B004  (an object may have an async one)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

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
            return self._read(
                await self._call(deadline_seconds, data_source, solution_str, ground_truth, dict(extra_info))
            )
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._failed(error) from error  # the function's own doing
        except RewardError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(error) from error

    async def _call(self, seconds: float, *values: Any) -> Any:
        # Copies: what one call does to them must not be seen by the next, or by the trajectory.
        arguments = copy.deepcopy(dict(zip(_ARGUMENTS, values, strict=True)))
        async with nullcontext() if self._is_async else self._threads.slot():
            late = asyncio.timeout(seconds)
            try:
                async with late:
                    if self._is_async:
                        return await self._function(**arguments)
                    returned = await self._threads.run(lambda: self._function(**arguments))
                    return await returned if inspect.isawaitable(returned) else returned
            except TimeoutError:
                if late.expired():
                    raise RewardError(f"reward {self.name!r}: did not finish within {seconds:g} s") from None
                raise  # the function's own

    def _failed(self, error: BaseException) -> RewardError:
        trace = "".join(traceback.format_exception(error))
        if len(trace) > _TRACE_CHARS:  # its end says what happened
            trace = "…" + trace[-_TRACE_CHARS:]
        return RewardError(f"reward {self.name!r}: raised {type(error).__name__}\n{trace}")

    def _read(self, returned: Any) -> FinalScore:
        if not isinstance(returned, Mapping):
            return FinalScore(self._number(returned))
        given = cast("Mapping[Any, Any]", returned)
        if "score" not in given:
            keys = ", ".join(map(str, given)) or "none"
            raise RewardError(f"reward {self.name!r}: returned a dict without 'score'; its keys: {_short(keys)}")
        others = {key: value for key, value in given.items() if key != "score"}
        try:
            extras: Any = to_jsonable_python(others, fallback=_nearest, inf_nan_mode="null", bytes_mode="base64")
        except ValueError as error:  # it contains itself, say
            raise RewardError(f"reward {self.name!r}: what it returned with the score is no JSON: {error}") from None
        return FinalScore(self._number(given["score"]), extras)

    def _number(self, given: Any) -> float:
        item: Any = getattr(given, "item", None)  # of numpy's and torch's numbers, also in an array of one
        try:
            plain: Any = item() if callable(item) else given
            value = math.nan if isinstance(plain, str | bytes | bytearray) else float(plain)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            value = math.nan
        if not math.isfinite(value):
            raise RewardError(f"reward {self.name!r}: returned {_short(repr(given))}, which is not a finite number")
        return value


def _nearest(value: Any) -> Any:
    """What JSON has no word for: numpy's as lists and numbers, others as text."""
    as_list = getattr(value, "tolist", None)
    return as_list() if callable(as_list) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _VALUE_CHARS else text[:_VALUE_CHARS] + "…"
