"""Machine code in the source, beside what it means, and in memory."""

from __future__ import annotations

import ctypes
import mmap

from .kernel import MACHINE, libc

_RW, _RX = mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_EXEC


def listing(text: str) -> list[tuple[bytes, str]]:
    """Instruction by instruction, the code and what it says it is. In `text` each has a line: its bytes, two spaces or
    more, what they mean, and perhaps a comment."""
    lines = (line.partition(";")[0].partition("  ") for line in text.strip().splitlines())
    return [(bytes.fromhex(code), " ".join(meaning.split())) for code, _, meaning in lines]


def load(text: str) -> int:
    """Where it lies in memory; 0 where it cannot: the code is for x86_64."""
    if MACHINE != "x86_64":
        return 0
    area = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_RW)
    area.write(b"".join(code for code, _ in listing(text)))
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    keep(area)
    return 0 if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), _RX) else address


def keep(area: mmap.mmap) -> None:
    """For ever: also when the interpreter takes itself apart, it may need what is there."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(area))
