"""New objects side by side.

The interpreter keeps the objects of each size in places of their own, four pages each. So a process has its first dozen
objects on two dozen pages, and in a fork each of these is copied. Where the nursery is open, new objects of all sizes
lie one after the other, until it is full; those that are given back are used again for their size. It is an allocator
in front of the interpreter's own, which gets what does not fit.

A few instructions of machine code do it. They know by its address whether an object is theirs, and by a table how large
it is: one byte for every 16 bytes of the nursery, which says how many times 16 begin there, less one.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from . import machine_code

P = ParamSpec("P")
T = TypeVar("T")
CODE = """
48 8d 56 ff               lea    rdx,[rsi-0x1]                  ; 0: malloc(here, size)
48 81 fa 00 04 00 00      cmp    rdx,0x400                      ; too large, or nothing at all?
73 3c                     jae    0x49
c1 ea 04                  shr    edx,0x4                        ; which size
48 8b 44 d7 40            mov    rax,QWORD PTR [rdi+rdx*8+0x40] ; one of that size that was given back
48 85 c0                  test   rax,rax
74 09                     je     0x23
48 8b 08                  mov    rcx,QWORD PTR [rax]
48 89 4c d7 40            mov    QWORD PTR [rdi+rdx*8+0x40],rcx
c3                        ret
48 8b 07                  mov    rax,QWORD PTR [rdi]            ; 23: new
8d 4a 01                  lea    ecx,[rdx+0x1]
c1 e1 04                  shl    ecx,0x4
48 01 c1                  add    rcx,rax
48 3b 4f 08               cmp    rcx,QWORD PTR [rdi+0x8]        ; does it fit?
77 14                     ja     0x49
48 89 0f                  mov    QWORD PTR [rdi],rcx
48 89 c1                  mov    rcx,rax
48 29 f9                  sub    rcx,rdi
c1 e9 04                  shr    ecx,0x4
88 94 0f 40 01 00 00      mov    BYTE PTR [rdi+rcx*1+0x140],dl  ; note its size
c3                        ret
48 8b 47 18               mov    rax,QWORD PTR [rdi+0x18]       ; 49: the interpreter's own
48 8b 7f 10               mov    rdi,QWORD PTR [rdi+0x10]
ff e0                     jmp    rax
48 89 f0                  mov    rax,rsi                        ; 53: calloc(here, count, size)
48 0f af c2               imul   rax,rdx
48 8d 48 ff               lea    rcx,[rax-0x1]
48 81 f9 00 04 00 00      cmp    rcx,0x400
73 22                     jae    0x89
53                        push   rbx
48 89 c3                  mov    rbx,rax
48 89 c6                  mov    rsi,rax
e8 8d ff ff ff            call   0x0
48 85 c0                  test   rax,rax
74 0f                     je     0x87
48 89 c7                  mov    rdi,rax
48 89 c2                  mov    rdx,rax
89 d9                     mov    ecx,ebx
31 c0                     xor    eax,eax
f3 aa                     rep stos BYTE PTR es:[rdi],al
48 89 d0                  mov    rax,rdx
5b                        pop    rbx
c3                        ret
48 8b 47 20               mov    rax,QWORD PTR [rdi+0x20]       ; 89: the interpreter's own
48 8b 7f 10               mov    rdi,QWORD PTR [rdi+0x10]
ff e0                     jmp    rax
48 85 f6                  test   rsi,rsi                        ; 93: realloc(here, block, size)
74 5a                     je     0xf2
48 89 f0                  mov    rax,rsi
48 29 f8                  sub    rax,rdi
48 3d 00 e0 00 00         cmp    rax,0xe000                     ; one of ours?
73 54                     jae    0xfa
c1 e8 04                  shr    eax,0x4
0f b6 8c 07 40 01 00 00   movzx  ecx,BYTE PTR [rdi+rax*1+0x140] ; how large is it?
ff c1                     inc    ecx
c1 e1 04                  shl    ecx,0x4
48 39 ca                  cmp    rdx,rcx
77 04                     ja     0xbf
48 89 f0                  mov    rax,rsi
c3                        ret
53                        push   rbx                            ; bf: too small
55                        push   rbp
51                        push   rcx
48 89 f3                  mov    rbx,rsi
48 89 fd                  mov    rbp,rdi
48 89 d6                  mov    rsi,rdx
e8 30 ff ff ff            call   0x0
59                        pop    rcx
48 85 c0                  test   rax,rax
74 19                     je     0xef
48 89 c7                  mov    rdi,rax
48 89 de                  mov    rsi,rbx
f3 a4                     rep movs BYTE PTR es:[rdi],BYTE PTR ds:[rsi]
48 89 ef                  mov    rdi,rbp
48 89 de                  mov    rsi,rbx
48 89 c3                  mov    rbx,rax
e8 18 00 00 00            call   0x104
48 89 d8                  mov    rax,rbx
5d                        pop    rbp
5b                        pop    rbx
c3                        ret
48 89 d6                  mov    rsi,rdx                        ; f2: there was none
e9 06 ff ff ff            jmp    0x0
48 8b 47 28               mov    rax,QWORD PTR [rdi+0x28]       ; fa: the interpreter's own
48 8b 7f 10               mov    rdi,QWORD PTR [rdi+0x10]
ff e0                     jmp    rax
48 89 f0                  mov    rax,rsi                        ; 104: free(here, block)
48 29 f8                  sub    rax,rdi
48 3d 00 e0 00 00         cmp    rax,0xe000                     ; one of ours?
73 19                     jae    0x12b
c1 e8 04                  shr    eax,0x4
0f b6 84 07 40 01 00 00   movzx  eax,BYTE PTR [rdi+rax*1+0x140] ; which size
48 8b 4c c7 40            mov    rcx,QWORD PTR [rdi+rax*8+0x40]
48 89 0e                  mov    QWORD PTR [rsi],rcx
48 89 74 c7 40            mov    QWORD PTR [rdi+rax*8+0x40],rsi
c3                        ret
48 8b 47 30               mov    rax,QWORD PTR [rdi+0x30]       ; 12b: the interpreter's own
48 8b 7f 10               mov    rdi,QWORD PTR [rdi+0x10]
ff e0                     jmp    rax
"""
_FUNCTIONS = (0x00, 0x53, 0x93, 0x104)
"""Where in the code they begin."""
_SIZE, _OBJECTS = 0xE000, 0x1000
"""Of the whole, and of what comes before the objects: two words for where the next one goes and where there is no more
room, the interpreter's own allocator, what was given back of each size, and the table."""
_NEXT, _END, _OTHER = 0, 1, 2
_DOMAINS = (1, 2)
"""PYMEM_DOMAIN_MEM and PYMEM_DOMAIN_OBJ: who calls these has the interpreter's lock."""
_BUILTIN = (16, 24, 32)
"""Where in a built-in function it says how it is defined, what it is bound to, and in which module."""
_make_builtin = ctypes.pythonapi.PyCFunction_NewEx
_make_builtin.restype = ctypes.py_object
_KNOWN = {(3, 11), (3, 12), (3, 13)}
"""Versions this was tried with."""


class _Allocator(ctypes.Structure):
    """PyMemAllocatorEx."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free"))


class _Nursery:
    def __init__(self, code: int, other: _Allocator) -> None:
        self._area = mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        machine_code.keep(self._area)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        self._end = start + _SIZE
        self._words = memoryview(self._area).cast("Q")
        self._words[_NEXT] = start + _OBJECTS
        for place, word in enumerate((other.context, other.malloc, other.calloc, other.realloc, other.free), _OTHER):
            self._words[place] = word or 0
        ours = _Allocator(start, *(code + function for function in _FUNCTIONS))
        for domain in _DOMAINS:
            ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(ours))

    def open(self) -> None:
        self._words[_END] = self._end

    def close(self) -> None:
        self._words[_END] = 0


_nursery: _Nursery | None = None


def install() -> None:
    """For this process and its forks. Where it is not known how to, nothing changes."""
    global _nursery
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in _KNOWN:
        return
    one_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    code = machine_code.load(CODE)
    if not code or not one_lock:
        return
    found = [_Allocator() for _ in _DOMAINS]
    for domain, allocator in zip(_DOMAINS, found, strict=True):
        ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(allocator))
    first, second = found
    # One that counts or checks (PYTHONMALLOC) is to see everything.
    if bytes(first) == bytes(second) and not first.context:
        _nursery = _Nursery(code, first)


def open_up() -> None:
    """From now on, until it is full."""
    if _nursery is not None:
        _nursery.open()


@contextmanager
def within() -> Generator[None]:
    """What is made here will lie beside what every program makes first."""
    open_up()
    try:
        yield
    finally:
        if _nursery is not None:
            _nursery.close()


def copy_of(function: Callable[P, T]) -> Callable[P, T]:
    """The same, made here and now, with what is its own and the built-in functions it calls by a global name."""
    if _nursery is None:
        return function
    assert isinstance(function, FunctionType)
    code, known = function.__code__.replace(), function.__globals__
    names: dict[str, Any] = {"__builtins__": function.__builtins__}
    names |= {name: _copied(known[name]) for name in code.co_names if name in known}
    return FunctionType(code, names, function.__name__, function.__defaults__)


def _copied(value: Any) -> Any:
    if isinstance(value, frozenset):
        return frozenset(list(cast("frozenset[Any]", value)))
    if not isinstance(value, BuiltinFunctionType):
        return value
    definition, bound_to, module = (ctypes.c_void_p.from_address(id(value) + place) for place in _BUILTIN)
    return _make_builtin(definition, bound_to, module)
