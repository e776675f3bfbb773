"""A short case in one go: what the worker does about it, from making its pipes to reading its output, is one row of
system calls.

The row ends early where something is not as it is with most cases: it takes its time, leaves a process behind, or has
more to say than is kept. From there `cases` goes on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct

from . import parent
from .child import Case, Ending, Stream
from .steps import At, Steps, address_of

# Numbers of system calls, on x86_64.
_READ, _WRITE, _OPEN, _CLOSE, _PREAD64, _SENDMSG, _WAIT4, _FCNTL = 0, 1, 2, 3, 17, 46, 61, 72
_RT_SIGTIMEDWAIT, _PIPE2 = 128, 293
_MAIN = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_RIGHTS = struct.Struct("<Qii3i4x")
"""A control message with three descriptors: its length, SOL_SOCKET, SCM_RIGHTS, and they."""
_PIPES = struct.Struct("<6i")
_NO_PIPES = _PIPES.pack(*[-1] * 6)
_ENDING = struct.Struct("<i4x4qq104x")
"""Wait status, then the usage: user and system time in seconds and microseconds, largest resident size in KiB, more."""
LIST = 64
"""Bytes of the kernel's list of our children that are read."""
_EMPTY = bytes(LIST)
_PLACES = range(0, 16, 4)
"""Of the part of that list in which two processes have room, whatever their numbers."""


class QuickCase:
    """The row, made once for a worker."""

    def __init__(self, children: int, main: str, scratch: memoryview) -> None:
        """`children`: the kernel's list of ours. `main`: where the program's text goes."""
        row = self._row = Steps(2, inherited=False)
        pipes, rights = row.data(_NO_PIPES), row.data(_RIGHTS.pack(_RIGHTS.size - 4, 1, 1, 0, 0, 0))
        part = row.data(struct.pack("<QQ", row.data(parent.CASE), len(parent.CASE)))
        message = row.data(struct.pack("<7Q", 0, 0, part, 1, rights, _RIGHTS.size, 0))
        until, before, after, ending = (row.data(bytes(size)) for size in (16, LIST, LIST, _ENDING.size))
        child_ends = row.data((1 << (signal.SIGCHLD - 1)).to_bytes(8, "little"))
        self._pipes, self._until = row.view(pipes, _PIPES.size), row.view(until, 16).cast("q")
        self._before, self._after = row.view(before, LIST), row.view(after, LIST)
        self._ending = row.view(ending, _ENDING.size)

        opened = row.call(_OPEN, row.data(os.fsencode(main) + b"\0"), _MAIN, 0o644)
        self._writing = row.call(_WRITE, row.result_of(opened))
        row.call(_CLOSE, row.result_of(opened))
        self._without_main = row.count
        for handles in (pipes, pipes + 8, pipes + 16):
            row.expect(row.call(_PIPE2, handles, os.O_CLOEXEC), 0)
        self._feeding = row.call(_WRITE, At(pipes + 4))
        for place, handle in enumerate((pipes, pipes + 12, pipes + 20)):
            row.copy(rights + 16 + 4 * place, handle)
        self._sending = row.call(_SENDMSG, 0, message, 0)
        row.expect(self._sending, len(parent.CASE))
        for handle in (pipes, pipes + 4, pipes + 12, pipes + 20):
            row.call(_CLOSE, At(handle))
        row.expect(row.call(_RT_SIGTIMEDWAIT, child_ends, 0, until, 8), signal.SIGCHLD)
        self._listing_before = row.call(_PREAD64, children, before, LIST, 0)
        self._waiting = row.call(_WAIT4, -1, ending, os.WNOHANG, ending + 8)
        row.end_at(self._waiting, 0)
        self._listing = row.call(_PREAD64, children, after, LIST, 0)
        self._comparing = [row.copy(after + place, after + place) for place in _PLACES]
        self._reading: list[tuple[int, int]] = []
        for handle in (At(pipes + 8), At(pipes + 16)):
            row.call(_FCNTL, handle, fcntl.F_SETFL, os.O_NONBLOCK)
            reading = row.call(_READ, handle)
            more = row.call(_READ, handle, address_of(scratch), len(scratch))
            row.expect(more, -errno.EAGAIN)
            self._reading.append((reading, more))
        for handle in (pipes + 8, pipes + 16):
            row.call(_CLOSE, At(handle))
        self._last = row.end()

    def aim(
        self, control: int, alone: bytes, main: memoryview | None, streams: tuple[Stream, Stream], soon: float
    ) -> None:
        """At the cases of one parent, known by its socket. `alone`: the kernel's list with nobody else on it. `main`:
        the program's text, if it is to be written. `soon`: seconds in which most cases are over.
        """
        row, self._streams = self._row, streams
        row.set(self._sending, 0, control)
        row.expect(self._listing, len(alone))
        for step, place in zip(self._comparing, _PLACES, strict=True):
            row.expect(step, int.from_bytes(alone[place : place + 4], "little"))
        self._before_it = alone.count(b" ")
        self._first = self._without_main if main is None else 0
        if main is not None:
            row.set(self._writing, 1, address_of(main), len(main))
            row.expect(self._writing, len(main))
        for (step, _), stream in zip(self._reading, streams, strict=True):
            row.set(step, 1, address_of(stream.memory), stream.limit)
        self._until[0], self._until[1] = int(soon), int(soon % 1 * 1e9)

    def run(self, stdin: int, size: int) -> Ending | Case | None:
        """Run a case, with what is at the address `stdin` as its input.

        Returns how it ended; or, if there is more to be done about it, the case; or None: it did not begin.
        """
        row = self._row
        self._pipes[:] = _NO_PIPES
        self._after[:] = _EMPTY
        row.set(self._feeding, 1, stdin, size)
        reached = row.run(self._first)
        for (reading, more), stream in zip(self._reading, self._streams, strict=True):
            stream.size = stream.seen = 0
            if reached >= more:
                stream.size = max(row.result(reading), 0)
                stream.seen = stream.size + max(row.result(more), 0)
        if reached == self._last:
            return self._how_it_ended()
        if reached <= self._sending:
            for handle in _PIPES.unpack(self._pipes):
                if handle >= 0:
                    os.close(handle)
            return None
        _, _, stdout, _, stderr, _ = _PIPES.unpack(self._pipes)
        case = Case(stdout, stderr)
        if reached > self._waiting:
            pid, size = row.result(self._waiting), row.result(self._listing_before)
            # After those, the first one is the case: what it leaves to us when it ends, or before, comes later.
            if bytes(self._before[: max(size, 0)]).split()[self._before_it :][:1] == [b"%d" % pid]:
                case.pid, case.ending = pid, self._how_it_ended()
        return case

    def _how_it_ended(self) -> Ending:
        status, seconds, micros, more_seconds, more_micros, kibibytes = _ENDING.unpack(self._ending)
        return Ending(status, seconds + more_seconds + (micros + more_micros) / 1e6, kibibytes * 1024)
