"""Single-line JSON that round-trips exactly: the basis of all records.

orjson does the work. The standard library takes over where orjson fails (lone surrogates, integers of more than 64
bits, nesting beyond 254 levels), for reading as well as writing.
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
"""A number with this many digits may exceed 64 bits; orjson would silently read it as a float."""


def encode(value: Any, *, sort: bool = False, nan: bool = False) -> bytes:
    """Encode `value` as JSON on one line, without a newline. Types unknown to JSON become the closest match: numpy
    arrays become lists, models objects, anything else its string.

    `sort`: sort the keys of all objects. `nan`: write NaN and infinities as Python's json does, which is not valid JSON
    but is read back by `decode`; otherwise they become null.

    Raises:
        RecordError: the value contains itself, or is nested too deeply.
    """
    try:
        return _by_orjson(value, sort, nan)
    except TypeError:
        pass
    try:
        plain = _plain(value, nan)
        try:
            return _by_orjson(plain, sort, nan)  # try again, as only a key may have failed: equal values, equal bytes
        except TypeError:
            return json.dumps(plain, separators=(",", ":"), sort_keys=sort, allow_nan=nan).encode()
    except (RecursionError, ValueError) as error:
        raise RecordError(f"cannot be written as JSON: {str(error)[:200]}") from None


def _by_orjson(value: Any, sort: bool, nan: bool) -> bytes:
    written = orjson.dumps(value, default=_closest, option=orjson.OPT_SORT_KEYS if sort else 0)
    # orjson writes NaN as null, so search for one only if there is a null.
    if nan and b"null" in written and _has_nan(value):
        raise TypeError("orjson has no NaN")
    return written


def decode(line: bytes) -> Any:
    """Decode a line written by `encode` or by Python's json.

    Raises:
        RecordError: it is not JSON, or nested too deeply.
    """
    if _LONG_INTEGER not in line.translate(_SHAPE):
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:
            pass  # the standard library accepts a little more, and has better messages
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise RecordError(f"not JSON: byte {error.start} ({line[error.start]:#04x}) is not UTF-8") from None
    except RecursionError:
        raise RecordError("JSON is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"not JSON: {str(error)[:200]}") from None


def finite(value: float | None) -> float | None:
    """`value` as a float if it is finite, otherwise None."""
    return None if value is None or not math.isfinite(value) else float(value)


def duration(value: Any) -> float:
    """`value` as seconds, or 0 if it is not a positive number: a line may contain anything."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    try:
        return float(value) if math.isfinite(value) and value > 0 else 0.0
    except OverflowError:  # an integer too large for a float
        return 0.0


def _has_nan(value: Any) -> bool:
    """Whether it contains NaN or an infinity. Long lists of plain numbers are checked at C speed."""
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
            return True  # it may contain one; the slow path decides
    return False


def _closest(value: object) -> Any:
    """Convert one level of a type that JSON does not have."""
    kind = type(value).__name__
    try:
        if isinstance(value, Mapping):
            return dict(cast("Mapping[Any, Any]", value))
        if isinstance(value, AbstractSet):
            return sorted(cast("AbstractSet[Any]", value), key=str)
        if isinstance(value, bytes | bytearray):
            return value.decode("utf-8", "backslashreplace")
        if isinstance(value, float):  # a subclass, such as numpy.float64
            return float(value)
        for name in ("tolist", "model_dump"):  # numpy and torch; pydantic
            if callable(method := getattr(value, name, None)):
                return method()
        if isinstance(value, tuple):  # a subclass
            return list(cast("tuple[Any, ...]", value))
        return str(value)
    except Exception:  # an odd object in a user's metrics must not cost the trajectory
        return f"<{kind}>"


def _plain(value: Any, nan: bool) -> Any:
    """Convert to JSON's types only, the way orjson would."""
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
