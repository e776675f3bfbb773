"""Runs one program to its end: forks it, moves its bytes, enforces its limits, kills what is left, and replies.

`Worker` and `Cases` decide which program runs next; what both need is here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from typing import Any

from . import collect, frames, program
from .child import KEPT, Child, Pipes, Stream, private_memory, reap, reap_orphans, write_all
from .frames import Request
from .replies import Replies
from .root import WritableDirectories
from .watch import TICK, Cgroup, Watch

NOTICEABLE = 0.005
"""Seconds. Time limits are not extended by less."""
GRACE = 0.1
"""Seconds between asking a program to stop at its limit and killing it."""
_PIPE = 65536


class Runner:
    def __init__(
        self, channel: socket.socket, launcher: socket.socket, config: dict[str, Any], cgroup: Cgroup | None
    ) -> None:
        self.channel = channel
        self.launcher = launcher
        """The launcher, which kills our descendants for us if we cannot see them ourselves."""
        self.config = config
        self.alone = config["alone"]
        """Whether kill(-1) reaches only this worker's programs."""
        self.interpreter = program.Interpreter(
            config["work"],
            config["environment"],
            data_factor=config["data_factor"],
            sessions=config["sessions"],
            scope=config["scope"],
            others=config.get("other_processes", 0),
        )
        self.watch = Watch(cgroup, config["writable"], config["disk_bytes"], pidns=config["namespaces"])
        self.request = private_memory(KEPT)
        self.replies = Replies(channel)
        self.scratch = private_memory(_PIPE)
        self.out, self.err, self.extra = Stream(), Stream(), Stream()
        self.ready: Child | None = None
        self.prepares = True
        """Whether to prepare a child ahead of the next request."""
        self.retiring = False
        self.starved = 0.0
        """Seconds that the program or cell waited for a CPU, if it was late."""
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        program.install_handlers()
        self.directories = WritableDirectories(config)

    def run_child(self, header: Request, order: memoryview, stdin: memoryview, fetch: memoryview) -> int:
        """Run a program in a new process and reply. Returns the reason for its end."""
        child, self.ready = self.ready or Child(self.interpreter, self.null), None
        self.begin(header, child.pid)
        start = time.monotonic()
        self._order(child, order)
        reason = self.pump(child, os.pidfd_open(child.pid), stdin, start, header)
        wall = time.monotonic() - start
        status, usage = self._end(child)
        self.extra.drain(child.status, self.scratch)
        cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
        reason = self.conclude(reason, status, cpu, peak, wall, fetch)
        child.close()
        return reason

    def begin(self, header: Request, first: int = 0) -> None:
        self._reset(header)
        self.watch.begin(header, first)

    def conclude(
        self, reason: int, status: int, cpu: float, peak: int, wall: float, fetch: memoryview, *, hold: bool = False
    ) -> int:
        """Everything is dead: fetch files, clean up, reply. If it was refused, `extra` says why."""
        # Call `verdict` in any case, so that OOM kills are not counted again. A refused program has no time limit.
        found = self.watch.verdict(0.0 if self.extra.size else wall - self.starved, cpu, peak)
        reason = found if reason == frames.ENDED else reason
        if reason == frames.ENDED and self.extra.size:
            reason = frames.REFUSED
        else:
            self.extra.reset(0)
            if len(fetch):
                self._collect(fetch)
        self.retiring = not self.directories.clean(self.interpreter.path)
        self._respond(reason, status, cpu, peak, wall, hold=hold)
        return reason

    def conclude_clean(self, status: int, cpu: float, peak: int, wall: float) -> int:
        """Like `conclude`, if nothing was OOM-killed, no output was truncated and there are no files. Sent later."""
        reason = self.watch.verdict(wall - self.starved, cpu, peak, killed=False)
        numbers = (reason, 0, status, wall, cpu, self.starved, peak)
        self.replies.put(numbers, (self.out, self.err, self.extra), hold=True)
        return reason

    def _reset(self, header: Request) -> None:
        self.out.reset(header.output_bytes)
        self.err.reset(header.output_bytes)
        self.extra.reset(4096)
        self.starved = 0.0

    def _order(self, child: Child, order: memoryview) -> None:
        write_all(child.command, order)  # if it died while reading, its wait status shows it
        os.close(child.command)
        child.command = -1

    def pump(self, child: Pipes, ended: int, stdin: memoryview, start: float, header: Request) -> int:
        """Move bytes until the program's first process is gone or a limit is reached. Returns the reason.

        `ended` (a pidfd) marks its end, not the closing of its pipes: a daemon that keeps them open delays nothing.
        """
        poll = select.poll()
        streams = {child.stdout: self.out, child.stderr: self.err}
        for handle in (child.stdout, child.stderr, ended, self.channel.fileno()):
            poll.register(handle, select.POLLIN)
        stdin = child.feed(stdin)
        if len(stdin):
            poll.register(child.stdin, select.POLLOUT)
        reason, waited, deadline = -1, b"", start + header.wall_seconds
        while reason < 0:
            timeout, tick = self.watch.next_wait(deadline)
            waited = self.watch.starvation.of_worker()
            events = poll.poll(timeout)
            for handle, _ in events:
                if handle == ended:
                    reason = frames.ENDED
                elif handle in streams:
                    if not streams[handle].take(handle, self.scratch):
                        poll.unregister(handle)
                    elif streams[handle].seen > header.flood_bytes:
                        reason = frames.OUTPUT_EXCEEDED
                elif handle == child.stdin:
                    stdin = child.feed(stdin)
                    if not len(stdin):
                        poll.unregister(handle)
                else:
                    self.cancelled()
                    reason = frames.CANCELLED
            if reason < 0 and (not events or timeout == 0):  # check even if there is always more to read
                reap_orphans({child.pid, *self.watch.ours})
                if tick:
                    reason = self.watch.check()
                    self._sample_before_deadline(deadline)
                else:
                    deadline = self._extended(start, header)
                    if deadline < time.monotonic() + NOTICEABLE:
                        reason = self._too_late(header)
        if reason == frames.ENDED and time.monotonic() > deadline:  # as observed
            self.starved = self.watch.starved() + self.watch.starvation.late_since(waited)
        if reason in (frames.TIMED_OUT, frames.CPU_EXCEEDED):
            self._ask_to_stop(child, poll, ended, streams)
        os.close(ended)
        for handle, stream in streams.items():
            stream.drain(handle, self.scratch)
        return reason

    def _sample_before_deadline(self, deadline: float) -> None:
        """Shortly before the deadline: see `Starvation.seconds`."""
        if deadline - time.monotonic() < 2 * TICK:
            self.watch.starved()

    def _extended(self, start: float, header: Request) -> float:
        """The deadline, extended by the time the program waited for a CPU: that is not its fault."""
        self.starved = self.watch.starved()
        return start + header.wall_seconds + min(self.starved, frames.patience(header.wall_seconds))

    def _too_late(self, header: Request) -> int:
        return frames.STARVED if self.starved > frames.patience(header.wall_seconds) else frames.TIMED_OUT

    def give_up(self) -> None:
        """The host cancelled the batch between two cases."""
        self.cancelled()
        for stream in (self.out, self.err, self.extra):
            stream.reset(0)
        self._respond(frames.CANCELLED)

    def cancelled(self) -> None:
        if not self.channel.recv(frames.REQUEST.size):
            os._exit(0)

    def _ask_to_stop(self, child: Pipes, poll: select.poll, ended: int, streams: dict[int, Stream]) -> None:
        """Send SIGXCPU: by default it kills a program at once; our Python programs flush their output first."""
        os.kill(child.pid, signal.SIGXCPU)
        until = time.monotonic() + GRACE
        while (left := until - time.monotonic()) > 0:
            for handle, _ in poll.poll(left * 1000):
                if handle == ended:
                    return
                if (handle in streams and not streams[handle].take(handle, self.scratch)) or handle not in streams:
                    poll.unregister(handle)

    def _end(self, child: Child) -> tuple[int, resource.struct_rusage]:
        """Kill everything the program started and reap it. Returns the status of its first process."""
        os.kill(child.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        _, status, usage = os.wait4(child.pid, 0)
        self.end_all()
        return status, usage

    def end_all(self) -> None:
        if self.alone:  # at once: nothing can fork past it, and every orphan is ours to reap
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
                reap()
        else:
            self.launcher.send(b"k")
            self.launcher.recv(1)
            reap()

    def drop_ready(self) -> None:
        if self.ready is not None:
            self._end(self.ready)
            self.ready.close()
            self.ready = None

    def _collect(self, names: memoryview) -> None:
        """Read files back through a child process: names and contents never enter this process's heap."""
        self.watch.make_room(frames.MAX_FETCH_BYTES)
        self.extra.reset(frames.MAX_FETCH_BYTES)
        self._helper(collect.read_files, names, self.extra)

    def _respond(
        self, reason: int, status: int = 0, cpu: float = 0.0, peak: int = 0, wall: float = 0.0, *, hold: bool = False
    ) -> None:
        flags = (frames.STDOUT_CUT if self.out.cut else 0) | (frames.STDERR_CUT if self.err.cut else 0)
        flags |= (frames.RETIRING if self.retiring else 0) | (frames.FILES_CUT if self.extra.cut else 0)
        streams = (self.out, self.err, self.extra)
        self.replies.put((reason, flags, status, wall, cpu, self.starved, peak), streams, hold=hold)

    # ------------------------------------------------------------------------------------------------- files
    def _helper(self, task: Any, order: memoryview, answer: Stream) -> int:
        order_out, order_in = os.pipe()
        answer_out, answer_in = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(order_out, program.COMMAND)
            os.dup2(answer_in, program.STATUS)
            os.closerange(program.STATUS + 1, 1 << 20)
            collect.perform(task, self.interpreter.work, self.config["namespaces"])
        os.close(order_out)
        os.close(answer_in)
        os.set_blocking(order_in, False)
        with contextlib.suppress(BrokenPipeError):
            while len(order) and _keeps_up(pid, order_in, select.POLLOUT):
                order = order[os.write(order_in, order) :]
        os.close(order_in)
        while _keeps_up(pid, answer_out, select.POLLIN) and answer.take(answer_out, self.scratch):
            pass
        os.close(answer_out)
        if _is_stopped(pid):
            os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]


def _keeps_up(pid: int, handle: int, event: int) -> bool:
    """Wait until the helper at the other end of `handle` has done its part; False if it was stopped instead.

    A session's code can stop it, since it runs as the same user. Then nothing more would ever arrive.
    """
    poll = select.poll()
    poll.register(handle, event)
    while not poll.poll(100):
        if _is_stopped(pid):
            return False
    return True


def _is_stopped(pid: int) -> bool:
    state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return state is not None and state.si_code == os.CLD_STOPPED
