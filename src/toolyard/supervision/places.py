"""Finds the line of code that something is at, for messages."""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

_STANDARD = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep


def suspended_at(coroutine: Any) -> str:
    """The line where a coroutine is waiting."""
    frames = list(_awaited(coroutine))
    return line_of(frames) if frames else "an unknown line"


def frames_below(frame: FrameType | None) -> list[FrameType]:
    """The frames of a running call, outermost first, without the code that runs it."""
    frames: list[FrameType] = []
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frames.insert(0, frame)
        frame = frame.f_back
    return frames


def line_of(frames: Sequence[FrameType]) -> str:
    """The innermost line outside the standard library, where everything waits at the same few lines."""
    own = [frame for frame in frames if not _is_standard(frame.f_code.co_filename)]
    frame = (own or frames)[-1]
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}" + (f": {text}" if text else "")


def stack_of(frames: Sequence[FrameType]) -> str:
    """Formatted like a traceback, outermost call first."""
    return "".join(traceback.format_list(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)))


def _is_standard(filename: str) -> bool:
    return filename.startswith("<") or (filename.startswith(_STANDARD) and "site-packages" not in filename)


def _awaited(coroutine: Any) -> Iterator[FrameType]:
    while coroutine is not None:
        frame: FrameType | None = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
