"""Score answers that are mathematical expressions: 1.0 if the answer equals the ground truth, else 0.0.

The answer is the last complete `\\boxed{…}` of the text; without one, what `math-verify` finds in its last 10,000
characters. `math-verify` compares it: fractions, roots, intervals, sets, matrices, equations and so on in LaTeX,
decimals after rounding to six places.

Expressions can take forever (`10^{10^{10}}`) or use all memory, in C code that no signal stops. So each check runs in a
separate process with limited memory, which is killed at the deadline. An answer that could not be checked in time, or
that crashes the process each time, is wrong: that is the answer's fault. Other failures are exceptions, never 0.0: a
ground truth that is not an expression, a process killed by someone else, a machine that gave it no CPU time.

    value = compute_score(text, r"\\frac{1}{2}")                     # blocks
    result = await score(text, r"\\frac{1}{2}", deadline_seconds=5)   # result.value, result.extracted, …
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Self

from toolyard.errors import ConfigError, MissingDependencyError
from toolyard.rewards.math.pool import Pool
from toolyard.rewards.math.process import CheckReply, CheckRequest
from toolyard.rewards.math.text import MAX_EXPRESSION, Expression, find_answer, read_truth, short
from toolyard.rewards.protocol import GroundTruthError

DEADLINE_SECONDS = 10.0
_MIN_MEMORY_MB = 256
"""Importing sympy takes a quarter of it."""
_NEEDED = {
    "math_verify": "math-verify",
    "latex2sympy2_extended": "latex2sympy2-extended",
    "antlr4": "antlr4-python3-runtime",
}


@dataclass(frozen=True, slots=True)
class MathScore:
    """The score of an answer, and what was compared."""

    value: float
    """1.0 or 0.0."""
    extracted: str | None
    """What was taken as the answer, cut if huge. None if nothing was found."""
    expected: str
    """The ground truth's expression."""
    timed_out: bool = False
    """It could not be checked before the deadline, so it is wrong."""


class MathChecker:
    """Checks answers in at most `children` processes, which are started on demand and kept.

    May be used from any thread and event loop, concurrently, and in forks of the process, which start their own.
    The processes end with `close`, with the interpreter, and when it is killed.
    """

    def __init__(self, *, children: int = 2, memory_limit_mb: int = 1024, checks_per_child: int = 500) -> None:
        """
        Args:
            children: Maximum number of concurrent checks. Others wait.
            memory_limit_mb: Memory limit of each. An answer that needs more is wrong.
            checks_per_child: Number of checks after which a process is replaced, since its caches grow.
        """
        for name, value, least in (
            ("children", children, 1),
            ("memory_limit_mb", memory_limit_mb, _MIN_MEMORY_MB),
            ("checks_per_child", checks_per_child, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} {value!r}: expected at least {least}")
        self._pool = Pool(children, memory_limit_mb << 20, checks_per_child)

    def check(self, solution_str: str, ground_truth: Any, *, deadline_seconds: float = DEADLINE_SECONDS) -> MathScore:
        """Score `solution_str`. Blocks at most for the deadline, plus the wait for a free process.

        Raises:
            GroundTruthError: the ground truth is not an expression, or takes too long whatever the answer is.
            RewardError: it could not be checked: its process was killed or starved twice.
            MissingDependencyError: math-verify is not installed.
        """
        check = _Check(solution_str, ground_truth, deadline_seconds)
        if check.decided is not None:
            return check.decided
        job = self._pool.submit(check.request, deadline_seconds)
        try:
            return check.score(job.outcome.result())
        except BaseException:
            self._pool.give_up(job)
            raise

    async def score(
        self, solution_str: str, ground_truth: Any, *, deadline_seconds: float = DEADLINE_SECONDS
    ) -> MathScore:
        """Like `check`, without blocking. If cancelled, it leaves nothing running."""
        check = _Check(solution_str, ground_truth, deadline_seconds)
        if check.decided is not None:
            return check.decided
        job = self._pool.submit(check.request, deadline_seconds)
        try:
            return check.score(await asyncio.wrap_future(job.outcome))
        except BaseException:
            self._pool.give_up(job)
            raise

    def pids(self) -> list[int]:
        """Return the ids of the live processes."""
        return self._pool.pids()

    def close(self) -> None:
        """End the processes. Running checks fail with `RewardError`; a later one starts new processes."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Check:
    """One comparison: what can be decided immediately, and the request for the rest."""

    def __init__(self, solution_str: str, ground_truth: Any, deadline_seconds: float) -> None:
        _need_packages()
        if not (math.isfinite(deadline_seconds) and deadline_seconds > 0):
            raise ConfigError(f"deadline_seconds {deadline_seconds!r}: expected a positive number")
        self._truth = read_truth(ground_truth)
        self._answer = find_answer(solution_str)
        self.decided = self._decide()

    @property
    def request(self) -> CheckRequest:
        answer = self._answer
        if isinstance(answer, Expression):
            # An answer that is too long is skipped, but its ground truth is checked: an error there is the task's.
            latex = answer.latex if len(answer.text) <= MAX_EXPRESSION else ""
            return CheckRequest(self._truth.latex, latex, boxed=True)
        return CheckRequest(self._truth.latex, answer or "", boxed=False)

    def _decide(self) -> MathScore | None:
        """Decide equal texts and numbers without a process. Returns 0.0 only if the ground truth is known to be ok."""
        answer, truth = self._answer, self._truth
        if not isinstance(answer, Expression):
            return None
        if answer.text == truth.text or (answer.number is not None and answer.number == truth.number):
            return self._result(1.0)
        # Different decimals may be equal after rounding, which is not decided here.
        return self._result(0.0) if answer.is_integer and truth.is_integer else None

    def score(self, reply: CheckReply) -> MathScore:
        if reply.truth_problem:
            raise GroundTruthError(f"ground_truth {short(self._truth.text)!r}: {reply.truth_problem}")
        return self._result(float(reply.right), reply)

    def _result(self, value: float, reply: CheckReply | None = None) -> MathScore:
        extracted = short(self._answer.text) if isinstance(self._answer, Expression) else reply and reply.extracted
        return MathScore(value, extracted, short(self._truth.text), timed_out=reply is not None and reply.timed_out)


_found: set[str] = set()


def _need_packages() -> None:
    for module, package in _NEEDED.items():
        if module not in _found:
            if importlib.util.find_spec(module) is None:
                raise MissingDependencyError(package, "math", "the math reward")
            _found.add(module)


_shared = MathChecker()


def compute_score(solution_str: str, ground_truth: Any, *, deadline_seconds: float = DEADLINE_SECONDS) -> float:
    """Return 1.0 if `solution_str` ends in an answer that equals `ground_truth`, else 0.0. See `MathChecker.check`."""
    return check(solution_str, ground_truth, deadline_seconds=deadline_seconds).value


def check(solution_str: str, ground_truth: Any, *, deadline_seconds: float = DEADLINE_SECONDS) -> MathScore:
    """Call `MathChecker.check` on two processes shared by this interpreter."""
    return _shared.check(solution_str, ground_truth, deadline_seconds=deadline_seconds)


async def score(solution_str: str, ground_truth: Any, *, deadline_seconds: float = DEADLINE_SECONDS) -> MathScore:
    """Like `check`, without blocking."""
    return await _shared.score(solution_str, ground_truth, deadline_seconds=deadline_seconds)


def close() -> None:
    """End the shared processes. A later check starts new ones."""
    _shared.close()
