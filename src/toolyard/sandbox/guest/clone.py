"""Forking a sibling: a child not of the process that forks, but of that process's own parent.

So the worker itself is the parent of every case, whoever's memory the case was forked with. It learns from the kernel
how the case ended, and there is nobody between them who could be kept from telling.

`os.fork` has no such option: the system call is made directly, with what the C library gives it. What that does besides
is for processes with threads. Python's part of it is done where a module may have asked to hear of forks.

Each object that a child touches is a page it may have to copy. So where that is known how to, the forking process does
not go back to Python between one child and the next, nor does a child before its system calls are made (see `steps`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence

from .kernel import MACHINE, PR_GET_TID_ADDRESS, PR_SET_DUMPABLE, libc
from .steps import At, Call, Steps
from .steps import possible as by_steps

_CLONE_VFORK, _CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID = 0x4000, 0x8000, 0x200000, 0x1000000
_FLAGS = _CLONE_VFORK | _CLONE_PARENT | _CHILD_CLEARTID | _CHILD_SETTID | int(signal.SIGCHLD)
_NUMBERS = {"x86_64": (56, 274, 273), "aarch64": (220, 100, 99)}
"""clone, get_robust_list, set_robust_list."""
_WRITE, _CLOSE, _RT_SIGPROCMASK, _DUP2, _RECVMSG, _SETSID, _PRCTL, _SCHED_SETAFFINITY = 1, 3, 14, 33, 47, 112, 157, 203
_EXIT_GROUP = 231
"""On x86_64."""
_DEAF = sys.stdlib_module_names | {"__main__", "_distutils_hack", "_virtualenv"}
"""Modules that need not hear of this kind of fork. Those of the standard library that want to hear of forks do so for
the sake of other threads, of which there are none; but for one, see `reseed`. Others come from `site`."""

_quick = ctypes.PyDLL(None)
"""Keeps the interpreter's lock and no error number: half the pages of a call through `libc`."""
_STREAMS = 3


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


def siblings(control: int, processors: set[int], signals: Sequence[int], *, close: bool) -> Call:
    """What forks a sibling for every message on the socket `control`, whose three descriptors are its streams.

    The call returns in each of these: a session of its own, on any of the `processors`, not blocking these `signals`,
    and on demand without the socket. The process that makes the call ends when there are no more messages to come. It
    has to block the signals, or one that it gets would be handled by the next sibling.
    """
    return (_siblings_by_steps if by_steps() else _siblings_by_python)(control, processors, signals, close)


def _siblings_by_steps(control: int, processors: set[int], signals: Sequence[int], close: bool) -> Call:
    row = Steps()
    message, first = _message(row, _STREAMS, row.data(b"?"), 1)
    leave = row.call(_EXIT_GROUP, 0)
    start = row.call(_RECVMSG, control, message, 0)
    row.expect(start, 1, otherwise=leave)
    for stream in range(_STREAMS):
        handle = At(first + 4 * stream)
        row.call(_DUP2, handle, stream)
        row.call(_CLOSE, handle)
    fork, get_robust_list, set_robust_list = _NUMBERS["x86_64"]
    forked = row.call(fork, _FLAGS, 0, 0, _thread_address(), 0)
    row.expect(forked, 0, otherwise=start)
    row.call(_SETSID)
    unblocked = sum(1 << (number - 1) for number in signals).to_bytes(8, "little")
    row.call(_RT_SIGPROCMASK, signal.SIG_UNBLOCK, row.data(unblocked), 0, len(unblocked))
    row.call(_PRCTL, PR_SET_DUMPABLE, 1, 0, 0, 0)
    everywhere = mask(processors, processors)
    row.call(_SCHED_SETAFFINITY, 0, len(everywhere), row.data(everywhere))
    head = row.data(bytes(16))
    libc.syscall(ctypes.c_long(get_robust_list), ctypes.c_long(0), ctypes.c_void_p(head), ctypes.c_void_p(head + 8))
    row.call(set_robust_list, *struct.unpack("<QQ", ctypes.string_at(head, 16)))
    if close:
        row.call(_CLOSE, control)
    row.end()
    return row.as_call(start)


def heirs(control: int, target: int, processors: set[int]) -> Call:
    """What forks a sibling for every message on the socket `control`: whose descriptor becomes its `target`, and whose
    bytes are a `mask` of those `processors` on which it runs.

    The call returns in each of these, without the socket, on which its number is told: eight bytes, or less than
    nothing where it could not be forked. The process that makes the call ends when there are no more messages to come.
    Only where this is done by steps.
    """
    row = Steps()
    size = len(mask(processors, processors))
    place = row.data(bytes(size))
    message, handle = _message(row, 1, place, size)
    leave = row.call(_EXIT_GROUP, 0)
    tell = row.call(_WRITE, control, 0, 8)
    row.call(_DUP2, control, target)  # not closed, or the next one would come with that number
    start = row.call(_RECVMSG, control, message, 0)
    row.expect(start, size, otherwise=leave)
    row.call(_DUP2, handle, target)
    row.call(_CLOSE, handle)
    forked = row.call(_NUMBERS["x86_64"][0], _FLAGS & ~_CLONE_VFORK, 0, 0, _thread_address(), 0)
    row.expect(forked, 0, otherwise=tell)
    row.set(tell, 1, row.result_of(forked))
    row.call(_CLOSE, control)
    row.call(_SCHED_SETAFFINITY, 0, size, place)
    row.end()
    return row.as_call(start)


def _message(row: Steps, count: int, place: int, size: int) -> tuple[int, At]:
    """For a message of so many descriptors, and bytes, which go to that place. And where the first descriptor goes."""
    space = socket.CMSG_SPACE(count * 4)
    handles = row.data(bytes(space))
    part = row.data(struct.pack("<QQ", place, size))
    message = row.data(struct.pack("<7Q", 0, 0, part, 1, handles, space, 0))
    return message, At(handles + socket.CMSG_LEN(0))


def _siblings_by_python(control: int, processors: set[int], signals: Sequence[int], close: bool) -> Call:
    receive, space = _named(control).recvmsg, socket.CMSG_SPACE(_STREAMS * 4)
    number, get_robust_list, set_robust_list = _NUMBERS[MACHINE]
    address = ctypes.c_void_p(_thread_address())
    fork = (number, _FLAGS, 0, 0, *((address, 0) if MACHINE == "x86_64" else (0, address)))
    everywhere = mask(processors, processors)
    allowed = (0, len(everywhere), ctypes.create_string_buffer(everywhere, len(everywhere)))
    head, size = ctypes.c_void_p(), ctypes.c_size_t()
    libc.syscall(ctypes.c_long(get_robust_list), ctypes.c_long(0), ctypes.byref(head), ctypes.byref(size))
    robust_list = (set_robust_list, head, size)

    def serve(_: object) -> None:
        while receive(1, space)[0]:
            for stream in range(_STREAMS):  # as the kernel gives out numbers, those it came with are the next ones
                os.dup2(control + 1 + stream, stream)
            os.closerange(control + 1, control + 1 + _STREAMS)
            if not _quick.syscall(*fork):
                _quick.setsid()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
                _quick.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
                _quick.sched_setaffinity(*allowed)
                _quick.syscall(*robust_list)
                if close:
                    os.close(control)
                return
        os._exit(0)

    return serve, None


def _named(handle: int) -> socket.socket:
    """A name for whatever socket will have that number."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.dup(handle)
    os.dup2(one.fileno(), handle, False)
    named = socket.socket(one.family, one.type, one.proto, handle)
    os.dup2(before, handle, False)
    for spare in (one.detach(), other.detach(), before):
        os.close(spare)
    return named


def mask(these: set[int], known: set[int]) -> bytes:
    """A set of processors as the kernel takes it, of a length that depends on those that are known."""
    return sum(1 << number for number in these).to_bytes((max(known) // 64 + 1) * 8, sys.byteorder)


def listening() -> bool:
    """Whether a module that is loaded may have asked to hear of forks, and must."""
    return any(name.partition(".")[0] not in _DEAF for name in sys.modules)


def tell_before() -> None:
    """What Python does before a fork, however many follow."""
    ctypes.pythonapi.PyOS_BeforeFork()


def tell_child() -> None:
    """What Python does in the child of one."""
    ctypes.pythonapi.PyOS_AfterFork_Child()


def reseed() -> None:
    """What `random`, if it is loaded, wants to be done in every child. Python would see to it, were it told."""
    if "random" in sys.modules:
        sys.modules["random"]._inst.seed()
