"""Measures how long a program waited for a CPU: on an overloaded machine, that is not the program's fault.

For every thread, the kernel counts how long it ran and how long it was ready but did not run (`schedstat`). Time that a
hypervisor takes away (steal) is in neither; it is measured for the machine, and attributed by how long a thread ran.

A program must not gain time by getting in its own way. So only the thread that was delayed most counts, and from its
waiting time we subtract all the time that the program's other threads and processes ran: while they run, the program
has a CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import NamedTuple

_MOST_THREADS = 256
"""Threads examined at most."""
_NANO = 1e-9
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Thread(NamedTuple):
    ran: float
    waited: float
    """Seconds since it started. The kernel adds the current wait only when the thread runs again."""
    ready: bool = False
    """Whether it is running now or could be."""


class Snapshot(NamedTuple):
    """The state of a program at some time."""

    threads: dict[str, Thread]
    """By thread id."""
    ran: float
    """CPU seconds of the whole program, including threads and processes that are gone."""


NOTHING = Snapshot({}, 0.0)


def lost(before: Snapshot, now: Snapshot, steal: float) -> float:
    """Seconds that a program lost in between. `steal`: seconds taken away per second of CPU work."""
    ran = now.ran - before.ran
    most = 0.0
    for number, thread in now.threads.items():
        began = before.threads.get(number, Thread(0.0, 0.0))
        own, waited = thread.ran - began.ran, thread.waited - began.waited
        most = max(most, max(waited - max(ran - own, 0.0), 0.0) + own * steal)
    return most


class Starvation:
    """Watches the programs of one worker. If the kernel provides no data, nothing counts as starved.

    What it reads when a program starts is parsed only on demand: most programs are not late.
    """

    def __init__(self) -> None:
        self._own = _opened("/proc/self/schedstat")
        self._machine = _opened("/proc/stat")
        self._before: Snapshot | tuple[int, bytes] = NOTHING
        self._machine_before = b""
        self._same_since: dict[str, tuple[Thread, float]] = {}
        """For each thread, its last state and since when it is unchanged."""

    def begin(self, before: Snapshot = NOTHING) -> None:
        """A program starts. `before`: its existing threads, whose earlier time does not count."""
        self._before = before
        self._machine_before = _read_again(self._machine)
        self._same_since = {}

    def begin_alone(self, pid: int) -> None:
        """Like `begin`, for a process with one thread and no children yet."""
        self.begin()
        self._before = pid, _read(f"/proc/{pid}/schedstat")

    def seconds(self, now: Snapshot, at: float) -> float:
        """Seconds that the current program has lost until `at`. Also call it shortly before the value is needed: only
        then is it known which threads could have run since and did not."""
        threads: dict[str, Thread] = {}
        for number, thread in now.threads.items():
            last, since = self._same_since.get(number, (None, at))
            self._same_since[number] = thread, since if thread == last and thread.ready else at
            threads[number] = thread._replace(waited=thread.waited + at - self._same_since[number][1])
        if not isinstance(self._before, Snapshot):
            self._before = alone(*self._before)
        return lost(self._before, Snapshot(threads, now.ran), self._steal())

    def of_worker(self) -> bytes:
        """The worker's own scheduling statistics, for `late_since`."""
        return _read_again(self._own)

    def late_since(self, before: bytes) -> float:
        """Seconds that the worker was ready to run since then but did not."""
        return _thread(_read_again(self._own)).waited - _thread(before).waited if before else 0.0

    def _steal(self) -> float:
        """Seconds taken away by a hypervisor per second of CPU work, since the program started."""
        if not self._machine_before:
            return 0.0
        stolen, worked = _processors(_read_again(self._machine))
        stolen_before, worked_before = _processors(self._machine_before)
        return (stolen - stolen_before) / max(worked - worked_before, _TICK)


def see(processes: Iterable[str]) -> Snapshot:
    threads: dict[str, Thread] = {}
    ran = 0.0
    for pid in processes:
        with contextlib.suppress(OSError, ValueError):  # it may end meanwhile
            ran += _ran(pid)
            for number in os.listdir(f"/proc/{pid}/task")[: _MOST_THREADS - len(threads)]:
                state = _read(f"/proc/{pid}/task/{number}/stat").rpartition(b")")[2][1:2]
                schedstat = _read(f"/proc/{pid}/task/{number}/schedstat")
                threads[number] = _thread(schedstat)._replace(ready=state == b"R")
    return Snapshot(threads, ran)


def alone(pid: int, schedstat: bytes) -> Snapshot:
    """Like `see`, for a process with one thread and no children so far, from its `schedstat`."""
    if not schedstat:
        return NOTHING
    thread = _thread(schedstat)
    return Snapshot({str(pid): thread}, thread.ran)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _read(path: str) -> bytes:
    """Return the content, or b"" if the file does not exist."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(handle, 1024)
    except OSError:
        return b""
    finally:
        os.close(handle)


def _read_again(handle: int) -> bytes:
    return os.pread(handle, 128, 0) if handle >= 0 else b""


def _thread(schedstat: bytes) -> Thread:
    ran, waited, *_ = schedstat.split()
    return Thread(int(ran) * _NANO, int(waited) * _NANO)


def _processors(stat: bytes) -> tuple[float, float]:
    """Seconds over all CPUs since boot: taken away by a hypervisor, and worked."""
    user, nice, system, _, _, interrupts, softer, stolen = map(int, stat.split()[1:9])
    return stolen * _TICK, (user + nice + system + interrupts + softer) * _TICK


def _ran(pid: str) -> float:
    """CPU seconds of a process, including its threads and children that are gone."""
    return sum(map(int, _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[11:15])) * _TICK
