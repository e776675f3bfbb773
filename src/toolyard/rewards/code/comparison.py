"""Decide whether a program's output is the expected one; if not, find the first difference.

Line ends `\n`, `\r\n` and `\r` are equal. White space (by `str.isspace`) at the ends of lines, empty lines at the end
of the text and a missing final line end are always ignored. In mode `lines` everything else counts: white space at the
start of a line and within it, and empty lines between others. Mode `trimmed` also ignores white space at the start of
lines and all empty lines, both when comparing and in messages. Mode `tokens` compares only the words between white
space. In mode `exact` every character counts, and other settings have no effect.

Numbers in text. Without a tolerance they are text: `1.0` is not `1`. With one, two words that are decimal numbers (`1`,
`-.5`, `1e5`, `inf`, `Infinity`, `nan`, `-0.0`; not `1_000`, `0x1f` or `1,5`) and not both integers are equal if they
differ by at most `absolute_tolerance` or `relative_tolerance` times the expected one, whichever is more. Two integers
are equal if they are written alike. `nan` equals `nan`, and an infinity equals itself.

Any order. `unordered="lines"` compares the lines as a multiset (in mode `tokens`: lines as lists of words, without
empty ones), `"tokens"` the words of each line (in mode `tokens`: of the whole text). With a tolerance, they are paired
by size, which finds a pairing of single numbers if there is one; if that fails, every pairing is tried, for up to 100
items with 10,000 words in total (equal ones may be left out of both). So nothing wrong is ever accepted; a right output
is rejected only if more lines than that, of several numbers each, are within tolerance of one another.

Time is about linear. An output is split into at most one piece more than the expected one has, so a flood takes no more
memory than a few copies of itself.
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from toolyard.rewards.code.protocol import Comparison

_NUMBER = re.compile(
    r"[-+]?+(?:(?:[0-9]++\.?+[0-9]*+|\.[0-9]++)(?:e[-+]?+[0-9]++)?+|inf(?:inity)?+|nan)", re.IGNORECASE
)
_INTEGER = re.compile(r"[-+]?+[0-9]++")
_SPACES = re.compile(r"(\s+)")
_SHOWN_BEFORE, _SHOWN = 15, 60


def difference(actual: str, expected: str, comparison: Comparison) -> str | None:
    """Return None if they are equal by the rules above; else one line that shows the first difference."""
    if actual == expected:
        return None
    if comparison.mode == "exact":
        return _exact_difference(actual, expected)
    shown = _tidied(actual), _tidied(expected)
    if comparison.mode == "trimmed":
        wanted = list(_trimmed(shown[1]))
        shown = "\n".join(islice(_trimmed(shown[0]), len(wanted) + 1)), "\n".join(wanted)
    actual, expected = (text.casefold() for text in shown) if comparison.ignore_case else shown
    if actual == expected:
        return None
    tolerance = Tolerance(comparison.absolute_tolerance, comparison.relative_tolerance)
    if comparison.unordered == "lines":
        return _unordered_lines(actual, expected, shown, comparison.mode, tolerance)
    if comparison.mode == "tokens":
        return _words_difference(actual, expected, shown, comparison.unordered == "tokens", tolerance)
    wanted = _lines(expected)
    got = _lines(actual, len(wanted))
    for index, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one == other or _same_word(one.rstrip(), other.rstrip(), tolerance):
            continue
        if comparison.unordered == "tokens":
            words = other.split()
            if _unpaired(one.split(None, len(words)), words, tolerance, str.split) is None:
                continue
            at = 0, 0
        elif tolerance:
            pieces = _SPACES.split(other.rstrip())
            at = _first_other_word(_SPACES.split(one.rstrip(), len(pieces)), pieces, tolerance)
            if at is None:
                continue
        else:
            at = None
        return _at_line(index, shown, at)
    return _at_line(min(len(got), len(wanted)), shown) if len(got) != len(wanted) else None


def _tidied(text: str) -> str:
    return (text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text).rstrip()


def _trimmed(text: str) -> Iterator[str]:
    return filter(None, map(str.strip, io.StringIO(text)))


def _lines(text: str, most: int = -1) -> list[str]:
    """Split into at most `most` lines, plus one with the rest."""
    return text.split("\n", most) if text else []


def _line(text: str, index: int) -> str | None:
    line = next(islice(io.StringIO(text), index, None), None)
    return None if line is None else line.rstrip()


def _exact_difference(actual: str, expected: str) -> str:
    at = _first_difference(actual, expected)
    line_start = actual.rfind("\n", 0, at) + 1
    where = f"line {actual.count(chr(10), 0, at) + 1}, character {at - line_start + 1}"
    got, wanted = ("the end" if at == len(text) else _shown(text, at, line_start) for text in (actual, expected))
    return f"{where}: got {got}, expected {wanted}"


def _words_difference(
    actual: str, expected: str, shown: tuple[str, str], unordered: bool, tolerance: Tolerance
) -> str | None:
    wanted = expected.split()
    got = actual.split(None, len(wanted))
    if got == wanted:
        return None
    if unordered:
        left = _unpaired(got, wanted, tolerance, str.split)
        if left is None:
            return None
    else:
        pairs = enumerate(zip(got, wanted, strict=False))
        index = next((index for index, (one, other) in pairs if not _same_word(one, other, tolerance)), None)
        if index is None and len(got) == len(wanted):
            return None
        index = min(len(got), len(wanted)) if index is None else index
        left = (index if index < len(got) else None, index if index < len(wanted) else None)
    words = [
        None if index is None else text.split(None, index + 1)[index] for text, index in zip(shown, left, strict=True)
    ]
    return _difference(_line_of_word(shown[0], left[0]), *words)


def _line_of_word(text: str, index: int | None) -> int:
    """Return the line of the word with this number; the last line for None."""
    if index is None:
        return text.count("\n")
    before = text.split(None, index)
    return text[: len(text) - len(before[index])].count("\n")


def _unordered_lines(actual: str, expected: str, shown: tuple[str, str], mode: str, tolerance: Tolerance) -> str | None:
    most = len(expected.split())
    wanted = list(_keyed_lines(expected, mode, most))
    got = list(islice(_keyed_lines(actual, mode, most), len(wanted) + 1))
    left = _unpaired([line for _, line in got], [line for _, line in wanted], tolerance, _SPACES.split)
    if left is None:
        return None
    lines = [None if index is None else side[index][0] for side, index in zip((got, wanted), left, strict=True)]
    pairs = zip(shown, lines, strict=True)
    texts = [None if line is None else _key(_line(text, line) or "", mode, most) for text, line in pairs]
    return _difference(actual.count("\n") + 1 if lines[0] is None else lines[0], *texts, at=(0, 0))


def _keyed_lines(text: str, mode: str, most_words: int) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers. In mode `tokens` without empty ones."""
    keyed = ((index, _key(line, mode, most_words)) for index, line in enumerate(io.StringIO(text)))
    return ((index, key) for index, key in keyed if key or mode != "tokens")


def _key(line: str, mode: str, most_words: int) -> str:
    return " ".join(line.split(None, most_words)) if mode == "tokens" else line.rstrip()


# Words and numbers ---------------------------------------------------------------------------------------------------


def _number(word: str) -> float | None:
    if not _NUMBER.fullmatch(word):
        return None
    number = float(word)
    # Numbers too large for a float are text; otherwise all of them would be equal.
    return None if math.isinf(number) and word[-1].isdigit() else number


def _same_word(actual: str, expected: str, tolerance: Tolerance) -> bool:
    if actual == expected:
        return True
    if not tolerance or (_INTEGER.fullmatch(actual) and _INTEGER.fullmatch(expected)):
        return False
    one, other = _number(actual), _number(expected)
    return one is not None and other is not None and tolerance.allows(one, other)


def _same_words(actual: Sequence[str], expected: Sequence[str], tolerance: Tolerance) -> bool:
    pairs = zip(actual, expected, strict=False)
    return len(actual) == len(expected) and all(_same_word(one, other, tolerance) for one, other in pairs)


def _first_other_word(actual: Sequence[str], expected: Sequence[str], tolerance: Tolerance) -> tuple[int, int] | None:
    """Return where the first different word is in each line; None if all are equal."""
    if _same_words(actual, expected, tolerance):
        return None
    pairs = enumerate(zip(actual, expected, strict=False))
    first = next((index for index, (one, other) in pairs if not _same_word(one, other, tolerance)), None)
    return sum(map(len, actual[:first])), sum(map(len, expected[:first]))


def _by_size(line: Sequence[str]) -> list[tuple[float, str]]:
    return [_sized(word) for word in line]


def _by_number(line: Sequence[str]) -> float:
    """Like `_by_size` for lines of one word: bare floats sort much faster."""
    return _sized(line[0])[0]


def _sized(word: str) -> tuple[float, str]:
    number = _number(word)
    return (math.inf, word) if number is None else (-math.inf if math.isnan(number) else number, "")


def _unpaired(
    got: Sequence[str], wanted: Sequence[str], tolerance: Tolerance, words: Callable[[str], list[str]]
) -> tuple[int | None, int | None] | None:
    """Return None if the two are the same multiset; else the first item on each side without a partner."""

    def fits(some: Sequence[int], others: Sequence[int]) -> bool:
        one, other = [words(got[index]) for index in some], [words(wanted[index]) for index in others]
        single = all(len(line) == 1 for line in (*one, *other))
        order = _by_number if single else _by_size
        return fit(one, other, order=order, size=len, same=lambda x, y: _same_words(x, y, tolerance))

    return unpaired(got, wanted, fits if tolerance else None)


# Showing -------------------------------------------------------------------------------------------------------------


def _at_line(index: int, texts: tuple[str, str], at: tuple[int, int] | None = None) -> str:
    return _difference(index, *(_line(text, index) for text in texts), at=at)


def _difference(index: int, got: str | None, wanted: str | None, *, at: tuple[int, int] | None = None) -> str:
    """`at`: which position of each line to show; None: the first difference."""
    first = _first_difference(got or "", wanted or "")
    places = zip((got, wanted), at or (first, first), strict=True)
    one, other = ("the end" if text is None else _shown(text, place) for text, place in places)
    return f"line {index + 1}: got {one}, expected {other}"


def _first_difference(one: str, other: str) -> int:
    """Return the position of the first difference, by bisection: comparing slices is faster than characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _shown(text: str, at: int, start: int = 0) -> str:
    begin = max(start, at - _SHOWN_BEFORE)
    piece = text[begin : begin + _SHOWN]
    return f"{'…' if begin > start else ''}{piece!r}{'…' if begin + _SHOWN < len(text) else ''}"


# Tolerances and unordered comparison, shared by texts and values.


T = TypeVar("T")

_ALL_WAYS_ITEMS, _ALL_WAYS_PARTS = 100, 10_000


class Tolerance(NamedTuple):
    """By how much two numbers may differ. False if not at all."""

    absolute: float
    relative: float

    def allows(self, actual: float, expected: float) -> bool:
        """Whether they differ by at most the absolute tolerance, or the relative one times `expected`. NaN is NaN."""
        if math.isnan(actual) or math.isnan(expected):
            return math.isnan(actual) and math.isnan(expected)
        if not self or math.isinf(actual) or math.isinf(expected):
            return actual == expected
        # 1.1 - 1.0 is more than 0.1 in binary: ignore the rounding error of the subtraction.
        rounding = 2 * sys.float_info.epsilon * max(abs(actual), abs(expected))
        return abs(actual - expected) <= max(self.absolute, self.relative * abs(expected)) + rounding

    def __bool__(self) -> bool:
        return self.absolute > 0 or self.relative > 0


def unpaired(
    got: Sequence[Hashable],
    wanted: Sequence[Hashable],
    fits: Callable[[Sequence[int], Sequence[int]], bool] | None,
) -> tuple[int | None, int | None] | None:
    """Return None if the two are equal in some order; else the index of the first item on each side without an equal.

    `fits` says whether the items at these indexes, equally many on both sides, can be paired although not equal.
    """
    extra, missing = _left_over(got, wanted)
    if not extra and not missing:
        return None
    # Equal items rarely have to be separated so that others fit, and checking that is expensive: do it last.
    if (
        fits is not None
        and len(got) == len(wanted)
        and (fits(extra, missing) or fits(range(len(got)), range(len(got))))
    ):
        return None
    return extra[0] if extra else None, missing[0] if missing else None


def _left_over(got: Sequence[Hashable], wanted: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return the indexes of what remains on each side when equal items are paired."""
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
    """Whether every item can have its own partner on the other side. Both have the same length.

    Never true without such a pairing. May be false although there is one, but only if it is not the pairing by `order`
    and there are too many items, or too many parts in total (`size`), to try every pairing.
    """
    # For single numbers this finds any pairing: the ranges around them are ordered by size.
    by_size = zip(sorted(got, key=order), sorted(wanted, key=order), strict=True)
    if all(same(one, other) for one, other in by_size):
        return True
    if len(got) > _ALL_WAYS_ITEMS or sum(map(size, (*got, *wanted))) > _ALL_WAYS_PARTS:
        return False
    partners = [[index for index, other in enumerate(wanted) if same(one, other)] for one in got]
    return _all_paired(partners)


def _all_paired(partners: Sequence[Sequence[int]]) -> bool:
    """Whether each item on the left can have one of its partners to itself, by augmenting paths."""
    owner: dict[int, int] = {}
    held: dict[int, int] = {}
    for start in range(len(partners)):
        reached_from: dict[int, int] = {}
        waiting = [start]
        free: int | None = None
        for left in waiting:  # grows during iteration
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
