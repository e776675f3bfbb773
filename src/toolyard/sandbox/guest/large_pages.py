"""The interpreter's memory in one piece, on large pages.

What a fork costs depends on how the memory of a process lies: on the number of mappings, and on the number of pages in
them. An interpreter has about a hundred: each library comes in five, with the interpreter's own objects in between.
Besides, a forked process does not find the code of the interpreter and its libraries mapped, but maps it anew, from the
file and page by page, each time it comes to another part of it.

So all that lies side by side is copied into one private mapping, which then takes its place. The bytes and their
addresses stay the same. That code can then be written to means little: programs may run what code they like, and in the
zygote and its workers no foreign code runs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal

from . import steps
from .kernel import libc

_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"
_LARGE = 1 << 21
_LARGEST_FILE = 8 << 20
"""Bytes. Of a library larger than that little is used, and what is not used need not be copied."""
_LARGEST_GAP = 1 << 20
"""Bytes between two mappings that are filled. Less than what is asked for meanwhile, or it would be found there."""
_ALL = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
_PRIVATE, _FIXED_NOREPLACE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x100000
_MADV_HUGEPAGE, _MADV_COLLAPSE, _MREMAP_MAYMOVE_FIXED = 14, 25, 3
_MREMAP, _PROCESS_VM_WRITEV = 25, 311
_FAILED = ctypes.c_void_p(-1).value

Span = tuple[int, int]
"""First address, and the one after the last."""
_gathered: list[Span] = []


def gather() -> None:
    """In a process with one thread. Where it is not known how, or the kernel refuses, all stays as it was."""
    if not steps.possible() or not _are_given():
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # handlers write to memory
    move = _Move()  # makes a mapping of its own, which must not end up in a gap,
    _moved_by.append(move)  # nor leave one behind
    _gathered.clear()
    for piece, gaps in _pieces():
        move(piece, gaps)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def collapse() -> None:
    """In a fork, which has this memory in common with others and has written to some of it: have all of it on large
    pages again, which are its own. Kernels before 6.1 do not know how, and it stays as it is."""
    for low, high in _gathered:
        for page in range(-(-low // _LARGE) * _LARGE, high - _LARGE + 1, _LARGE):
            libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_LARGE), _MADV_COLLAPSE)


def size() -> int:
    """Bytes that have been moved, which are as many as `collapse` takes."""
    return sum(high - low for low, high in _gathered)


def _are_given() -> bool:
    """Whether who asks for large pages gets them. On small ones, to have moved would cost more than it saves."""
    try:
        with open(_SETTING) as file:
            return "[never]" not in file.read()
    except OSError:
        return False


def _pieces() -> list[tuple[Span, list[Span]]]:
    """Where mappings that can be moved lie together, and the gaps there that are to be filled."""
    found: list[tuple[Span, list[Span]]] = []
    before, together = 0, False
    for low, high, movable in _mappings():
        if movable and together and low - before < _LARGEST_GAP:
            (start, _), gaps = found[-1]
            found[-1] = (start, high), [*gaps, (before, low)]
        elif movable:
            # With what is free down to where a large page begins.
            found.append(((low, high), [(max(low // _LARGE * _LARGE, before), low)]))
        before, together = high, movable
    whole = [(gaps[0][0], end) if end - start > _LARGE else (start, end) for (start, end), gaps in found]
    return [
        (piece, [gap for gap in gaps if piece[0] <= gap[0] < gap[1]])
        for piece, (_, gaps) in zip(whole, found, strict=True)
    ]


def _mappings() -> list[tuple[int, int, bool]]:
    """From where to where, and whether it can be moved: it is private, can be read, and has no special meaning."""
    sizes: dict[str, int] = {}
    found: list[tuple[int, int, str, str]] = []
    with open("/proc/self/maps") as file:
        for line in file:
            span, rights, _, _, _, *names = line.split(maxsplit=5)
            low, high = (int(address, 16) for address in span.split("-"))
            name = names[0] if names else ""
            sizes[name] = sizes.get(name, 0) + high - low if name else 0
            found.append((low, high, rights, name))
    return [
        (low, high, rights[0] == "r" and rights[3] == "p" and name[:1] != "[" and sizes[name] <= _LARGEST_FILE)
        for low, high, rights, name in found
    ]


class _Move:
    """Puts a copy in the place of a piece. Nothing may happen in between that writes to it: no line of Python."""

    def __init__(self) -> None:
        row = self._row = steps.Steps()
        here, there = row.data(bytes(16)), row.data(bytes(16))
        self._here, self._there = (row.view(place, 16).cast("Q") for place in (here, there))
        self._copying = row.call(_PROCESS_VM_WRITEV, os.getpid(), here, 1, there, 1, 0)
        self._moving = row.call(_MREMAP, 0, 0, 0, _MREMAP_MAYMOVE_FIXED, 0)
        row.end()

    def __call__(self, piece: Span, gaps: list[Span]) -> None:
        start, size = piece[0], piece[1] - piece[0]
        if any(_map(low, high - low, _FIXED_NOREPLACE) != low for low, high in gaps):
            return
        area = _map(0, size + 2 * _LARGE)
        if area == _FAILED:
            return
        copy = area + (start - area) % _LARGE
        libc.madvise(ctypes.c_void_p(copy), ctypes.c_size_t(size), _MADV_HUGEPAGE)
        self._here[0], self._here[1], self._there[0], self._there[1] = start, size, copy, size
        self._row.expect(self._copying, size)
        self._row.set(self._moving, 0, copy, size, size)
        self._row.set(self._moving, 4, start)
        moved = self._row.run() == self._moving and self._row.result(self._moving) == start
        _unmap(area, copy - area)
        if moved:
            _gathered.append(piece)
        else:
            _unmap(copy, size)
        _unmap(copy + size, area + 2 * _LARGE - copy)


_moved_by: list[_Move] = []


def _map(address: int, size: int, flags: int = 0) -> int:
    libc.mmap.restype = ctypes.c_void_p
    kind = ctypes.c_int(_PRIVATE | flags)
    return libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(size), _ALL, kind, ctypes.c_int(-1), ctypes.c_long(0))


def _unmap(address: int, size: int) -> None:
    if size:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
