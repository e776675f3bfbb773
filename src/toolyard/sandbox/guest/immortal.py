"""Makes the zygote's objects immortal, so that children that read them do not copy their pages.

CPython counts references inside the object. A child that merely looks at a module writes to the object's page, and the
kernel then copies 4 KiB. Since 3.12, an object whose count has a certain bit pattern is immortal (PEP 683), and its
count is never written again. Children are short-lived and exit with `_exit`, so never freeing anything costs nothing.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from types import CodeType
from typing import Any

_IMMORTAL = {(3, 12): 0xFFFFFFFF, (3, 13): 0xFFFFFFFF}
"""Count of an immortal object, per version it was tested with. Other versions keep counting: slower but correct."""


def immortalize() -> int:
    """Make all current objects immortal; returns how many. Does nothing on versions it is not known to work on."""
    count = _IMMORTAL.get(sys.version_info[:2])
    if count is None or sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return 0
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return 0
    gc.unfreeze()  # get_objects() does not list frozen ones
    gc.collect()
    seen: set[int] = set()
    level: list[Any] = gc.get_objects()
    while level:
        following: list[Any] = []
        for item in level:
            if id(item) not in seen:
                seen.add(id(item))
                following += _parts(item)
        level = following
    changed = 0
    for address in seen - {id(seen), id(level)}:
        reference_count = ctypes.c_uint32.from_address(address)
        if reference_count.value < 0x3FFFFFFF:
            reference_count.value = count
            changed += 1
    return changed


def _parts(item: Any) -> list[Any]:
    if isinstance(item, CodeType):  # the collector does not follow code objects
        return [
            item.co_consts, item.co_names, item.co_filename, item.co_name, item.co_qualname, item.co_linetable,
            item.co_exceptiontable,
        ]  # fmt: skip
    return gc.get_referents(item)
