"""System calls in a row, without a line of Python between them.

Between two lines the interpreter writes to dozens of pages, and where these are shared with a fork, each is copied. It
also costs more than most calls do. So what happens for every case of a program is prepared once, as a list of steps:
each is a call with its arguments, the result that is expected of it, and which step comes next.

The list is carried out by a few instructions of machine code, shown below. There are none for other processors than
x86_64: what is done by steps there, is done by Python elsewhere.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

from . import machine_code, nursery

CODE = """
53                push   rbx
48 89 fb          mov    rbx,rdi                    ; the first step
48 8b 03          mov    rax,QWORD PTR [rbx]        ; 04: the call's number
48 8b 7b 08       mov    rdi,QWORD PTR [rbx+0x8]
48 8b 73 10       mov    rsi,QWORD PTR [rbx+0x10]
48 85 c0          test   rax,rax
78 30             js     0x44
48 8b 53 18       mov    rdx,QWORD PTR [rbx+0x18]
4c 8b 53 20       mov    r10,QWORD PTR [rbx+0x20]
4c 8b 43 28       mov    r8,QWORD PTR [rbx+0x28]
4c 8b 4b 30       mov    r9,QWORD PTR [rbx+0x30]
0f 05             syscall
48 89 43 38       mov    QWORD PTR [rbx+0x38],rax   ; 26: the result
48 3b 43 40       cmp    rax,QWORD PTR [rbx+0x40]   ; as expected?
48 8b 4b 50       mov    rcx,QWORD PTR [rbx+0x50]
48 0f 44 4b 48    cmove  rcx,QWORD PTR [rbx+0x48]
48 89 d8          mov    rax,rbx                    ; the last step is what is returned
48 89 cb          mov    rbx,rcx
48 85 c9          test   rcx,rcx
75 c2             jne    0x4
5b                pop    rbx
c3                ret
8b 06             mov    eax,DWORD PTR [rsi]        ; 44: not a call: copy four bytes
89 07             mov    DWORD PTR [rdi],eax
eb dc             jmp    0x26
"""
_WORDS = 11
"""Of a step: number, six arguments, result, expected result, the step after that, the step after any other result."""
_ARGUMENT, _RESULT, _EXPECTED, _THEN, _OTHERWISE = 1, 7, 8, 9, 10
_COPY = -1
_RW = mmap.PROT_READ | mmap.PROT_WRITE


_address = machine_code.load(CODE)
carry_out = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)(_address)
"""Takes the address of the first step, returns that of the last. Keeps the interpreter's lock, as nobody else is to run
meanwhile."""

Call = tuple[Callable[[Any], object], Any]
"""A function and its argument."""


def possible() -> bool:
    return _address != 0


class At(int):
    """As an argument: not this number, but the four bytes at this address, as they are when it is the step's turn."""


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Of memory that can be written to, and that must be kept. 0: there is none of it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0


class Steps:
    """A list of them, and memory for what their arguments point to."""

    def __init__(self, pages: int = 1, *, inherited: bool = True) -> None:
        """`inherited`: whether forks find it in their memory, with the results of the calls."""
        size = pages * mmap.PAGESIZE
        self._area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_RW)
        if not inherited:
            self._area.madvise(mmap.MADV_DONTFORK)
        self.memory = memoryview(self._area)
        self._words = self.memory.cast("q")
        """The same. Steps are at its beginning, data at its end."""
        self._start = address_of(self._area)
        self.count = 0
        self._data = size

    def data(self, content: bytes) -> int:
        """Keeps `content`; returns its address."""
        self._data -= -(-len(content) // 8) * 8
        assert self._data >= self.count * _WORDS * 8
        self.memory[self._data : self._data + len(content)] = content
        return self._start + self._data

    def view(self, address: int, size: int) -> memoryview:
        """What is there, and will be."""
        at = address - self._start
        return self.memory[at : at + size]

    def call(self, number: int, *arguments: int) -> int:
        """Add a step, after which the next one follows whatever its result. Returns its number."""
        step = self.count + sum(isinstance(argument, At) for argument in arguments)
        for index, argument in enumerate(arguments):
            if isinstance(argument, At):
                self.copy(self.address(step) + (_ARGUMENT + index) * 8, argument)
        return self._add(number, *(0 if isinstance(argument, At) else argument for argument in arguments))

    def copy(self, target: int, source: int) -> int:
        """Add a step that copies four bytes from one address to another. They are its result, too."""
        return self._add(_COPY, target, source)

    def _add(self, number: int, *arguments: int) -> int:
        at = self.count * _WORDS
        self.count += 1
        assert self.count * _WORDS * 8 <= self._data, "there is no room for more"
        following = self.address(self.count)
        for index, word in enumerate((number, *arguments, *[0] * (7 - len(arguments)), 0, following, following)):
            self._words[at + index] = word
        return self.count - 1

    def expect(self, step: int, result: int, otherwise: int | None = None) -> None:
        """Any other result leads to the step `otherwise`, or, if that is not given, ends the row."""
        self._words[step * _WORDS + _EXPECTED] = result
        self._words[step * _WORDS + _OTHERWISE] = 0 if otherwise is None else self.address(otherwise)

    def end_at(self, step: int, result: int) -> None:
        """This result ends the row."""
        self._words[step * _WORDS + _EXPECTED] = result
        self._words[step * _WORDS + _THEN] = 0

    def end(self) -> int:
        """Nothing comes after the step that was added last. Returns its number."""
        at = self.count * _WORDS
        self._words[at - _WORDS + _THEN] = self._words[at - _WORDS + _OTHERWISE] = 0
        return self.count - 1

    def argument_view(self, step: int, index: int, count: int) -> memoryview:
        """So many of them, from that one on, to be set without this object."""
        at = step * _WORDS + _ARGUMENT + index
        return self._words[at : at + count]

    def result_view(self, step: int) -> memoryview:
        """One word: what its call returned last; where it failed, the error number, negative."""
        return self._words[step * _WORDS + _RESULT :][:1]

    def set(self, step: int, index: int, *values: int) -> None:
        """Arguments, from that one on."""
        at = step * _WORDS + _ARGUMENT + index
        for value in values:
            self._words[at] = value
            at += 1

    def result(self, step: int) -> int:
        """What its call returned last; where it failed, the error number, negative."""
        return self._words[step * _WORDS + _RESULT]

    def result_of(self, step: int) -> At:
        """The same as an argument of another."""
        return At(self.address(step) + _RESULT * 8)

    def run(self, first: int = 0) -> int:
        """Returns the number of the step it ended with."""
        return self.number(carry_out(self.address(first)))

    def as_call(self, first: int = 0) -> Call:
        """For where it matters how many objects a call makes and touches. What it returns means nothing."""
        start = ctypes.c_char.from_buffer(self._area)
        with nursery.within():
            return ctypes.PYFUNCTYPE(None)(_address), ctypes.byref(start, first * _WORDS * 8)

    def address(self, step: int) -> int:
        return self._start + step * _WORDS * 8

    def number(self, address: int) -> int:
        """Of the step that is there."""
        return (address - self._start) // (_WORDS * 8)
