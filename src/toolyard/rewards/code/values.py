"""Decide whether a function returned the expected value; if not, find the first difference."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from toolyard.rewards.code.comparison import Tolerance, fit, unpaired
from toolyard.rewards.code.protocol import Comparison

_TOLERANCE = 1e-9
_ATOMS = (str, int, float, bool, type(None))


class Wrapped(list[Any]):
    """An expected value that may mean itself or its only element: APPS writes both this way. See `cases`."""


def value_difference(returned: Any, expected: Any, comparison: Comparison) -> str | None:
    """Return None if a returned value is the expected one; else one line that shows the first difference.

    Values are compared as JSON: a tuple is a list, and the keys of a mapping are text (`1` is `"1"`, None is `"null"`).
    Numbers are compared by value (`3` equals `3.0`); booleans and text are not numbers. Two integers must be equal. If
    one is a float, the tolerances apply, or if there are none a relative tolerance of 1e-9, because sums in another
    order are right as well; mode `exact` allows nothing. NaN equals NaN. `ignore_case` applies to text, not to keys.
    `unordered`, in either form, allows any order of the returned list's elements, by the rules above; nested lists keep
    their order. A `Wrapped` expectation may be itself or its element. Any depth is fine.
    """
    if isinstance(expected, Wrapped):
        if value_difference(returned, list(expected), comparison) is None:
            return None
        return value_difference(returned, expected[0], comparison)
    exact = comparison.mode == "exact"
    tolerance = Tolerance(comparison.absolute_tolerance, comparison.relative_tolerance)
    tolerance = Tolerance(0, 0) if exact else tolerance or Tolerance(0, _TOLERANCE)
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
    return f"got {_short(returned[left[0]])}, which was not expected; {_short(expected[left[1]])} is missing"


def _flat(value: Any, fold: bool) -> tuple[Any, ...]:
    """Flatten a value to a tuple that can be hashed and sorted: equal values have equal tuples."""
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
    """Return what remains to be compared within the two, or the problem; neither if they are equal."""
    if isinstance(returned, list | tuple) and isinstance(expected, list | tuple):
        one, other = cast("Sequence[Any]", returned), cast("Sequence[Any]", expected)
        if len(one) != len(other):
            return None, f"got a list of {len(one)}, expected one of {len(other)}"
        pairs = enumerate(zip(one, other, strict=True))
        # For speed: most elements of long lists are equal numbers or strings.
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
        except OverflowError:  # an integer beyond all floats, so not equal
            return False
    if isinstance(returned, str) and isinstance(expected, str):
        return returned == expected or (fold and returned.casefold() == expected.casefold())
    return type(returned) is type(expected) and returned == expected


def _keyed(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    return {key_text(key): item for key, item in mapping.items()}


def key_text(key: Any) -> str:
    """Return a mapping's key as JSON writes it."""
    return {None: "null", True: "true", False: "false"}[key] if key is None or isinstance(key, bool) else str(key)


def _path(steps: Sequence[Any]) -> str:
    shown = steps if len(steps) <= 8 else [*steps[:4], None, *steps[-4:]]
    return "".join("…" if step is None else f"[{_short(step)}]" for step in shown)


class ShortRepr(reprlib.Repr):
    """Says the same about integers that Python does not write, of more than 4300 digits, in every version of it."""

    def repr_int(self, x: int, level: int) -> str:
        try:
            repr(x)  # raises also where reprlib describes such a number by its address
            return super().repr_int(x, level)
        except ValueError:
            return "a huge number"


_REPR = ShortRepr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxtuple, _REPR.maxdict, _REPR.maxstring, _REPR.maxother = 3, 6, 6, 4, 60, 60


_short = _REPR.repr
