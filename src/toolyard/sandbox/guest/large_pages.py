"""The interpreter's own code on large pages.

A forked process finds private memory mapped, but maps the code it runs anew, from the file and page by page, each time
it comes to another part of it. As private memory on large pages, all of it is there from the start, in two entries of a
table. The bytes and their addresses stay the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from .kernel import MACHINE, libc

_LARGE = 1 << 21
_MREMAP_MAYMOVE_FIXED = 3
_MADV_HUGEPAGE = 14
_FAILED = ctypes.c_void_p(-1).value


def move_interpreter() -> bool:
    """In a process with one thread. Returns whether it was done: the kernel may have no such pages to give."""
    if MACHINE != "x86_64":  # elsewhere code that was copied must be announced to the processor
        return False
    start, end = _code()
    start, end = -(-start // _LARGE) * _LARGE, end // _LARGE * _LARGE
    if end <= start:
        return False
    size = ctypes.c_size_t(end - start)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    writable = ctypes.c_int(mmap.PROT_READ | mmap.PROT_WRITE)
    private = ctypes.c_int(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = ctypes.c_size_t(end - start + _LARGE)
    area = libc.mmap(None, whole, writable, private, ctypes.c_int(-1), ctypes.c_long(0))
    if area == _FAILED:
        return False
    copy = -(-area // _LARGE) * _LARGE
    before = _large_bytes()
    libc.madvise(ctypes.c_void_p(copy), size, ctypes.c_int(_MADV_HUGEPAGE))
    ctypes.memmove(copy, start, end - start)
    executable = ctypes.c_int(mmap.PROT_READ | mmap.PROT_EXEC)
    moved = _large_bytes() - before >= end - start and libc.mprotect(ctypes.c_void_p(copy), size, executable) == 0
    if moved:
        fixed = ctypes.c_int(_MREMAP_MAYMOVE_FIXED)
        moved = libc.mremap(ctypes.c_void_p(copy), size, size, fixed, ctypes.c_void_p(start)) == start
    libc.munmap(ctypes.c_void_p(area), whole)
    return moved


def _code() -> tuple[int, int]:
    """From where to where the file with the interpreter is mapped and not written to."""
    inside = ctypes.cast(ctypes.pythonapi.PyEval_EvalCode, ctypes.c_void_p).value or 0
    parts: dict[str, list[tuple[int, int]]] = {}
    wanted = ""
    with open("/proc/self/maps") as file:
        for line in file:
            span, rights, _, _, _, *name = line.split()
            low, high = (int(part, 16) for part in span.split("-"))
            if name and "w" not in rights:
                parts.setdefault(name[0], []).append((low, high))
                wanted = name[0] if low <= inside < high else wanted
    found = parts.get(wanted, [(0, 0)])
    start = end = found[0][0]
    for low, high in found:
        if low == end:
            end = high
    return (start, end) if start <= inside < end else (0, 0)


def _large_bytes() -> int:
    """0 where the kernel does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("AnonHugePages:"))
    return 0
