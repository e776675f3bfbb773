"""A worker's child and what flows between them: pipes, and memory that children do not inherit."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Container
from functools import partial
from typing import Any, NamedTuple, NoReturn

from . import program

KEPT = 1 << 20
"""Bytes of each buffer that are kept; larger buffers last for one request."""
_PIPE = 65536


def private_memory(size: int) -> memoryview:
    """Memory that forked children do not inherit."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_DONTFORK)
    return memoryview(area)


def write_all(handle: int, content: memoryview) -> bool:
    try:
        while len(content):
            content = content[os.write(handle, content) :]
    except BrokenPipeError:
        return False
    return True


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def reap_orphans(kept: Container[int]) -> None:
    """As init does: a dead orphan would still count as a process.

    Spares `kept`: the program's first process, whose status is still needed, and our own processes, whose pids must not
    be reused.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in kept:
                return
            os.waitpid(ended.si_pid, 0)


class BecomeError(BaseException):
    """Raised in a forked process: return to where the worker began, and become what it was forked for.

    This gives programs the same stack below them, with the same space left, wherever they were forked.
    """

    def __init__(self, role: Callable[[], NoReturn]) -> None:
        self.role = role


class Pipes:
    """The worker's ends of a program's standard streams, and the program's first process."""

    pid: int
    stdin: int
    stdout: int
    stderr: int

    def feed(self, content: memoryview) -> memoryview:
        """Write what fits into the pipe; close it after the last byte or if no one reads it. Returns the rest."""
        try:
            while len(content):
                content = content[os.write(self.stdin, content[:_PIPE]) :]
        except BlockingIOError:
            return content
        except BrokenPipeError:
            content = content[:0]
        self.close_input()
        return content

    def close_input(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        self.close_input()
        os.close(self.stdout)
        os.close(self.stderr)


class Ending(NamedTuple):
    """How a case ended."""

    status: int
    """As returned by `wait`."""
    cpu: float
    peak: int
    """Bytes of its largest process."""


class Case(Pipes):
    """One run of a program, forked from its parent process."""

    def __init__(self, stdout: int, stderr: int, stdin: int = -1) -> None:
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.pid = 0
        """0: the process does not exist yet."""
        self.ending: Ending | None = None
        """None while it runs."""

    def await_end(self, options: int = 0) -> None:
        pid, status, usage = os.wait4(self.pid, options)
        if pid:
            self.ending = Ending(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


class Child(Pipes):
    """A forked process, prepared ahead, that waits for an order and later becomes the program."""

    def __init__(self, interpreter: program.Interpreter, null: int) -> None:
        stdin, self.stdin = os.pipe()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        command, self.command = os.pipe()
        self.status, status = os.pipe()
        os.set_blocking(self.stdin, False)
        # Set up before the fork: here it copies no page.
        for target, source in enumerate((stdin, stdout, stderr, command, status)):
            os.dup2(source, target, target < program.COMMAND)
            os.close(source)
        self.pid = os.fork()
        if self.pid == 0:
            raise BecomeError(partial(program.run, interpreter))
        for target in range(program.STATUS + 1):
            os.dup2(null, target, False)

    def close(self) -> None:
        super().close()
        for handle in (self.command, self.status):
            if handle >= 0:
                os.close(handle)
        self.command = -1


class Stream:
    """One output stream of a program, read into private memory; beyond its limit it is read and dropped."""

    def __init__(self) -> None:
        self.memory = private_memory(KEPT)
        self.size = self.seen = self.limit = 0

    def reset(self, limit: int) -> None:
        if limit > len(self.memory):
            self.memory = private_memory(limit)
        self.size = self.seen = 0
        self.limit = limit

    def shrink(self) -> None:
        if len(self.memory) > KEPT:
            area: Any = self.memory.obj
            area.madvise(mmap.MADV_DONTNEED)

    def take(self, handle: int, scratch: memoryview) -> int:
        room = self.limit - self.size
        got = os.readv(handle, [self.memory[self.size : self.limit] if room else scratch])
        self.size += got if room else 0
        self.seen += got
        return got

    def drain(self, handle: int, scratch: memoryview) -> None:
        """Read what is in the pipe now; never wait for a process that may still hold its other end."""
        os.set_blocking(handle, False)
        with contextlib.suppress(BlockingIOError):
            room = self.limit - self.size or len(scratch)
            # A short read has emptied the pipe; one read beyond the limit shows that something was truncated.
            while self.take(handle, scratch) == room and not self.cut:
                room = self.limit - self.size or len(scratch)

    def put(self, content: memoryview) -> None:
        self.memory[: len(content)] = content
        self.size = self.seen = len(content)

    @property
    def cut(self) -> bool:
        return self.seen > self.size

    def view(self) -> memoryview:
        return self.memory[: self.size]
