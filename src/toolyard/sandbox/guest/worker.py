"""A worker: PID 1 of its own jail. Takes one request at a time, forks the program, waits for its end, cleans up.

It never runs untrusted code and reads only the numbers in a request's header. All request and output bytes live in
memory that forks do not inherit (`MADV_DONTFORK`), so no program finds traces of an earlier one. A result is sent only
when every process is dead and every file is gone.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import time
from typing import Any, NoReturn

from . import collect, frames, warmth
from .batch.cases import Cases
from .child import KEPT, BecomeError, Child, private_memory, reap_orphans, write_all
from .frames import Request
from .runner import NOTICEABLE, Runner
from .watch import Cgroup

CELL_GRACE = 1.0
"""Seconds between asking a cell to stop and ending its session, which is worth waiting for."""
_REPLY = 8 << 20


class Worker(Runner):
    def __init__(
        self, channel: socket.socket, launcher: socket.socket, config: dict[str, Any], cgroup: Cgroup | None
    ) -> None:
        super().__init__(channel, launcher, config, cgroup)
        self.session: Child | None = None
        self.cases = Cases(self, config["library"])

    def serve(self) -> NoReturn:
        """Serve requests until the host closes its end."""
        self.directories.settle()
        gc.collect()
        warmth.fill_gaps()
        gc.freeze()
        try:
            self._serve()
        except BecomeError as forked:
            # Kept: releasing it and the frames it has left would be work for every child.
            self.forked = forked
        self.forked.role()

    def _serve(self) -> NoReturn:
        while True:
            if self.prepares and self.ready is None and self.session is None:
                self.ready = Child(self.interpreter, self.null)
            header = self._receive()
            operation = header.operation
            if operation in (frames.RUN_PYTHON, frames.RUN_COMMAND):
                self._run(header)
            elif operation in (frames.EACH_PYTHON, frames.EACH_COMMAND):
                self.cases.run(header)
            elif operation == frames.OPEN_SESSION:
                self._open_session(header)
            elif operation == frames.CELL:
                self._cell(header)
            elif operation in (frames.WRITE_FILES, frames.READ_FILES):
                self._files(header)
            self.replies.flush()
            if self.retiring:
                os._exit(0)
            if self.session is None:
                self.directories.forget_times()
            self._shrink()

    # ----------------------------------------------------------------------------------------------- frames
    def _receive(self) -> Request:
        if self.session is not None:
            self._guard_idle_session()
        have = self._receive_at_least(0, frames.REQUEST.size)
        header = frames.read_request(self.request)
        if header.operation == frames.CANCEL:
            return header  # arrived after its run ended: nothing to cancel
        if header.end > len(self.request):
            self.watch.make_room(header.end)
            larger = private_memory(header.end)
            larger[:have] = self.request[:have]
            self.request = larger
        self._receive_at_least(have, header.end)
        return header

    def _receive_at_least(self, have: int, wanted: int) -> int:
        while have < wanted:
            got = self.channel.recv_into(self.request[have:wanted])  # not what may follow: a cancellation
            if not got:
                os._exit(0)  # the host is gone: end the jail
            have += got
        return have

    def _shrink(self) -> None:
        if len(self.request) > KEPT:
            self.request = private_memory(KEPT)
        for stream in (self.out, self.err, self.extra):
            stream.shrink()

    # --------------------------------------------------------------------------------------------- programs
    def _run(self, header: Request) -> None:
        stdin = self.request[header.order_end : header.stdin_end]
        fetch = self.request[header.stdin_end : header.end]
        self.prepares = True
        self.run_child(header, self.request[: header.order_end], stdin, fetch)

    # --------------------------------------------------------------------------------------------- sessions
    def _open_session(self, header: Request) -> None:
        child, self.ready = self.ready or Child(self.interpreter, self.null), None
        self._reset(header)
        self.watch.begin(header)
        child.close_input()
        write_all(child.command, self.request[: header.order_end])
        while self.extra.size < 4 and self.extra.take(child.status, self.scratch):
            pass
        if bytes(self.extra.view()) == bytes(4):
            self.session = child
            self.extra.reset(0)
            self._respond(frames.ENDED)
        else:
            self._lose(child)
            self._respond(frames.REFUSED)

    def _cell(self, header: Request) -> None:
        child = self.session
        if child is None:
            self._reset(header)
            self._respond(frames.LOST)
            return
        self.out.reset(header.output_bytes)
        self.err.reset(header.output_bytes)
        self.extra.reset(_REPLY)
        self.starved = 0.0
        self.watch.begin(header)
        self.watch.begin_here()
        start = time.monotonic()
        alive = write_all(child.command, self.request[: header.order_end])
        reason = frames.ENDED
        if alive:
            reason, alive = self._pump_cell(child, start, header)
        wall, status = time.monotonic() - start, 0
        if not alive:
            status = self._lose(child)
            reason = self.watch.verdict(wall - self.starved) if reason == frames.ENDED else reason
        elif reason == frames.ENDED and wall - self.starved > header.wall_seconds:
            reason = frames.TIMED_OUT
        self._respond(reason, status, wall=wall)

    def _pump_cell(self, child: Child, start: float, header: Request) -> tuple[int, bool]:
        """Move bytes until the cell's answer is whole. At the deadline send SIGINT, which most code obeys, then kill.

        Returns the reason, and whether the session is still alive.
        """
        poll = select.poll()
        ended = os.pidfd_open(child.pid)
        streams = {child.stdout: self.out, child.stderr: self.err, child.status: self.extra}
        for handle in (*streams, ended, self.channel.fileno()):
            poll.register(handle, select.POLLIN)
        reason, alive, waited, deadline = frames.ENDED, True, b"", start + header.wall_seconds
        while alive and not self._answered():
            timeout, tick = self.watch.next_wait(deadline)
            waited = self.watch.starvation.of_worker()
            events = poll.poll(timeout)
            for handle, _ in events:
                if handle not in streams:
                    alive = False
                    if handle != ended:
                        self.cancelled()
                elif not streams[handle].take(handle, self.scratch):
                    poll.unregister(handle)
                elif streams[handle].seen > header.flood_bytes:
                    reason, alive = frames.OUTPUT_EXCEEDED, False
            due = alive and (not events or timeout == 0) and not self._answered()
            if due and tick:
                reap_orphans({child.pid})
                found = self.watch.check()
                reason, alive = (found, False) if found >= 0 else (reason, alive)
                self._sample_before_deadline(deadline)
            elif due and reason == frames.ENDED:
                deadline = self._extended(start, header)
                if deadline < time.monotonic() + NOTICEABLE:
                    reason, deadline = frames.TIMED_OUT, time.monotonic() + CELL_GRACE
                    os.kill(child.pid, signal.SIGINT)
            elif due:
                alive = False
        if reason == frames.ENDED and time.monotonic() > deadline:
            self.starved = self.watch.starved() + self.watch.starvation.late_since(waited)
        os.close(ended)
        self.out.drain(child.stdout, self.scratch)
        self.err.drain(child.stderr, self.scratch)
        return reason, alive

    def _answered(self) -> bool:
        return self.extra.size >= 4 and self.extra.size >= 4 + int.from_bytes(self.extra.memory[:4], "little")

    def _lose(self, child: Child) -> int:
        """The session's process cannot be saved: end it, and this worker with it."""
        status, _ = self._end(child)
        child.close()
        self.session = None
        self.retiring = True
        return status

    def _guard_idle_session(self) -> None:
        """Between cells, threads of the session may still use more: keep watching while no request arrives."""
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        while self.session is not None and not poll.poll(100):
            if self.watch.check() >= 0:
                self._end(self.session)
                self.session.close()
                self.session = None

    # ------------------------------------------------------------------------------------------------ files
    def _files(self, header: Request) -> None:
        self._reset(header)
        self.extra.reset(frames.MAX_FETCH_BYTES)
        task = collect.write_files if header.operation == frames.WRITE_FILES else collect.read_files
        order = self.request[frames.REQUEST.size : frames.REQUEST.size + header.meta_size]
        failed = self._helper(task, order, self.extra)
        self._respond(frames.REFUSED if failed else frames.ENDED)
