"""Numbers within a tolerance, and things in any order: what comparing texts and comparing values have in common."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_ALL_WAYS_ITEMS, _ALL_WAYS_PARTS = 100, 10_000


class Tolerance(NamedTuple):
    """By how much two numbers may differ. False if they may not at all."""

    absolute: float
    relative: float

    def allows(self, actual: float, expected: float) -> bool:
        """Whether they differ by no more than the absolute one, or the relative one of `expected`. NaN is NaN."""
        if math.isnan(actual) or math.isnan(expected):
            return math.isnan(actual) and math.isnan(expected)
        if not self or math.isinf(actual) or math.isinf(expected):
            return actual == expected
        # 1.1 - 1.0 is more than 0.1 in binary: the subtraction's own error does not count.
        rounding = 2 * sys.float_info.epsilon * max(abs(actual), abs(expected))
        return abs(actual - expected) <= max(self.absolute, self.relative * abs(expected)) + rounding

    def __bool__(self) -> bool:
        return self.absolute > 0 or self.relative > 0


def unpaired(
    got: Sequence[Hashable],
    wanted: Sequence[Hashable],
    fits: Callable[[Sequence[int], Sequence[int]], bool] | None,
) -> tuple[int | None, int | None] | None:
    """None if the two are the same in some order; else the place of the first on each side that has no equal.

    `fits` tells whether those at these places, as many on either side, can be paired although they are not equal.
    """
    extra, missing = _left_over(got, wanted)
    if not extra and not missing:
        return None
    # It is rare that equal ones must be parted so that others fit, and dear to find out: last.
    if (
        fits is not None
        and len(got) == len(wanted)
        and (fits(extra, missing) or fits(range(len(got)), range(len(got))))
    ):
        return None
    return extra[0] if extra else None, missing[0] if missing else None


def _left_over(got: Sequence[Hashable], wanted: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The places of what remains on each side when equal ones are paired off."""
    surplus = Counter(got)
    surplus.subtract(wanted)

    def places(side: Sequence[Hashable], sign: int) -> Iterator[int]:
        for index, item in enumerate(side):
            if surplus[item] * sign > 0:
                surplus[item] -= sign
                yield index

    return list(places(got, 1)), list(places(wanted, -1))


def fit(
    got: Sequence[T],
    wanted: Sequence[T],
    *,
    order: Callable[[T], Any],
    size: Callable[[T], int],
    same: Callable[[T, T], bool],
) -> bool:
    """Whether each can have a partner of its own on the other side. Both are of one length.

    Never true without such a pairing. False although there is one: only if it is not the pairing by `order`, and there
    are too many, or they have too many parts together (`size`), to try every way.
    """
    # Of single numbers this finds a pairing wherever there is one: the ranges around them lie in the order of size.
    by_size = zip(sorted(got, key=order), sorted(wanted, key=order), strict=True)
    if all(same(one, other) for one, other in by_size):
        return True
    if len(got) > _ALL_WAYS_ITEMS or sum(map(size, (*got, *wanted))) > _ALL_WAYS_PARTS:
        return False
    partners = [[index for index, other in enumerate(wanted) if same(one, other)] for one in got]
    return _all_paired(partners)


def _all_paired(partners: Sequence[Sequence[int]]) -> bool:
    """Whether each on the left can have one of its partners for itself: by augmenting paths."""
    owner: dict[int, int] = {}
    held: dict[int, int] = {}
    for start in range(len(partners)):
        reached_from: dict[int, int] = {}
        waiting = [start]
        free: int | None = None
        for left in waiting:  # grows while it is read
            for right in partners[left]:
                if right in reached_from:
                    continue
                reached_from[right] = left
                if right not in owner:
                    free = right
                    break
                waiting.append(owner[right])
            if free is not None:
                break
        while free is not None:
            left = reached_from[free]
            owner[free] = left
            held[left], free = free, held.get(left)
        if start not in held:
            return False
    return True
