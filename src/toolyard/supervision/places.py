"""Which line of code something stands at, for messages."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

_UNKNOWN = "an unknown place"


def suspended_at(coroutine: Any) -> str:
    """The innermost line at which a coroutine waits."""
    last: FrameType | None = None
    for frame in _awaited(coroutine):
        last = frame
    return _UNKNOWN if last is None else line_of(last)


def line_of(frame: FrameType) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}" + (f": {text}" if text else "")


def stack_of(frame: FrameType) -> str:
    """Outermost call first, as in a traceback."""
    return "".join(traceback.format_stack(frame))


def _awaited(coroutine: Any) -> Iterator[FrameType]:
    while coroutine is not None:
        frame: FrameType | None = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
