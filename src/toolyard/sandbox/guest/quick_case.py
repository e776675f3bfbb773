"""A short case in one go: what the worker does about it, from writing its text to removing it again, is one row of
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
from .steps import At, Steps, address_of, carry_out

# Numbers of system calls, on x86_64.
_READ, _WRITE, _OPEN, _CLOSE, _PREAD64, _SENDMSG, _WAIT4, _FCNTL = 0, 1, 2, 3, 17, 46, 61, 72
_UNLINK, _RT_SIGTIMEDWAIT, _STATFS, _PIPE2 = 87, 128, 137, 293
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
_STATFS_BYTES, _FREE_INODES = 120, 48
"""What the kernel tells of a file system, and where in it are eight bytes: the inodes that are free."""
_EVENTS = 128
"""Bytes of what the kernel tells of a memory group that are looked at."""
_PLACES = range(0, 16, 4)
"""Of the part of that list in which two processes have room, whatever their numbers."""


class QuickCase:
    """The row, made once for a worker."""

    clean = False
    """Whether the last case has ended, was the only process, had no process killed for its memory and left no file."""

    def __init__(self, children: int, work: str, main: str, scratch: memoryview, events: int) -> None:
        """`children`: the kernel's list of ours. `work`: the directory in which `main` is, the program's text.
        `events`: what the kernel tells of the memory group; -1: there is none."""
        row = self._row = Steps(3, inherited=False)
        none, pipes = row.data(_NO_PIPES[:4]), row.data(_NO_PIPES)
        rights = row.data(_RIGHTS.pack(_RIGHTS.size - 4, 1, 1, 0, 0, 0))
        part = row.data(struct.pack("<QQ", row.data(parent.CASE), len(parent.CASE)))
        message = row.data(struct.pack("<7Q", 0, 0, part, 1, rights, _RIGHTS.size, 0))
        until, before, after, ending = (row.data(bytes(size)) for size in (16, LIST, LIST, _ENDING.size))
        space, told = row.data(bytes(_STATFS_BYTES)), row.data(bytes(_EVENTS))
        child_ends = row.data((1 << (signal.SIGCHLD - 1)).to_bytes(8, "little"))
        self._pipes, self._until = row.view(pipes, _PIPES.size), row.view(until, 16).cast("q")
        self._before, self._after = row.view(before, LIST), row.view(after, LIST)
        self._ending = row.view(ending, _ENDING.size)

        path = row.data(os.fsencode(main) + b"\0")
        opened = row.call(_OPEN, path, _MAIN, 0o644)
        self._writing = row.call(_WRITE, row.result_of(opened))
        row.call(_CLOSE, row.result_of(opened))
        self._without_main = row.count
        for handle in range(pipes, pipes + _PIPES.size, 4):
            row.copy(handle, none)
        for handles in (pipes, pipes + 8, pipes + 16):
            row.expect(row.call(_PIPE2, handles, os.O_CLOEXEC), 0)
        self._input = row.argument_view(row.call(_WRITE, At(pipes + 4)), 1, 2)
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
        self._seen = [row.result_view(reading) for reading, _ in self._reading]
        for handle in (pipes + 8, pipes + 16):
            row.call(_CLOSE, At(handle))
        self._ended = row.count - 1
        row.expect(row.call(_UNLINK, path), 0)
        row.expect(row.call(_STATFS, row.data(os.fsencode(work) + b"\0"), space), 0)
        place = space + _FREE_INODES
        self._counting = [row.copy(place, place), row.copy(place + 4, place + 4)]
        if events >= 0:
            self._hearing = row.call(_PREAD64, events, told, _EVENTS, 0)
            self._heeding = [row.copy(place, place) for place in range(told, told + _EVENTS, 4)]
        self._events = events
        self._clean_is: tuple[int, bytes] | None = None
        self._last = row.address(row.end())

    def aim(
        self,
        control: int,
        alone: bytes,
        main: memoryview | None,
        streams: tuple[Stream, Stream],
        soon: float,
        free: int,
        events: bytes,
    ) -> None:
        """At the cases of one parent, known by its socket. `alone`: the kernel's list with nobody else on it. `main`:
        the program's text, if it is to be written. `soon`: seconds in which most cases are over. `free`: inodes that
        are free where no file is left. `events`: what was told of the memory group last.
        """
        row, self._streams = self._row, streams
        row.set(self._sending, 0, control)
        row.expect(self._listing, len(alone))
        self._expect(self._comparing, alone)
        self._before_it = alone.count(b" ")
        first = self._without_main if main is None else 0
        self._first = row.address(first)
        if main is not None:
            row.set(self._writing, 1, address_of(main), len(main))
            row.expect(self._writing, len(main))
        for (step, _), stream in zip(self._reading, streams, strict=True):
            row.set(step, 1, address_of(stream.memory), stream.limit)
        self._until[0], self._until[1] = int(soon), int(soon % 1 * 1e9)
        if (free, events) != self._clean_is:
            self._clean_is = free, events
            self._expect(self._counting, free.to_bytes(8, "little", signed=True))
            if self._events >= 0:
                row.expect(self._hearing, len(events))
                self._expect(self._heeding, events)

    def _expect(self, comparing: list[int], content: bytes) -> None:
        for index, step in enumerate(comparing):
            self._row.expect(step, int.from_bytes(content[4 * index : 4 * index + 4], "little"))

    def run(self, stdin: int, size: int) -> Ending | Case | None:
        """Run a case, with what is at the address `stdin` as its input.

        Returns how it ended; or, if there is more to be done about it, the case; or None: it did not begin.
        """
        self._input[0], self._input[1] = stdin, size
        reached = carry_out(self._first)
        self.clean = reached == self._last
        if self.clean:
            (out, err), (out_size, err_size) = self._streams, self._seen
            out.size = out.seen = max(out_size[0], 0)
            err.size = err.seen = max(err_size[0], 0)
            return self._how_it_ended()
        return self._found_at(self._row.number(reached))

    def _found_at(self, reached: int) -> Ending | Case | None:
        row = self._row
        self._after[:] = _EMPTY
        for (reading, more), stream in zip(self._reading, self._streams, strict=True):
            stream.size = stream.seen = 0
            if reached >= more:
                stream.size = max(row.result(reading), 0)
                stream.seen = stream.size + max(row.result(more), 0)
        if reached >= self._ended:
            return self._how_it_ended()
        if reached <= self._sending:
            for handle in _PIPES.unpack(self._pipes) if reached >= self._without_main else ():
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
