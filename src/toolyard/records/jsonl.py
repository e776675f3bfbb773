"""JSON of one line, to the bit: what all records are made of.

orjson does the work. The standard library helps out where orjson refuses (half of a surrogate pair, integers of more
than 64 bits, nesting beyond 254 levels), on the way back as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, cast

import orjson

from toolyard.errors import RecordError

_SHAPE = bytes.maketrans(b"0123456789:[- ", b"0000000000,,,,")
_LONG_INTEGER = b"," + b"0" * 19
"""A number of so many digits may have more than 64 bits. orjson would read it as a float, without a word."""


def encode(value: Any, *, sort: bool = False, nan: bool = False) -> bytes:
    """`value` as JSON on one line, without the newline. What JSON does not know becomes what comes closest: arrays of
    numpy lists, models objects, anything else its text.

    `sort`: the keys of all objects in order. `nan`: NaN and infinities as Python's json writes them, which is no JSON,
    but comes back the same from `decode`; otherwise they are null.

    Raises:
        RecordError: it contains itself, or is nested too deeply.
    """
    try:
        return _by_orjson(value, sort, nan)
    except TypeError:
        pass
    try:
        plain = _plain(value, nan)
        try:
            return _by_orjson(plain, sort, nan)  # a key may have been all that was wrong: equal values, equal bytes
        except TypeError:
            return json.dumps(plain, separators=(",", ":"), sort_keys=sort, allow_nan=nan).encode()
    except (RecursionError, ValueError) as error:
        raise RecordError(f"not to be said in JSON: {str(error)[:200]}") from None


def _by_orjson(value: Any, sort: bool, nan: bool) -> bytes:
    written = orjson.dumps(value, default=_closest, option=orjson.OPT_SORT_KEYS if sort else 0)
    # A NaN would have become a null: only then is it worth a look.
    if nan and b"null" in written and _has_nan(value):
        raise TypeError("orjson has no NaN")
    return written


def decode(line: bytes) -> Any:
    """What `encode` wrote; also what Python's json wrote.

    Raises:
        RecordError: this is no JSON, or nested too deeply.
    """
    if _LONG_INTEGER not in line.translate(_SHAPE):
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            pass  # the standard library reads a little more, and says what is wrong
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise RecordError(f"not JSON: byte {error.start} ({line[error.start]:#04x}) is not UTF-8") from None
    except RecursionError:
        raise RecordError("JSON that is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"not JSON: {str(error)[:200]}") from None


def finite(value: float | None) -> float | None:
    """`value` as a float, if it is a number that JSON knows."""
    return None if value is None or not math.isfinite(value) else float(value)


def _has_nan(value: Any) -> bool:
    """Whether a number in it is NaN or infinite. Long lists of plain numbers are passed at C's speed."""
    stack = [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, float):
            if not math.isfinite(inner):
                return True
        elif isinstance(inner, Mapping):
            stack += cast("Mapping[Any, Any]", inner).values()
        elif isinstance(inner, list | tuple):
            kinds = set(map(type, cast("list[Any]", inner)))
            if kinds <= {float, int}:
                if not all(map(math.isfinite, cast("list[float]", inner))):
                    return True
            elif not kinds <= {int, str, bool, type(None)}:
                stack += cast("list[Any]", inner)
        elif inner is not None and not isinstance(inner, str | int):
            return True  # it may hide one: the long way finds out
    return False


def _closest(value: object) -> Any:
    """One level of what JSON does not know."""
    kind = type(value).__name__
    try:
        if isinstance(value, Mapping):
            return dict(cast("Mapping[Any, Any]", value))
        if isinstance(value, AbstractSet):
            return sorted(cast("AbstractSet[Any]", value), key=str)
        if isinstance(value, bytes | bytearray):
            return value.decode("utf-8", "backslashreplace")
        if isinstance(value, float):  # of a class of its own, numpy.float64 for one
            return float(value)
        for name in ("tolist", "model_dump"):  # numpy and torch; pydantic
            if callable(method := getattr(value, name, None)):
                return method()
        if isinstance(value, tuple):  # of a class of its own
            return list(cast("tuple[Any, ...]", value))
        return str(value)
    except Exception:  # somebody's object in somebody's metrics must not cost the trajectory
        return f"<{kind}>"


def _plain(value: Any, nan: bool) -> Any:
    """The same made of nothing but JSON's types, as orjson would have seen it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, nan)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if nan or math.isfinite(value) else None
    if isinstance(value, dict):
        return {_key(key): _plain(inner, nan) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, nan) for inner in cast("list[Any]", value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), nan) for field in dataclasses.fields(value)}
    if callable(method := getattr(value, "isoformat", None)):
        return method()
    return _plain(_closest(value), nan)


def _key(key: Any) -> str:
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, str):
        return str(key)
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else str(key)
