"""When the output of a program, or what a function returned, is the expected one; and if not, where it first differs.

Text (`difference`). Line ends `\\n`, `\\r\\n` and `\\r` are the same. White space (what `str.isspace` says) at the ends
of lines, empty lines at the end of the text and a missing last line end never count. In mode `lines` everything else
does: white space at the beginning of a line and within it, empty lines before others. In mode `tokens` only the words
between white space count. In mode `exact` every character counts, and no other setting does.

Numbers in text. Without a tolerance they are text: `1.0` is not `1`. With one, two words that are decimal numbers (`1`,
`-.5`, `1e5`, `inf`, `Infinity`, `nan`, `-0.0`; not `1_000`, `0x1f` or `1,5`) and not both integers are the same if they
differ by no more than `absolute_tolerance` or `relative_tolerance` times the expected one, whichever is more. Two
integers are the same if they are written alike. `nan` is the same as `nan`, and an infinity as itself.

Any order. `unordered="lines"` compares the lines as a multiset (in mode `tokens`: lines as lists of words, empty ones
left out), `"tokens"` the words of each line (in mode `tokens`: of the whole text). With a tolerance, they are paired by
size, which finds a pairing of single numbers wherever there is one, and if that does not fit, in every way, as long as
there are at most 100 with 10,000 words in them (equal ones may be left out of both). So nothing wrong is ever accepted;
a right output is refused only where more lines than that, of several numbers each, are within tolerance of one another.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from .code_matching import Tolerance, fit, unpaired
from .code_protocol import Comparison

_NUMBER = re.compile(
    r"[-+]?+(?:(?:[0-9]++\.?+[0-9]*+|\.[0-9]++)(?:e[-+]?+[0-9]++)?+|inf(?:inity)?+|nan)", re.IGNORECASE
)
_INTEGER = re.compile(r"[-+]?+[0-9]++")
_SPACES = re.compile(r"(\s+)")
_VALUE_TOLERANCE = 1e-9
_SHOWN_BEFORE, _SHOWN = 15, 60
_ATOMS = (str, int, float, bool, type(None))


class Wrapped(list[Any]):
    """An expected value that may stand for itself, or for its only element: APPS writes both so. See `code_cases`."""


# Text ----------------------------------------------------------------------------------------------------------------


def difference(actual: str, expected: str, comparison: Comparison) -> str | None:
    """None if they are the same by the rules above; else one line that shows the first difference."""
    if actual == expected:
        return None
    if comparison.mode == "exact":
        return _exact_difference(actual, expected)
    shown = _tidied(actual), _tidied(expected)
    actual, expected = (text.casefold() for text in shown) if comparison.ignore_case else shown
    if actual == expected:
        return None
    tolerance = Tolerance(comparison.absolute_tolerance, comparison.relative_tolerance)
    if comparison.unordered == "lines":
        return _unordered_lines(actual, expected, shown, comparison.mode, tolerance)
    if comparison.mode == "tokens":
        return _words_difference(actual, expected, shown, comparison.unordered == "tokens", tolerance)
    got, wanted = _lines(actual), _lines(expected)
    for index, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one == other or _same_word(one.rstrip(), other.rstrip(), tolerance):
            continue
        if comparison.unordered == "tokens":
            if _unpaired(one.split(), other.split(), tolerance, str.split) is None:
                continue
            at = 0, 0
        elif tolerance:
            at = _first_other_word(_SPACES.split(one.rstrip()), _SPACES.split(other.rstrip()), tolerance)
            if at is None:
                continue
        else:
            at = None
        return _at_line(index, *(_lines(text)[index].rstrip() for text in shown), at=at)
    return _length_difference(shown) if len(got) != len(wanted) else None


def _tidied(text: str) -> str:
    return (text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text).rstrip()


def _lines(text: str) -> list[str]:
    return text.split("\n") if text else []


def _exact_difference(actual: str, expected: str) -> str:
    at = _first_difference(actual, expected)
    line_start = actual.rfind("\n", 0, at) + 1
    where = f"line {actual.count(chr(10), 0, at) + 1}, character {at - line_start + 1}"
    got, wanted = ("the end" if at == len(text) else _shown(text, at, line_start) for text in (actual, expected))
    return f"{where}: got {got}, expected {wanted}"


def _length_difference(texts: tuple[str, str]) -> str:
    got, wanted = map(_lines, texts)
    index = min(len(got), len(wanted))
    return _at_line(index, *(lines[index].rstrip() if index < len(lines) else None for lines in (got, wanted)))


def _words_difference(
    actual: str, expected: str, shown: tuple[str, str], unordered: bool, tolerance: Tolerance
) -> str | None:
    got, wanted = actual.split(), expected.split()
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
    words = [None if index is None else text.split()[index] for text, index in zip(shown, left, strict=True)]
    return _at_line(_line_of_word(shown[0], left[0]), *words)


def _line_of_word(text: str, index: int | None) -> int:
    """The line of the word with this number; the last line for None."""
    seen = 0
    lines = _lines(text)
    for number, line in enumerate(lines):
        seen += len(line.split())
        if index is not None and seen > index:
            return number
    return max(0, len(lines) - 1)


def _unordered_lines(actual: str, expected: str, shown: tuple[str, str], mode: str, tolerance: Tolerance) -> str | None:
    def key(line: str) -> str:
        return line.rstrip() if mode == "lines" else " ".join(line.split())

    def kept(text: str) -> list[tuple[int, str]]:
        keyed = enumerate(map(key, _lines(text)))
        return [(index, line) for index, line in keyed if line or mode == "lines"]

    got, wanted = kept(actual), kept(expected)
    left = _unpaired([line for _, line in got], [line for _, line in wanted], tolerance, _SPACES.split)
    if left is None:
        return None
    lines = [None if index is None else side[index][0] for side, index in zip((got, wanted), left, strict=True)]
    texts = [None if line is None else key(_lines(text)[line]) for text, line in zip(shown, lines, strict=True)]
    return _at_line(len(_lines(actual)) if lines[0] is None else lines[0], *texts, at=(0, 0))


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


# Values --------------------------------------------------------------------------------------------------------------


def value_difference(returned: Any, expected: Any, comparison: Comparison) -> str | None:
    """None if a returned value is the expected one; else one line that shows the first difference.

    In JSON's terms: a tuple is a list, the keys of a mapping are text (`1` is `"1"`, None is `"null"`). Numbers are the
    same if their values are (`3` and `3.0`), true and false are no numbers, and text is no number either. Two integers
    must be equal. Where one is a float, the tolerances hold, and if there are none a relative one of 1e-9, because sums
    in another order are right as well; mode `exact` allows nothing. NaN is the same as NaN. `ignore_case` is for text,
    not for keys. `unordered`, in either form, lets the elements of the returned list come in any order, by the rules
    above; the lists within it keep theirs. A `Wrapped` expectation may be itself or its element. Any depth is fine.
    """
    if isinstance(expected, Wrapped):
        if value_difference(returned, list(expected), comparison) is None:
            return None
        return value_difference(returned, expected[0], comparison)
    exact = comparison.mode == "exact"
    tolerance = Tolerance(comparison.absolute_tolerance, comparison.relative_tolerance)
    tolerance = Tolerance(0, 0) if exact else tolerance or Tolerance(0, _VALUE_TOLERANCE)
    fold = comparison.ignore_case and not exact
    lists = isinstance(returned, list | tuple) and isinstance(expected, list | tuple)
    if lists and comparison.unordered != "no" and not exact:
        one, other = cast("Sequence[Any]", returned), cast("Sequence[Any]", expected)
        return _unordered_values(one, other, tolerance, fold)
    return _walk(returned, expected, tolerance, fold)


def _unordered_values(returned: Sequence[Any], expected: Sequence[Any], tolerance: Tolerance, fold: bool) -> str | None:
    got, wanted = ([_flat(item, fold) for item in side] for side in (returned, expected))

    def fits(some: Sequence[int], others: Sequence[int]) -> bool:
        return fit(
            [(got[index], returned[index]) for index in some],
            [(wanted[index], expected[index]) for index in others],
            order=lambda item: item[0],
            size=lambda item: len(item[0]),
            same=lambda one, other: _walk(one[1], other[1], tolerance, fold) is None,
        )

    left = unpaired(got, wanted, fits)
    if left is None:
        return None
    if left[0] is None or left[1] is None or len(returned) != len(expected):
        return f"got a list of {len(returned)}, expected one of {len(expected)}, in any order"
    return f"got {_short(returned[left[0]])}, which is not expected; {_short(expected[left[1]])} is missing"


def _flat(value: Any, fold: bool) -> tuple[Any, ...]:
    """A value as a flat tuple that can be hashed and sorted: equal ones have equal tuples."""
    atoms: list[Any] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if item is None or isinstance(item, bool):
            atoms.append((0, item is not None, bool(item)))
        elif isinstance(item, int | float):
            atoms.append((1, 0, item) if item == item else (1, 1, 0))
        elif isinstance(item, str):
            atoms.append((2, item.casefold() if fold else item))
        elif isinstance(item, list | tuple):
            items = cast("Sequence[Any]", item)
            atoms.append((3, len(items)))
            waiting.extend(items)
        elif isinstance(item, Mapping):
            keyed = _keyed(cast("Mapping[Any, Any]", item))
            atoms.append((4, tuple(sorted(keyed))))
            waiting.extend(keyed[key] for key in sorted(keyed))
        else:
            atoms.append((5, repr(item)))
    return tuple(atoms)


def _walk(returned: Any, expected: Any, tolerance: Tolerance, fold: bool) -> str | None:
    path: list[Any] = []
    levels: list[Iterator[tuple[Any, Any, Any]]] = [iter([(None, returned, expected)])]
    while levels:
        step, one, other = next(levels[-1], (levels, None, None))
        if step is levels:
            levels.pop()
            del path[-1:]
            continue
        inner, problem = _compare(one, other, tolerance, fold)
        if problem is not None:
            where = _path([*path[1:], step]) if path else ""
            return f"at {where}: {problem}" if where else problem
        if inner is not None:
            levels.append(inner)
            path.append(step)
    return None


def _compare(
    returned: Any, expected: Any, tolerance: Tolerance, fold: bool
) -> tuple[Iterator[tuple[Any, Any, Any]] | None, str | None]:
    """What remains to be compared within the two, or what is wrong with them; nothing of both if they are the same."""
    if isinstance(returned, list | tuple) and isinstance(expected, list | tuple):
        one, other = cast("Sequence[Any]", returned), cast("Sequence[Any]", expected)
        if len(one) != len(other):
            return None, f"got a list of {len(one)}, expected one of {len(other)}"
        pairs = enumerate(zip(one, other, strict=True))
        # For speed: most elements of long lists are equal numbers or texts.
        return ((i, x, y) for i, (x, y) in pairs if type(x) is not type(y) or type(x) not in _ATOMS or x != y), None
    if isinstance(returned, Mapping) and isinstance(expected, Mapping):
        got, wanted = _keyed(cast("Mapping[Any, Any]", returned)), _keyed(cast("Mapping[Any, Any]", expected))
        for key in wanted:
            if key not in got:
                return None, f"key {_short(key)} is missing"
        for key in got:
            if key not in wanted:
                return None, f"key {_short(key)} is not expected"
        return ((key, got[key], wanted[key]) for key in wanted), None
    same = _same_atom(returned, expected, tolerance, fold)
    return None, None if same else f"got {_short(returned)}, expected {_short(expected)}"


def _same_atom(returned: Any, expected: Any, tolerance: Tolerance, fold: bool) -> bool:
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, int | float) and isinstance(expected, int | float):
        if returned == expected:
            return True
        if isinstance(returned, int) and isinstance(expected, int):
            return False
        try:
            return tolerance.allows(float(returned), float(expected))
        except OverflowError:  # an integer beyond all floats, and not equal
            return False
    if isinstance(returned, str) and isinstance(expected, str):
        return returned == expected or (fold and returned.casefold() == expected.casefold())
    return type(returned) is type(expected) and returned == expected


def _keyed(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    return {key_text(key): item for key, item in mapping.items()}


def key_text(key: Any) -> str:
    """A mapping's key as JSON writes it."""
    return {None: "null", True: "true", False: "false"}[key] if key is None or isinstance(key, bool) else str(key)


# Showing -------------------------------------------------------------------------------------------------------------


def _at_line(index: int, got: str | None, wanted: str | None, *, at: tuple[int, int] | None = None) -> str:
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


def _path(steps: Sequence[Any]) -> str:
    shown = steps if len(steps) <= 8 else [*steps[:4], None, *steps[-4:]]
    return "".join("…" if step is None else f"[{_short(step)}]" for step in shown)


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxdict, _REPR.maxstring, _REPR.maxother = 3, 6, 6, 4, 60, 60


def _short(value: Any) -> str:
    try:
        return _REPR.repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits
        return "a huge number"
