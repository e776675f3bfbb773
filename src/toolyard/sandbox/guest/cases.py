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
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from . import clone, frames, large_pages, parent, program, steps
from .child import BecomeError, Case, Ending
from .quick_case import LIST, QuickCase
from .replies import LONG_PATIENCE, SHORT_PATIENCE
from .steps import address_of
from .watch import OWN_MEMORY

if TYPE_CHECKING:
    from .worker import Worker

_SOON = 0.003
"""Seconds in which most cases are over: until then nobody looks at their output, their limits or the clock."""
_COMPILE_SECONDS = 0.5
"""For a parent to be ready. What takes longer to compile is compiled by every case, on that case's own time."""
_FORK_SECONDS = 0.5
"""For a parent to fork. One that takes longer was stopped."""
_MOST_PARENTS = 4
"""In one request. A program that keeps harming them, or leaves processes behind, is run without."""
_ORDER = 65536
"""Bytes of one message."""
_OPEN_FILES = 8
"""A program that may have fewer is run on its own: a parent, which its limits bind as well, needs some."""
_WHY = 4096
"""Bytes to tell why a case was refused."""
_CHILD_ENDS = (int(signal.SIGCHLD),)
_REFUSED = parent.REFUSED << 8
"""As a wait status."""


class Origin:
    """The worker's end of the process that parents are forked from.

    It does nothing else, and so copies no pages after a fork. The worker would, at every line of its Python.
    """

    def __init__(self, setup: parent.Setup, null: int) -> None:
        self._socket, self.pid = _fork(parent.ORIGIN, null, partial(parent.serve, setup, setup.inherit))
        patience = struct.pack("@ll", int(_FORK_SECONDS), int(_FORK_SECONDS % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)

    def fork(self, processors: bytes, control: socket.socket) -> int:
        """Returns the number of the new process, which has that socket; 0: there is none, nor will there be."""
        handle = array.array("i", [control.fileno()])
        try:
            os.kill(self.pid, signal.SIGCONT)  # in case a program has stopped it
            self._socket.sendmsg([processors], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handle)])
            return max(int.from_bytes(self._socket.recv(8), "little", signed=True), 0)
        except OSError:
            return 0

    def close(self) -> None:
        self._socket.close()


class Parent:
    """The worker's end of one."""

    def __init__(self, setup: parent.Setup, null: int, origin: Origin | None, processors: bytes) -> None:
        if origin is None:
            self.control, self.pid = _fork(parent.CONTROL, null, partial(parent.serve, setup))
            return
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = origin.fork(processors, theirs)
        theirs.close()

    def order(self, content: memoryview) -> bool:
        """Tell it what to fork; returns whether it has understood."""
        poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        try:
            while len(content):
                content = content[self.control.send(content[:_ORDER]) :]
            return bool(poll.poll(_COMPILE_SECONDS * 1000) and self.control.recv(1))
        except OSError:
            return False

    def wake(self) -> None:
        """In case the program has stopped it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def gone(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # who waits for a case finds the parent, too
            return True


def _fork(handle: int, null: int, role: Callable[[], NoReturn]) -> tuple[socket.socket, int]:
    """A process that has a socket there. Returns its other end, and the number of the process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.dup2(theirs.fileno(), handle, False)
    theirs.close()
    pid = os.fork()
    if pid == 0:
        raise BecomeError(role)
    os.dup2(null, handle, False)
    return ours, pid


class Cases:
    """What a worker does about an EACH request."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._processors = os.sched_getaffinity(0)
        self._processor = frames.ANY
        self._children = -1
        """The kernel's list of our children, in the order in which they became ours."""
        config = worker.config
        if config["namespaces"] and config["seccomp"] and not config["sessions"] and clone.possible():
            self._setup = parent.Setup(worker.interpreter, self._processors)
            with contextlib.suppress(OSError):  # not every kernel has it
                self._children = os.open("/proc/self/task/1/children", os.O_RDONLY | os.O_CLOEXEC)
        self._hears = select.poll()
        self._hears.register(worker.channel.fileno(), select.POLLIN)
        self._quick: QuickCase | None = None
        self._origin: Origin | None = None
        self._parent: Parent | None = None
        self._parents_left = 0

    def run(self, header: tuple[Any, ...]) -> None:
        request = self._worker.request
        order_end = frames.REQUEST.size + sum(header[10:13])
        inputs_end = order_end + header[13]
        count, self._processor, in_bunches = frames.CASES.unpack_from(request, order_end)
        sizes = order_end + frames.CASES.size
        at = sizes + count * frames.CASE.size
        order, fetch = request[:order_end], request[inputs_end : inputs_end + header[14]]
        self._main_is_ours = parent.main_is_for_the_worker(header)
        self._code = request[order_end - header[12] - header[11] : order_end - header[12]]
        self._fetches = header[14] > 0
        python = header[0] == frames.EACH_PYTHON
        request[0] = frames.RUN_PYTHON if python else frames.RUN_COMMAND
        able = python and self._children >= 0 and header[5] >= _OPEN_FILES
        # For a single input it does not pay, unless there is an origin, which an ordinary run would have to end.
        self._parents_left = _MOST_PARENTS if able and (count > 1 or self._origin is not None) else 0
        self._worker.prepares = not self._parents_left
        start = address_of(request)
        due = count if in_bunches else 0
        self._worker.replies.patience = LONG_PATIENCE if in_bunches else SHORT_PATIENCE
        for index in range(count):
            (size,) = frames.CASE.unpack_from(request, sizes + index * frames.CASE.size)
            stdin, self._stdin, at = request[at : at + size], start + at, at + size
            if index and self._hears.poll(0):
                self._worker.give_up()
                break
            reason = self._fork(header, order, stdin, fetch) if self._parents_left else -1
            if index == due:  # and then twice as many: whoever finds one wrong needs none that come after it
                self._worker.replies.flush()
                due = 2 * index + 1
            if reason < 0:
                self._worker.replies.flush()
                reason = self._worker.run_child(header, order, stdin, fetch)
            if reason == frames.CANCELLED or self._worker.retiring:
                break
        self._worker.replies.flush()
        if self._parent is not None:
            self._end_parent()

    def forget_origin(self) -> None:
        """It has ended, with everything else that there was."""
        if self._origin is not None:
            self._origin.close()
            self._origin = None
            self._worker.watch.spared.clear()
            self._worker.watch.own_memory = OWN_MEMORY

    def end_origin(self) -> None:
        """If there is one: ordinary programs are alone."""
        if self._origin is not None:
            self._worker.end_all()

    def _make_origin(self) -> None:
        worker = self._worker
        worker.drop_ready()  # nobody but the parent, and its origin, may be there with the cases
        if self._origin is None and self._setup.inherit is not None:
            worker.watch.make_room(large_pages.size())
            worker.watch.own_memory = OWN_MEMORY + large_pages.size()
            self._origin = Origin(self._setup, worker.null)

    def _make_parent(self, header: tuple[Any, ...], order: memoryview) -> bool:
        worker = self._worker
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {self._processor} & self._processors or self._processors)
        mask = clone.mask(os.sched_getaffinity(0), self._processors)
        made = Parent(self._setup, worker.null, self._origin, mask)
        if not made.pid:  # an earlier program has ended its origin
            made.control.close()
            worker.end_all()
            self._make_origin()
            made = Parent(self._setup, worker.null, self._origin, mask)
        self._parent = made
        self._ours = [made.pid] if self._origin is None else [self._origin.pid, made.pid]
        self._alone = b"".join(b"%d " % pid for pid in self._ours)
        worker.watch.spared.update(map(str, self._ours))
        if made.pid and made.order(order):
            self._soon = min(_SOON, header[1])
            cgroup = worker.watch.cgroup
            if self._quick is None and steps.possible():
                events = -1 if cgroup is None else cgroup.events_file
                place = worker.interpreter
                self._quick = QuickCase(self._children, place.work, place.path, worker.scratch, events)
            if self._quick is not None:
                self._quick.aim(
                    made.control.fileno(),
                    self._alone,
                    self._code if self._main_is_ours else None,
                    (worker.out, worker.err),
                    self._soon,
                    worker.rooms.free_inodes,
                    b"" if cgroup is None else cgroup.events,
                )
            return True
        self._parents_left = 0
        self._end_parent(all_else=True)
        return False

    def _end_parent(self, *, all_else: bool = False) -> None:
        """`all_else`: and whatever there is; also where there is anything but its origin."""
        made = self._parent
        assert made is not None
        if all_else or self._origin is None or not self._end_alone(made.pid, self._origin.pid):
            self._worker.end_all()
        made.control.close()
        self._parent = None
        self._worker.watch.spared.discard(str(made.pid))
        os.sched_setaffinity(0, self._processors)
        signal.sigtimedwait(_CHILD_ENDS, 0)  # or the next case would seem to end before it has begun

    def _end_alone(self, pid: int, origin: int) -> bool:
        """Returns whether there is now nobody but the origin."""
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):  # who waits for a case finds the parent, too
            return False
        return os.pread(self._children, LIST, 0) == b"%d " % origin

    # ---------------------------------------------------------------------------------------------------- one case
    def _fork(self, header: tuple[Any, ...], order: memoryview, stdin: memoryview, fetch: memoryview) -> int:
        """Run one case by a fork of the parent and reply. Returns the reason of its end, or -1: it did not begin."""
        worker = self._worker
        fits = len(stdin) <= select.PIPE_BUF
        if self._parent is None:
            self._make_origin()
        # A quick case sets the streams itself, and finds the limits as the case before it left them.
        if self._parent is None or self._quick is None or not fits or worker.watch.by_looking:
            worker.begin(header)
        worker.extra.reset(_WHY)
        if self._parent is None and not self._make_parent(header, order):
            return -1
        start = time.monotonic()
        reason, rest = frames.ENDED, stdin[:0]
        if self._quick is not None and fits:
            found = self._quick.run(self._stdin, len(stdin))
            if self._quick.clean and not self._fetches and isinstance(found, Ending) and found[0] != _REFUSED:
                return worker.conclude_clean(*found, time.monotonic() - start)
        else:
            found, rest = self._start(stdin)
        alone = True
        if isinstance(found, Case):
            reason = self._see_to_its_end(found, rest, start, header)
            found, alone = found.ending, os.pread(self._children, LIST, 0) == self._alone
        wall = time.monotonic() - start
        if found is not None and found.status == _REFUSED:
            self._hear_why()
        # Every process in the jail descends from a child of ours: with no child but these there is none.
        if found is None or not alone:
            self._parents_left -= 1
            self._end_parent(all_else=True)
        if found is None:
            return -1
        return worker.conclude(reason, *found, wall, fetch, hold=True)

    def _start(self, stdin: memoryview) -> tuple[Case, memoryview]:
        """Begin a case. Returns it, and what it has still to read."""
        assert self._parent is not None
        if self._main_is_ours:
            program.write_main(self._worker.interpreter.path, self._code)
        (stdin_end, feed), (stdout, out), (stderr, err) = os.pipe(), os.pipe(), os.pipe()
        case = Case(stdout, stderr, feed)
        if len(stdin) > select.PIPE_BUF:  # which always fits
            os.set_blocking(feed, False)
        rest = case.feed(stdin)
        streams = array.array("i", (stdin_end, out, err))
        with contextlib.suppress(OSError):  # nobody is there: it will not begin
            self._parent.control.sendmsg([parent.CASE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        for handle in streams:
            os.close(handle)
        return case, rest

    def _see_to_its_end(self, case: Case, rest: memoryview, start: float, header: tuple[Any, ...]) -> int:
        """Returns the reason of its end, if it has begun."""
        worker, reason = self._worker, frames.ENDED
        if case.ending is None:
            self._await(case, start + self._soon)
        if case.pid and case.ending is None:
            worker.replies.flush()
            reason = worker.pump(case, os.pidfd_open(case.pid), rest, start + header[1], header[9])
            os.kill(case.pid, signal.SIGKILL)
            case.await_end()
        worker.out.drain(case.stdout, worker.scratch)
        worker.err.drain(case.stderr, worker.scratch)
        case.close()
        if reason == frames.ENDED and max(worker.out.seen, worker.err.seen) > header[9]:
            return frames.OUTPUT_EXCEEDED
        return reason

    def _await(self, case: Case, until: float) -> None:
        """Wait for the case to begin, as long as that takes, and until then for its end."""
        assert self._parent is not None
        give_up = until + _FORK_SECONDS
        while True:
            ended = signal.sigtimedwait(_CHILD_ENDS, max(until - time.monotonic(), 0.0))
            # After those, the first one is the case: what it leaves to us when it ends, or before, comes later.
            children = [int(pid) for pid in os.pread(self._children, LIST, 0).split()]
            others = [pid for pid in children if pid not in self._ours]
            if others:
                case.pid = others[0]
                case.await_end(os.WNOHANG)
                if case.ending is not None or not ended:
                    return
            elif not ended:
                self._parent.wake()
                until = time.monotonic() + _SOON
                if until > give_up or self._parent.gone():
                    return

    def _hear_why(self) -> None:
        """Of a case that could not be set up."""
        assert self._parent is not None
        with contextlib.suppress(OSError):
            size = self._parent.control.recv_into(self._worker.scratch, 0, socket.MSG_DONTWAIT)
            self._worker.extra.put(self._worker.scratch[:size])
