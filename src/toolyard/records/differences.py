"""The first difference between two values, short enough to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

from toolyard.messages import JSON

_SHOWN = 80
_BEFORE = 24

T = TypeVar("T")


class Absent:
    """Shown where one side has no value."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = Absent()


class JsonDifference(NamedTuple):
    path: str
    """For example `messages[3].content`; "" if the values differ as a whole."""
    was: str
    now: str


def json_difference(was: Any, now: Any) -> JsonDifference | None:
    """Where two JSON values first differ, in the order of `was`. 1, 1.0 and true are three values; NaN equals NaN."""
    stack: list[tuple[str, Any, Any]] = [("", was, now)]
    while stack:
        path, left, right = stack.pop()
        if isinstance(left, dict) and isinstance(right, dict):
            one, other = cast("JSON", left), cast("JSON", right)
            keys = [*one, *(key for key in other if key not in one)]
            stack += [(_below(path, key), one.get(key, ABSENT), other.get(key, ABSENT)) for key in reversed(keys)]
        elif isinstance(left, list) and isinstance(right, list):
            first, second = cast("list[Any]", left), cast("list[Any]", right)
            longest = max(len(first), len(second))
            stack += [(f"{path}[{at}]", _at(first, at), _at(second, at)) for at in reversed(range(longest))]
        elif not _same(cast("object", left), cast("object", right)):
            return JsonDifference(path, *_both(left, right))
    return None


def first_index(one: Sequence[T], other: Sequence[T]) -> int | None:
    """Where two sequences first differ; None if they are equal."""
    for at, left, right in zip(count(), one, other, strict=False):
        if left != right:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def text_difference(was: str, now: str) -> tuple[int, str, str] | None:
    """The index of the first difference, with an excerpt of each text around it; None if they are equal."""
    if was == now:
        return None
    at = first_index(was, now)
    assert at is not None
    return at, excerpt(was, at), excerpt(now, at)


def excerpt(text: str, at: int = 0) -> str:
    """A text around `at`, quoted."""
    start = max(0, at - _BEFORE) if len(text) > _SHOWN else 0
    end = start + _SHOWN
    return f"{'…' if start else ''}{text[start:end]!r}{'…' if end < len(text) else ''}"


def shown(value: Any) -> str:
    """The repr of any value, shortened."""
    if isinstance(value, str):
        return excerpt(value)
    said = repr(value)
    return said if len(said) <= _SHOWN else said[:_SHOWN] + "…"


def _same(left: object, right: object) -> bool:
    both_nan = left != left and right != right
    return type(left) is type(right) and (left == right or both_nan)


def _both(left: Any, right: Any) -> tuple[str, str]:
    if isinstance(left, str) and isinstance(right, str):
        found = text_difference(left, right)
        assert found is not None
        return found[1:]
    return shown(left), shown(right)


def _below(path: str, key: str) -> str:
    key = key if key.isidentifier() else repr(key)
    return f"{path}.{key}" if path else key


def _at(values: list[Any], at: int) -> Any:
    return values[at] if at < len(values) else ABSENT
