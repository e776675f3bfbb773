"""Forking a sibling: a child not of the process that forks, but of that process's own parent.

So the worker itself is the parent of every case, whoever's memory the case was forked with. It learns from the kernel
how the case ended, and there is nobody between them who could be kept from telling.

`os.fork` has no such option: the system call is made directly, with what the C library gives it. What that does besides
is for processes with threads. Python's part of it is done where a module may have asked to hear of forks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from .kernel import MACHINE, PR_GET_TID_ADDRESS, libc

_CLONE_VFORK, _CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID = 0x4000, 0x8000, 0x200000, 0x1000000
_FLAGS = _CLONE_VFORK | _CLONE_PARENT | _CHILD_CLEARTID | _CHILD_SETTID | int(signal.SIGCHLD)
_NUMBERS = {"x86_64": (56, 274, 273), "aarch64": (220, 100, 99)}
"""clone, get_robust_list, set_robust_list."""
_DEAF = sys.stdlib_module_names | {"__main__", "_distutils_hack", "_virtualenv"}
"""Modules that need not hear of this kind of fork. Those of the standard library that want to hear of forks do so for
the sake of other threads, of which there are none; but for one, see `seeding_call`. Others come from `site`."""

Call = tuple[Callable[..., int], tuple[Any, ...]]
"""A function and its arguments, made beforehand: each object that a child touches is a page it may have to copy."""

quick = ctypes.PyDLL(None)
"""Keeps the interpreter's lock and no error number: half the pages of a call through `libc`."""


def _thread_address() -> int:
    """Where the C library notes the number of this thread, which the kernel is to write anew in a child. 0: unknown."""
    found = ctypes.c_void_p()
    if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(found), 0, 0, 0) < 0 or not found.value:
        return 0
    return found.value if ctypes.c_int.from_address(found.value).value == os.getpid() else 0


def possible() -> bool:
    """Whether it is known how to, here: processor, C library and interpreter are of the kinds this was written for."""
    one_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return MACHINE in _NUMBERS and sys.implementation.name == "cpython" and one_lock and _thread_address() != 0


def fork_call() -> Call:
    """The system call, for a process with one thread. Returns the child's number, or 0 in the child, or -1."""
    address = ctypes.c_void_p(_thread_address())
    last = (address, 0) if MACHINE == "x86_64" else (0, address)
    return quick.syscall, (_NUMBERS[MACHINE][0], _FLAGS, 0, 0, *last)


def listening() -> bool:
    """Whether a module that is loaded may have asked to hear of forks, and must."""
    return any(name.partition(".")[0] not in _DEAF for name in sys.modules)


def telling_call(call: Call) -> Call:
    """The same, with what Python does at every fork."""
    before, after, after_in_child = (
        getattr(ctypes.pythonapi, name) for name in ("PyOS_BeforeFork", "PyOS_AfterFork_Parent", "PyOS_AfterFork_Child")
    )
    fork, arguments = call

    def told() -> int:
        before()
        pid = fork(*arguments)
        (after if pid else after_in_child)()
        return pid

    return told, ()


def seeding_call(call: Call) -> Call:
    """The same, where `random` is loaded: it wants to be seeded anew in every child.

    Here that is done before the fork. The child's numbers are its own all the same, and it copies no page for them.
    """
    fork, arguments = call
    seed = sys.modules["_random"].Random.seed.__get__(sys.modules["random"]._inst)

    def seeded() -> int:
        seed()
        return fork(*arguments)

    return seeded, ()


def robust_list_call() -> Call:
    """In a child the C library tells the kernel where its list of robust locks is."""
    _, get, put = _NUMBERS[MACHINE]
    head, size = ctypes.c_void_p(), ctypes.c_size_t()
    libc.syscall(ctypes.c_long(get), ctypes.c_long(0), ctypes.byref(head), ctypes.byref(size))
    return quick.syscall, (put, head, size)


def affinity_call(processors: set[int]) -> Call:
    """To be allowed on all of them again."""
    size = (max(processors) // 64 + 1) * 8
    mask = sum(1 << number for number in processors)
    allowed = ctypes.create_string_buffer(mask.to_bytes(size, sys.byteorder), size)
    return quick.sched_setaffinity, (0, size, allowed)
