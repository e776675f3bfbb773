"""Work that a worker does once so that its forks need not repeat it.

A forked process copies a page when it first writes to it. The interpreter writes when it caches where it found an
attribute, when it specializes code, and when it puts a new object into a gap between old ones.
"""

from __future__ import annotations

import codecs
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

_OFTEN = 12
"""How often code has to run until the interpreter has specialized it, and a little more."""
_PROGRAM = b"""
import sys
from collections import Counter, defaultdict, deque

def solve(data):
    numbers = [int(word) for word in data]
    numbers.sort()
    pairs = dict(zip(numbers, data))
    counts = Counter(data)
    found = defaultdict(list)
    queue = deque(numbers)
    while queue:
        found[queue.popleft() % 2].append(1)
    seen = set(numbers) | {0}
    best = max(len(seen), min(numbers), sum(numbers), abs(-1))
    for key, value in sorted(pairs.items()):
        best += key if value in counts else 0
    for place, number in enumerate(reversed(numbers)):
        best += place * number
    return str(best) + " ".join(map(str, numbers)) + f"{best:.3f}" + "a b".strip().replace("a", "b")[::-1]

data = stdin.read().split()
# An abstract class caches for every class it is asked about whether it is a subclass, and so checks only once.
for kind in (
    data, tuple(data), "ab", b"ab", range(2), {}, {}.keys(), {}.values(), {}.items(), set(), frozenset(), deque(),
    iter(data), reversed(data), iter("ab"), iter({}), (word for word in data), map(str, data), zip(data),
    filter(None, data), enumerate(data), Counter(), defaultdict(int),
):
    Counter(kind)
for line in "1 2\\n3".splitlines():
    a, *b = map(int, line.split())
print(solve(data), file=stdout)
print(len(data), "x", sep=" ", end="\\n", file=stdout)
stdout.write("\\n".join(data))
stdout.flush()
"""
_POOL, _FIRST, _BLOCK, _LARGEST = 1 << 14, 48, 16, 512
"""CPython's small objects lie in pools of this size, starting at this offset, in blocks of a multiple of this size, up
to this size."""
_POOLED = {(3, 11), (3, 12), (3, 13)}
"""Versions for which this is true."""
_MOST_GAPS = 1 << 20
"""Bytes, per block size."""
_MUCH = 100_000
"""Bytes; more than any gap, and less than what the C library asks the kernel for."""
_kept: list[object] = []
_malloc, _free = ctypes.PyDLL(None).malloc, ctypes.PyDLL(None).free
_malloc.restype, _free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]


def rehearse(compiled: Callable[[bytes], Any]) -> None:
    """Run what a typical program runs. `compiled` compiles as for programs."""
    for _ in range(_OFTEN):
        read, write = os.pipe()
        os.write(write, b"1 2 3\n")
        os.close(write)
        with open(read, encoding="utf-8", errors="surrogateescape") as stdin, open(os.devnull, "w") as stdout:
            exec(compiled(_PROGRAM), {"__name__": "__main__", "stdin": stdin, "stdout": stdout})  # noqa: S102


class AttributeWarmer:
    """Looks up the attributes that most programs look up. The interpreter caches where it found an attribute, but only
    until another takes the same cache entry; a case would look it up again and write to a few pages."""

    def __init__(self) -> None:
        self._decoder: Any = codecs.getincrementaldecoder("utf-8")()

    def __call__(self) -> object:
        decoder: Any = self._decoder
        stdin: Any = sys.stdin
        stdout: Any = sys.stdout
        some: list[Any] = []
        return (
            decoder.decode, decoder._buffer_decode, stdin.read, stdin.buffer.read, stdin.buffer.raw.readall,
            stdout.write, stdout.buffer.write, stdout.flush, stdout.buffer.flush, "".split, "".join, some.append,
        )  # fmt: skip


def fill_gaps() -> None:
    """Make new objects lie side by side, on few pages, instead of in gaps between old objects."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in _POOLED:
        return
    for size in range(_BLOCK, _LARGEST + 1, _BLOCK):
        for number in range(_MOST_GAPS // size):
            filler = _filler(size, number)
            _kept.append(filler)
            if id(filler) % _POOL == _FIRST:  # a new pool: all before it are full
                break


def sort_gaps() -> None:
    """The same for large objects, whose gaps the C library sorts, page by page, on the next large allocation."""
    _free(_malloc(_MUCH))


def _filler(size: int, number: int) -> object:
    """An object that takes a block of that size. Bytes objects are larger than the two smallest sizes."""
    if size == _BLOCK:
        return object()
    return (1 << 40) + number if size == 2 * _BLOCK else bytes(size - b"".__sizeof__())
