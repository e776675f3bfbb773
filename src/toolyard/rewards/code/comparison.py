"""When the output of a program is the expected one; and if not, where it first differs.

Line ends `\n`, `\r\n` and `\r` are the same. White space (as `str.isspace` says) at the ends of lines, empty lines
at the end of the text and a missing last line end never count. In mode `lines` everything else does: white space at the
beginning of a line and within it, empty lines before others. In mode `trimmed` these two do not: what is compared, and
shown, are the lines that are not empty, without white space around them. In mode `tokens` only the words between white
space count. In mode `exact` every character counts, and no other setting does.

Numbers in text. Without a tolerance they are text: `1.0` is not `1`. With one, two words that are decimal numbers (`1`,
`-.5`, `1e5`, `inf`, `Infinity`, `nan`, `-0.0`; not `1_000`, `0x1f` or `1,5`) and not both integers are the same if they
differ by no more than `absolute_tolerance` or `relative_tolerance` times the expected one, whichever is more. Two
integers are the same if they are written alike. `nan` is the same as `nan`, and an infinity as itself.

Any order. `unordered="lines"` compares the lines as a multiset (in mode `tokens`: lines as lists of words, empty ones
left out), `"tokens"` the words of each line (in mode `tokens`: of the whole text). With a tolerance, they are paired by
size, which finds a pairing of single numbers wherever there is one, and if that does not fit, in every way, as long as
there are at most 100 with 10,000 words in them (equal ones may be left out of both). So nothing wrong is ever accepted;
a right output is refused only where more lines than that, of several numbers each, are within tolerance of one another.

Time is about linear. An output is taken apart no further than into one piece more than the expected one has, so that a
flood costs no more memory than a few copies of itself.
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
    """None if they are the same by the rules above; else one line that shows the first difference."""
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
    """`most`: and if there are more, these are one more."""
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
    """The line of the word with this number; the last line for None."""
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
    """With their numbers. In mode `tokens` without the empty ones."""
    keyed = ((index, _key(line, mode, most_words)) for index, line in enumerate(io.StringIO(text)))
    return ((index, key) for index, key in keyed if key or mode != "tokens")


def _key(line: str, mode: str, most_words: int) -> str:
    return " ".join(line.split(None, most_words)) if mode == "tokens" else line.rstrip()


# Words and numbers ---------------------------------------------------------------------------------------------------


def _number(word: str) -> float | None:
    if not _NUMBER.fullmatch(word):
        return None
    number = float(word)
    # What is too large for a float is text, or all such numbers would be the same.
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
    """Where in either line the first word is that is not the same; None if all are."""
    if _same_words(actual, expected, tolerance):
        return None
    pairs = enumerate(zip(actual, expected, strict=False))
    first = next((index for index, (one, other) in pairs if not _same_word(one, other, tolerance)), None)
    return sum(map(len, actual[:first])), sum(map(len, expected[:first]))


def _by_size(line: Sequence[str]) -> list[tuple[float, str]]:
    return [_sized(word) for word in line]


def _by_number(line: Sequence[str]) -> float:
    """The same for lines of one word: bare floats are sorted much faster."""
    return _sized(line[0])[0]


def _sized(word: str) -> tuple[float, str]:
    number = _number(word)
    return (math.inf, word) if number is None else (-math.inf if math.isnan(number) else number, "")


def _unpaired(
    got: Sequence[str], wanted: Sequence[str], tolerance: Tolerance, words: Callable[[str], list[str]]
) -> tuple[int | None, int | None] | None:
    """None if the two are the same multiset; else the first of each that found no partner."""

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
    """`at`: which place of either line to show; None: their first difference."""
    first = _first_difference(got or "", wanted or "")
    places = zip((got, wanted), at or (first, first), strict=True)
    one, other = ("the end" if text is None else _shown(text, place) for text, place in places)
    return f"line {index + 1}: got {one}, expected {other}"


def _first_difference(one: str, other: str) -> int:
    """The place of the first difference of two texts, by halving: comparing slices is faster than characters."""
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


# Numbers within a tolerance, and things in any order: what comparing texts and comparing values have in common.


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
