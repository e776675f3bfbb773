"""Track which cases are still to run and the results of the others, and compute the score. Pure.

Results do not depend on which case ended first: under `stop_at_first_failure` every case after the first failure is
NOT_RUN, even one that ran at the same time on another worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from toolyard.rewards.code.protocol import Aggregation, CaseResult, CaseVerdict, CodeSettings

FAILED = frozenset(
    {
        CaseVerdict.WRONG_ANSWER,
        CaseVerdict.RUNTIME_ERROR,
        CaseVerdict.TIME_LIMIT,
        CaseVerdict.MEMORY_LIMIT,
        CaseVerdict.COMPILE_ERROR,
    }
)


class Ledger:
    """The cases of one answer."""

    def __init__(self, cases: int, settings: CodeSettings, on_case: Callable[[CaseResult], None] | None = None) -> None:
        self._all_or_nothing = settings.aggregation is Aggregation.ALL
        stop = settings.stop_at_first_failure
        self.stops = self._all_or_nothing if stop is None else stop
        """Whether to stop at the first failure."""
        self._count = min(cases, settings.first_n) if settings.aggregation is Aggregation.CONTINUOUS else cases
        self._end = self._count
        """Cases from this index on need not run."""
        self._pending = deque(range(self._count))
        self._results: list[CaseResult | None] = [None] * cases
        self._uncompiled: CaseResult | None = None
        self._on_case = on_case
        self._told = 0
        self.compiled = False
        """Whether a case got past the compiler, so the program compiles."""
        self.cut_short = ""
        """Why cases that should have run did not."""

    # ------------------------------------------------------------------------------------------------ what to run
    @property
    def pending(self) -> int:
        return len(self._pending)

    def take(self, most: int) -> deque[int]:
        """Return the next cases to run, in order; empty if none are left."""
        return deque(self._pending.popleft() for _ in range(min(most, len(self._pending))))

    def put_back(self, cases: Sequence[int]) -> None:
        """Return cases that were taken but not run."""
        self._pending.extendleft(index for index in reversed(cases) if index < self._end)

    def needs(self, index: int) -> bool:
        return index < self._end

    def add(self, result: CaseResult) -> None:
        self._results[result.index] = result
        if result.verdict is CaseVerdict.COMPILE_ERROR:
            self._uncompiled = result
            self._end_at(0)
        elif result.verdict in FAILED and self.stops:
            self._end_at(result.index + 1)
        if result.verdict not in (CaseVerdict.COMPILE_ERROR, CaseVerdict.INFRASTRUCTURE):
            self.compiled = True
        while self._told < self._end and (known := self._results[self._told]) is not None:
            self._tell(known)

    def skip(self) -> None:
        """There is nothing to run: skip all cases."""
        self._end_at(0)

    def _end_at(self, index: int) -> None:
        if index < self._end:
            self._end = index
            self._pending = deque(case for case in self._pending if case < index)

    def _tell(self, result: CaseResult) -> None:
        self._told += 1
        if self._on_case is not None:
            self._on_case(result)

    # -------------------------------------------------------------------------------------------------- the result
    def close(self) -> tuple[CaseResult, ...]:
        """Return one result per case. Cases that should have run but did not are our failure."""
        failed = any(one is not None and one.verdict in FAILED for one in self._results)
        decided = failed and self._all_or_nothing
        left = CaseVerdict.NOT_RUN if decided else CaseVerdict.INFRASTRUCTURE
        results = tuple(self._final(index, known, left) for index, known in enumerate(self._results))
        for result in results[self._told :]:
            self._tell(result)
        return results

    def _final(self, index: int, known: CaseResult | None, left: CaseVerdict) -> CaseResult:
        if self._uncompiled is not None:
            return replace(self._uncompiled, index=index)
        if index >= self._end:
            return CaseResult(index, CaseVerdict.NOT_RUN, tries=0)
        return known or CaseResult(index, left, why=self.cut_short, tries=0)

    def score(self, results: Sequence[CaseResult]) -> float | None:
        """None if our failure makes it unknown. With ALL, one failed case decides it anyway."""
        counted = results[: self._count]
        if self._all_or_nothing and any(one.verdict in FAILED for one in counted):
            return 0.0
        if any(one.verdict is CaseVerdict.INFRASTRUCTURE for one in counted):
            return None
        return sum(one.verdict is CaseVerdict.PASSED for one in counted) / len(counted)


def explain_score(results: Sequence[CaseResult], score: float | None) -> str:
    """Describe the first case that lowered the score or prevented it. Empty for a full score."""
    if score == 1.0:
        return ""
    guilty = {CaseVerdict.INFRASTRUCTURE} if score is None else FAILED
    first = next((one for one in results if one.verdict in guilty), None)
    if first is None:
        return ""
    where = "" if first.verdict is CaseVerdict.COMPILE_ERROR else f"case {first.index}: "
    return f"{where}{first.verdict.value}: {first.why}"
