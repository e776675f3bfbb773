"""Waiting times for permits: a histogram with buckets of 2^(1/4), cheap to update and to merge across processes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from toolyard.limits.protocol import WaitTimes

_STEPS = 4
_FINEST = 1e-6


class WaitHistogram:
    def __init__(self) -> None:
        self.immediate = 0
        self.longest = 0.0
        self._counts: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        step = max(0, math.ceil(_STEPS * math.log2(seconds / _FINEST))) if seconds > _FINEST else 0
        self._counts[step] = self._counts.get(step, 0) + 1
        self.longest = max(self.longest, seconds)

    def merge(self, counts: Mapping[int, int], immediate: int, longest: float) -> None:
        self.immediate += immediate
        self.longest = max(self.longest, longest)
        for step, count in counts.items():
            self._counts[step] = self._counts.get(step, 0) + count

    @property
    def counts(self) -> Mapping[int, int]:
        return self._counts

    def summary(self) -> WaitTimes:
        total = self.immediate + sum(self._counts.values())
        steps = sorted(self._counts.items())

        def percentile(share: float) -> float:
            seen = self.immediate
            if seen >= share * total:
                return 0.0
            for step, count in steps:
                seen += count
                if seen >= share * total:
                    return min(self.longest, _FINEST * 2 ** (step / _STEPS))
            return self.longest

        return WaitTimes(total, percentile(0.5), percentile(0.9), percentile(0.99), self.longest)
