"""Many inputs for one program: the worker's part of it.

A Python program is compiled once, by a process (see `parent`) that then forks it for every input. Nothing else is saved
on, so that a case is as much on its own as a run: fresh pipes, its own clock, all its processes dead and all its files
gone before the next one begins. What cannot be done that way is done by ordinary runs, one after the other: programs
in other languages, at lower levels of isolation, and those that harm the process they are forked from.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from . import frames, parent, program
from .child import BecomeError, Pipes

if TYPE_CHECKING:
    from .worker import Worker

_SOON = 0.002
"""Seconds in which most cases are over: until then nobody looks at their output, their limits or the clock."""
_COMPILE_SECONDS = 0.5
"""For a parent to be ready. What takes longer to compile is compiled by every case, on that case's own time."""
_REPORT_SECONDS = 1.0
"""For a parent to tell how a case ended that has ended."""
_MOST_PARENTS = 4
"""Lost in one request. A program that keeps harming them is run without."""
_ORDER = 65536
"""Bytes of one message."""
_OPEN_FILES = 8
"""A program that may have fewer is run on its own: a parent, which its limits bind as well, needs some."""

Report = tuple[int, float, int]
"""Wait status, processor seconds, largest resident size."""
_KILLED: Report = (int(signal.SIGKILL), 0.0, 0)


class Case(Pipes):
    """The worker's ends; the other ones are on their way to the parent."""

    def __init__(self, size: int) -> None:
        stdin, self.stdin = os.pipe()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        if size > select.PIPE_BUF:  # which always fits
            os.set_blocking(self.stdin, False)
        self.streams = array.array("i", (stdin, stdout, stderr))

    def hand_over(self, control: socket.socket) -> None:
        """
        Raises:
            OSError: nobody is there.
        """
        try:
            control.sendmsg([parent.CASE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, self.streams)])
        finally:
            for handle in self.streams:
                os.close(handle)


class Parent:
    """The worker's end of one."""

    def __init__(self, interpreter: program.Interpreter, processors: set[int], null: int) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.dup2(theirs.fileno(), parent.CONTROL, False)
        theirs.close()
        self.pid = os.fork()
        if self.pid == 0:
            raise BecomeError(partial(parent.serve, interpreter, processors))
        os.dup2(null, parent.CONTROL, False)
        self._children = os.open(f"/proc/{self.pid}/task/{self.pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        self._number = b"%d " % self.pid

    def order(self, content: memoryview) -> bool:
        try:
            while len(content):
                content = content[self.control.send(content[:_ORDER]) :]
        except OSError:
            return False
        self.control.setblocking(False)
        return True

    def says(self, memory: memoryview, seconds: float) -> int:
        """The size of its next message, in `memory`; 0 if none comes in that time."""
        if seconds:
            poll = select.poll()
            poll.register(self.control.fileno(), select.POLLIN)
            poll.poll(seconds * 1000)
        try:
            return self.control.recv_into(memory)
        except OSError:
            return 0

    def case(self) -> int:
        """The process of the case that runs; 0 if there is none, not yet or no more."""
        try:
            return int(os.pread(self._children, 64, 0).split()[0])
        except (OSError, IndexError):
            return 0

    def alone(self, workers_children: int) -> bool:
        """Whether nobody is in the jail but the worker and this one, after a case has ended.

        Every other process would descend from a child of one of the two. Of this one first: once it has none left,
        nobody can make it another one, as siblings can be made.
        """
        try:
            return not os.pread(self._children, 64, 0) and os.pread(workers_children, 64, 0) == self._number
        except OSError:
            return False

    def close(self) -> None:
        self.control.close()
        os.close(self._children)

    def wake(self) -> None:
        """In case the program has stopped it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)


class Cases:
    """What a worker does about an EACH request."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._processors = os.sched_getaffinity(0)
        self._processor = frames.ANY
        self._children = -1
        if worker.config["namespaces"] and worker.config["seccomp"]:
            with contextlib.suppress(OSError):  # not every kernel has it
                self._children = os.open("/proc/self/task/1/children", os.O_RDONLY | os.O_CLOEXEC)
        self._parent: Parent | None = None
        self._parents_left = 0

    def run(self, header: tuple[Any, ...]) -> None:
        request = self._worker.request
        order_end = frames.REQUEST.size + sum(header[10:13])
        inputs_end = order_end + header[13]
        count, self._processor = frames.CASES.unpack_from(request, order_end)
        sizes = order_end + frames.CASES.size
        at = sizes + count * frames.CASE.size
        order, fetch = request[:order_end], request[inputs_end : inputs_end + header[14]]
        self._main_is_ours = parent.main_is_for_the_worker(header)
        self._code = request[order_end - header[12] - header[11] : order_end - header[12]]
        python = header[0] == frames.EACH_PYTHON
        request[0] = frames.RUN_PYTHON if python else frames.RUN_COMMAND
        able = python and self._children >= 0 and header[5] >= _OPEN_FILES
        self._parents_left = _MOST_PARENTS if able and count > 1 else 0
        self._worker.prepares = not self._parents_left
        for index in range(count):
            (size,) = frames.CASE.unpack_from(request, sizes + index * frames.CASE.size)
            stdin, at = request[at : at + size], at + size
            reason = self._fork(header, order, stdin, fetch) if self._parents_left else -1
            if reason < 0:
                self._worker.replies.flush()
                reason = self._worker.run_child(header, order, stdin, fetch)
            if reason == frames.CANCELLED or self._worker.retiring:
                break
        self._worker.replies.flush()
        if self._parent is not None:
            self._end_parent()

    def _make_parent(self, order: memoryview) -> bool:
        worker = self._worker
        worker.drop_ready()  # nobody but the parent may be there with the cases
        if self._processor in self._processors:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, {self._processor})
        made = self._parent = Parent(worker.interpreter, self._processors, worker.null)
        worker.watch.spared = str(made.pid)
        if made.order(order) and made.says(worker.scratch, _COMPILE_SECONDS):
            return True
        self._parents_left = 0
        self._end_parent()
        return False

    def _end_parent(self) -> None:
        """And whatever else there is."""
        assert self._parent is not None
        self._worker.end_all()
        self._parent.close()
        self._parent = None
        self._worker.watch.spared = ""
        os.sched_setaffinity(0, self._processors)

    # ---------------------------------------------------------------------------------------------------- one case
    def _fork(self, header: tuple[Any, ...], order: memoryview, stdin: memoryview, fetch: memoryview) -> int:
        """Run one case by a fork of the parent and reply. Returns the reason of its end, or -1: it must be run anew."""
        worker = self._worker
        worker.begin(header)
        if self._parent is None and not self._make_parent(order):
            return -1
        assert self._parent is not None
        if self._main_is_ours:
            program.write_main(worker.interpreter.path, self._code)
        start = time.monotonic()
        case = Case(len(stdin))
        try:
            rest = case.feed(stdin)
            case.hand_over(self._parent.control)
            reason, report = self._see_through(case, rest, start, header)
        except OSError:
            reason, report = frames.ENDED, None
        wall = time.monotonic() - start
        worker.out.drain(case.stdout, worker.scratch)
        worker.err.drain(case.stderr, worker.scratch)
        case.close()
        if reason == frames.ENDED and max(worker.out.seen, worker.err.seen) > header[9]:
            reason = frames.OUTPUT_EXCEEDED
        if report is None or not self._parent.alone(self._children):
            self._parents_left -= 1
            self._end_parent()
        if report is None:
            return -1
        return worker.conclude(reason, *report, wall, fetch, hold=True)

    def _see_through(
        self, case: Case, stdin: memoryview, start: float, header: tuple[Any, ...]
    ) -> tuple[int, Report | None]:
        """Returns the reason of the case's end, and the report; None if it ended by itself and nobody knows how."""
        assert self._parent is not None
        control, channel = self._parent.control.fileno(), self._worker.channel.fileno()
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(channel, select.POLLIN)
        events = poll.poll(min(_SOON, header[1]) * 1000)
        until = time.monotonic() + _REPORT_SECONDS
        while True:
            handles = [handle for handle, _ in events]
            if channel in handles:
                self._worker.cancelled()
                self._worker.end_all()
                return frames.CANCELLED, _KILLED
            if handles:
                return frames.ENDED, self._report(0)
            self._worker.replies.flush()
            self._parent.wake()
            if pid := self._parent.case():
                return self._watch(case, pid, stdin, start + header[1], header[9])
            if time.monotonic() > until:
                return frames.ENDED, None
            events = poll.poll(_SOON * 1000)

    def _watch(self, case: Case, pid: int, stdin: memoryview, deadline: float, flood: int) -> tuple[int, Report | None]:
        """The same for a case that takes its time."""
        assert self._parent is not None
        case.pid = pid
        reason = frames.ENDED
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the parent has reaped it
            reason = self._worker.pump(case, os.pidfd_open(pid), stdin, deadline, flood)
            os.kill(pid, signal.SIGKILL)
        self._parent.wake()
        report = self._report(_REPORT_SECONDS) or self._report_of_orphan(pid)
        return reason, report if reason == frames.ENDED else report or _KILLED

    def _report(self, seconds: float) -> Report | None:
        """Comes within `seconds`; 0: is there."""
        assert self._parent is not None
        memory = self._worker.scratch
        while size := self._parent.says(memory, seconds):
            if memory[0] != parent.REFUSED:
                _, status, user, system, peak = parent.REPORT.unpack_from(memory)
                return status, user + system, peak
            self._worker.extra.put(memory[1:size])
            seconds = _REPORT_SECONDS
        return None

    def _report_of_orphan(self, pid: int) -> Report | None:
        """When the parent is dead or does not answer: end it, which makes the case our own child, dead by now."""
        assert self._parent is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._parent.pid, 0)
            _, status, usage = os.wait4(pid, 0)
        except ChildProcessError:
            return None
        return status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
