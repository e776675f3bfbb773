"""Bindings for the C library beside this file (see `guest.c`). Without it, batches run as ordinary runs, one by one."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_POINTER, _SIZE, _LONG, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32
NOT_BEGUN, RUNNING, ENDED, ALONE, CLEAN = range(5)
"""How far `run_case` got; see guest.h."""


class Siblings(ctypes.Structure):
    """`struct toolyard_siblings`."""

    _fields_ = (
        ("signals", ctypes.c_uint64), ("processors_size", _SIZE), ("processors", _POINTER), ("control", _INT),
        ("closes_control", _INT),
    )  # fmt: skip


class Stream(ctypes.Structure):
    """`struct toolyard_stream`."""

    _fields_ = (
        ("memory", _POINTER), ("limit", _SIZE), ("size", _SIZE), ("seen", _SIZE), ("handle", _INT), ("unused", _INT),
    )  # fmt: skip


class Case(ctypes.Structure):
    """`struct toolyard_case`."""

    _fields_ = (
        ("main", ctypes.c_char_p), ("work", ctypes.c_char_p), ("text", _POINTER), ("text_size", _SIZE),
        ("input", _POINTER), ("input_size", _SIZE), ("soon_nanoseconds", _LONG), ("free_inodes", _LONG),
        ("told", ctypes.c_char_p), ("told_size", _SIZE), ("control", _INT), ("children", _INT), ("parent", _INT),
        ("parent_handle", _INT), ("events", _INT), ("pid", _INT), ("status", _INT), ("unused", _INT),
        ("cpu_microseconds", _LONG), ("peak_kibibytes", _LONG), ("out", Stream), ("err", Stream),
    )  # fmt: skip


class Native:
    """The library's functions. They keep the GIL: nothing else may run meanwhile."""

    def __init__(self, path: str) -> None:
        library = ctypes.PyDLL(path)
        sizes = (ctypes.c_uint64 * 2).in_dll(library, "toolyard_sizes")
        if tuple(sizes) != (ctypes.sizeof(Siblings), ctypes.sizeof(Case)):
            raise OSError(f"{path} was built from other sources")
        self.can_fork_siblings: Any = library.toolyard_can_fork_siblings
        self.fork_siblings: Any = library.toolyard_fork_siblings
        self.fork_siblings.restype = None
        self.run_case: Any = library.toolyard_run_case


LIBRARY = os.path.join(os.path.dirname(__file__), "guest.so")


def built_library() -> str:
    """The path of the library; empty if it was not built, or is disabled (TOOLYARD_NATIVE=0)."""
    return LIBRARY if os.environ.get("TOOLYARD_NATIVE") != "0" and os.path.exists(LIBRARY) else ""


def why_not() -> str:
    """Why the library cannot be used here; empty if it can."""
    if os.environ.get("TOOLYARD_NATIVE") == "0":
        return "disabled by TOOLYARD_NATIVE=0"
    if not os.path.exists(LIBRARY):
        return "not built"
    try:
        Native(LIBRARY)
    except OSError as error:
        return str(error)
    return ""


def address_of(memory: memoryview) -> int:
    """The address of writable memory, which the caller must keep alive. 0 if it is empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0
