"""One program on many inputs: the worker's side.

A Python program is compiled once, by a process (see `parent`) that is then forked for every input. Nothing else is
shared, so a case is as isolated as a run: fresh pipes, its own clock, all its processes dead and all its files gone
before the next one starts. Everything else uses ordinary runs, one after the other: programs in other languages, lower
isolation levels, and programs that harm the process they are forked from.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import select
import signal
import socket
import time
from functools import partial

from .. import frames, program
from ..child import BecomeError, Case, Ending
from ..frames import Request
from ..native import ALONE, CLEAN, ENDED, NOT_BEGUN, Native, address_of
from ..native import Case as Plan
from ..replies import LONG_PATIENCE, SHORT_PATIENCE
from ..runner import Runner
from . import parent

_SOON = 0.003
"""Seconds within which most cases end: until then, their output, limits and the clock are not checked."""
_COMPILE_SECONDS = 0.5
"""For a parent to be ready. A program that takes longer to compile is compiled by every case, in that case's time."""
_FORK_SECONDS = 0.5
"""For a parent to fork. If it takes longer, it was stopped."""
_MOST_PARENTS = 4
"""Per request. A program that keeps harming its parents, or leaves processes behind, is run without them."""
_ORDER = 65536
"""Bytes per message."""
_OPEN_FILES = 8
"""A program that may open fewer files is run on its own: a parent, which has the same limits, needs some."""
_LIST = 64
"""Bytes read of the kernel's list of our children: the first two pids, and whether there are more."""
_WHY = 4096
"""Bytes for the reason why a case was refused."""
_CHILD_ENDS = (int(signal.SIGCHLD),)
_REFUSED = parent.REFUSED << 8
"""As a wait status."""


class Parent:
    """The worker's end of the process that a program's cases are forked from.

    It is the worker's child, and reaped only when it is ended: until then its pid is not reused, dead or not.
    """

    def __init__(self, setup: parent.Setup, null: int) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.dup2(theirs.fileno(), parent.CONTROL, False)
        theirs.close()
        self.pid = os.fork()
        if self.pid == 0:
            raise BecomeError(partial(parent.serve, setup))
        os.dup2(null, parent.CONTROL, False)
        self.handle = os.pidfd_open(self.pid)
        self._end = select.poll()
        self._end.register(self.handle, select.POLLIN)

    def order(self, content: memoryview) -> bool:
        """Send the program to fork; returns whether it was understood."""
        poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        try:
            while len(content):
                content = content[self.control.send(content[:_ORDER]) :]
            return bool(poll.poll(_COMPILE_SECONDS * 1000) and self.control.recv(1))
        except OSError:
            return False

    def wake(self) -> None:
        """Continue it, in case the program has stopped it."""
        signal.pidfd_send_signal(self.handle, signal.SIGCONT)

    def has_ended(self) -> bool:
        return bool(self._end.poll(0))

    def end(self) -> None:
        signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        os.waitid(os.P_PIDFD, self.handle, os.WEXITED)

    def close(self) -> None:
        self.control.close()
        os.close(self.handle)


class Cases:
    """Handles EACH requests for a worker."""

    def __init__(self, worker: Runner, native: Native | None) -> None:
        self._worker = worker
        self._processors = os.sched_getaffinity(0)
        self._children = -1
        """The kernel's list of our children, in the order in which they became ours."""
        config = worker.config
        if native and config["namespaces"] and config["seccomp"] and not config["sessions"] and parent.possible(native):
            self._native = native
            self._setup = parent.Setup(native, worker.interpreter, self._processors)
            self._plan = Plan(os.fsencode(worker.interpreter.path), os.fsencode(worker.interpreter.work))
            with contextlib.suppress(OSError):  # not every kernel has it
                self._children = os.open("/proc/self/task/1/children", os.O_RDONLY | os.O_CLOEXEC)
        self._cancel_poll = select.poll()
        self._cancel_poll.register(worker.channel.fileno(), select.POLLIN)
        self._parent: Parent | None = None
        self._parents_left = 0

    def run(self, header: Request) -> None:
        worker, request = self._worker, self._worker.request
        count, processor, batch_results = frames.CASES.unpack_from(request, header.order_end)
        sizes = header.order_end + frames.CASES.size
        at = sizes + count * frames.CASE.size
        order, fetch = request[: header.order_end], request[header.stdin_end : header.end]
        python = header.operation == frames.EACH_PYTHON
        request[0] = frames.RUN_PYTHON if python else frames.RUN_COMMAND
        able = python and count > 1 and self._children >= 0 and header.open_files >= _OPEN_FILES
        self._parents_left = _MOST_PARENTS if able else 0
        worker.prepares = not able
        due = count if batch_results else 0
        worker.replies.patience = LONG_PATIENCE if batch_results else SHORT_PATIENCE
        self._processor = {processor} & self._processors or self._processors
        for index in range(count):
            (size,) = frames.CASE.unpack_from(request, sizes + index * frames.CASE.size)
            stdin, at = request[at : at + size], at + size
            if index and self._cancel_poll.poll(0):
                worker.give_up()
                break
            reason = self._fork(header, order, stdin, fetch) if self._parents_left else -1
            if index == due:  # then after twice as many: a caller that finds a wrong one needs no more
                worker.replies.flush()
                due = 2 * index + 1
            if reason < 0:
                worker.replies.flush()
                reason = worker.run_child(header, order, stdin, fetch)
            if reason == frames.CANCELLED or worker.retiring:
                break
            worker.directories.forget_times()
        worker.replies.flush()
        if not self._end_parent():
            worker.retiring = not worker.directories.clean(worker.interpreter.path)

    def _make_parent(self, header: Request, order: memoryview) -> bool:
        worker = self._worker
        worker.drop_ready()  # only the parent may be alive beside the cases
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._processor)
        self._parent = made = Parent(self._setup, worker.null)
        worker.watch.ours.add(made.pid)
        if not made.order(order):
            self._parents_left = 0
            self._end_parent()
            return False
        self._soon = min(_SOON, header.wall_seconds)
        self._worker_writes_main = parent.worker_writes_main(header)
        code = frames.REQUEST.size + header.meta_size
        self._code = worker.request[code : code + header.code_size]
        self._set_plan(made)
        return True

    def _set_plan(self, made: Parent) -> None:
        """Point the native plan at this parent's cases."""
        worker, plan, cgroup = self._worker, self._plan, self._worker.watch.cgroup
        plan.control, plan.children = made.control.fileno(), self._children
        plan.parent, plan.parent_handle = made.pid, made.handle
        plan.soon_nanoseconds = int(self._soon * 1e9)
        plan.text, plan.text_size = (address_of(self._code), len(self._code)) if self._worker_writes_main else (None, 0)
        plan.free_inodes = worker.directories.free_inodes
        plan.events = -1 if cgroup is None else cgroup.events_file
        if cgroup is not None:
            plan.told, plan.told_size = cgroup.events, len(cgroup.events)
        for ours, theirs in ((worker.out, plan.out), (worker.err, plan.err)):
            theirs.memory, theirs.limit = address_of(ours.memory), ours.limit

    def _end_parent(self) -> bool:
        """End the parent, if there is one, and any other process. Returns whether there were no others."""
        made, self._parent = self._parent, None
        if made is None:
            return True
        alone = self._is_alone(made)
        if alone:
            made.end()
        else:
            self._worker.end_all()
        made.close()
        self._worker.watch.ours.clear()
        os.sched_setaffinity(0, self._processors)
        signal.sigtimedwait(_CHILD_ENDS, 0)  # or the next case would seem to end before it started
        return alone

    def _is_alone(self, made: Parent) -> bool:
        """Whether the parent is the only process. Every process in the jail descends from a child of ours, PID 1."""
        return os.pread(self._children, _LIST, 0) == b"%d " % made.pid and not made.has_ended()

    # ---------------------------------------------------------------------------------------------------- one case
    def _fork(self, header: Request, order: memoryview, stdin: memoryview, fetch: memoryview) -> int:
        """Run one case in a fork of the parent and reply. Returns the reason for its end, or -1 if it did not start."""
        worker = self._worker
        quick = len(stdin) <= select.PIPE_BUF
        # A quick case sets the streams itself, and has the limits of the case before it.
        if self._parent is None or not quick or worker.watch.inspects_processes:
            worker.begin(header)
        worker.extra.reset(_WHY)
        if self._parent is None and not self._make_parent(header, order):
            return -1
        made = self._parent
        assert made is not None
        worker.starved = 0.0
        start, waited = time.monotonic(), worker.watch.starvation.of_worker()
        reason, found = frames.ENDED, None
        if quick:
            state = self._run_quickly(stdin)
            if state >= ENDED and time.monotonic() - start > header.wall_seconds:
                worker.starved = worker.watch.starvation.late_since(waited)  # it ended long ago
            if state == CLEAN and not len(fetch) and self._plan.status != _REFUSED:
                return worker.conclude_clean(*self._ending(), time.monotonic() - start)
            if state in (ALONE, CLEAN):
                found = self._ending()
            elif state != NOT_BEGUN:
                case = Case(self._plan.out.handle, self._plan.err.handle)
                if state == ENDED:
                    case.pid, case.ending = self._plan.pid, self._ending()
                reason, found = self._finish_case(case, stdin[:0], start, header), case.ending
        else:
            case, rest = self._start(stdin)
            reason, found = self._finish_case(case, rest, start, header), case.ending
        wall = time.monotonic() - start
        if found is not None and found.status == _REFUSED:
            self._receive_refusal()
        if found is None or not self._is_alone(made):
            self._parents_left -= 1
            self._end_parent()
        if found is None:
            return -1
        reason = worker.conclude(reason, *found, wall, fetch, hold=True)
        if self._parent is not None:
            self._set_plan(made)  # the memory group's events may have changed
        return reason

    def _run_quickly(self, stdin: memoryview) -> int:
        worker, plan = self._worker, self._plan
        plan.input, plan.input_size = address_of(stdin), len(stdin)
        state = self._native.run_case(ctypes.byref(plan))
        for ours, theirs in ((worker.out, plan.out), (worker.err, plan.err)):
            ours.size, ours.seen = theirs.size, theirs.seen
        return state

    def _ending(self) -> Ending:
        plan = self._plan
        return Ending(plan.status, plan.cpu_microseconds / 1e6, plan.peak_kibibytes * 1024)

    def _start(self, stdin: memoryview) -> tuple[Case, memoryview]:
        """Start a case whose input is too long for a pipe. Returns it, and the rest of its input."""
        assert self._parent is not None
        if self._worker_writes_main:
            program.write_main(self._worker.interpreter.path, self._code)
        (stdin_end, feed), (stdout, out), (stderr, err) = os.pipe(), os.pipe(), os.pipe()
        case = Case(stdout, stderr, feed)
        os.set_blocking(feed, False)
        rest = case.feed(stdin)
        streams = array.array("i", (stdin_end, out, err))
        with contextlib.suppress(OSError):  # the parent is gone: it will not start
            self._parent.control.sendmsg([parent.CASE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        for handle in streams:
            os.close(handle)
        return case, rest

    def _finish_case(self, case: Case, rest: memoryview, start: float, header: Request) -> int:
        """Return the reason for its end, if it has started."""
        worker, reason = self._worker, frames.ENDED
        if case.ending is None:
            self._await(case, start + self._soon)
        if case.pid and case.ending is None:
            worker.replies.flush()
            worker.watch.begin_here()
            reason = worker.pump(case, os.pidfd_open(case.pid), rest, start, header)
            os.kill(case.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
            case.await_end()
        worker.out.drain(case.stdout, worker.scratch)
        worker.err.drain(case.stderr, worker.scratch)
        case.close()
        if reason == frames.ENDED and max(worker.out.seen, worker.err.seen) > header.flood_bytes:
            return frames.OUTPUT_EXCEEDED
        return reason

    def _await(self, case: Case, until: float) -> None:
        """Wait for the case to start, as long as that takes, and for its end until `until`."""
        made = self._parent
        assert made is not None
        give_up = until + _FORK_SECONDS
        while True:
            left = until - time.monotonic()  # also while children keep ending: a case can create many
            a_child_ended = left > 0 and signal.sigtimedwait(_CHILD_ENDS, left) is not None
            # The first child after the parent is the case: processes it leaves to us come later.
            children = [int(pid) for pid in os.pread(self._children, _LIST, 0).split()]
            if children[:1] == [made.pid] and children[1:]:
                case.pid = children[1]
                case.await_end(os.WNOHANG)
                if case.ending is not None or not a_child_ended:
                    return
            elif not a_child_ended:
                made.wake()
                until = time.monotonic() + _SOON
                if until > give_up or made.has_ended():
                    return

    def _receive_refusal(self) -> None:
        """Receive the reason why a case could not be set up."""
        assert self._parent is not None
        with contextlib.suppress(OSError):
            size = self._parent.control.recv_into(self._worker.scratch, 0, socket.MSG_DONTWAIT)
            self._worker.extra.put(self._worker.scratch[:size])
