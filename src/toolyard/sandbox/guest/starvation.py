"""How long a program waited for a processor: on a machine with too much to do, that is not the program's time.

The kernel counts, for every thread, how long it ran and how long it was ready to run and did not (`schedstat`). What a
hypervisor takes away (steal) is in neither; it is the machine's, and shared out by how long a thread has run.

A program must not gain time by getting in its own way. So of all its threads that one counts which was held up most,
and from its waiting all is taken away that the program's other threads and processes have computed: as long as they
compute, somebody of the program has a processor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import NamedTuple

_MOST_THREADS = 256
"""That are looked at."""
_NANO = 1e-9
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Thread(NamedTuple):
    ran: float
    waited: float
    """Seconds, since it began. That it waits now, the kernel adds when it runs again."""
    ready: bool = False
    """It runs now, or could."""


class Seen(NamedTuple):
    """Of a program at some time."""

    threads: dict[str, Thread]
    """By their numbers."""
    ran: float
    """What all of it has computed, threads and processes that are gone included."""


NOTHING = Seen({}, 0.0)


def lost(before: Seen, now: Seen, steal: float) -> float:
    """Seconds that a program lost in between. `steal`: seconds taken away for each that a processor worked."""
    ran = now.ran - before.ran
    most = 0.0
    for number, thread in now.threads.items():
        began = before.threads.get(number, Thread(0.0, 0.0))
        own, waited = thread.ran - began.ran, thread.waited - began.waited
        most = max(most, max(waited - max(ran - own, 0.0), 0.0) + own * steal)
    return most


class Starvation:
    """Looks at the programs of one worker. Where the kernel does not tell, nobody starves.

    What it reads when a program begins, it understands only when that is asked for: most programs are not late.
    """

    def __init__(self) -> None:
        self._own = _opened("/proc/self/schedstat")
        self._machine = _opened("/proc/stat")
        self._before: Seen | tuple[int, bytes] = NOTHING
        self._machine_before = b""
        self._same_since: dict[str, tuple[Thread, float]] = {}
        """Of each thread, what was seen of it last, and since when it has been so."""

    def begin(self, before: Seen = NOTHING) -> None:
        """A program begins. `before`: what there is of it already, whose time does not count."""
        self._before = before
        self._machine_before = _read_again(self._machine)
        self._same_since = {}

    def begin_alone(self, pid: int) -> None:
        """One that is a process with one thread, and no children yet."""
        self.begin()
        self._before = pid, _read(f"/proc/{pid}/schedstat")

    def seconds(self, now: Seen, at: float) -> float:
        """What the program that began last has lost until now, which is `at`. To be asked a moment before it counts:
        only then is it known who could have run since, and did not."""
        threads: dict[str, Thread] = {}
        for number, thread in now.threads.items():
            last, since = self._same_since.get(number, (None, at))
            self._same_since[number] = thread, since if thread == last and thread.ready else at
            threads[number] = thread._replace(waited=thread.waited + at - self._same_since[number][1])
        if not isinstance(self._before, Seen):
            self._before = alone(*self._before)
        return lost(self._before, Seen(threads, now.ran), self._steal())

    def of_worker(self) -> bytes:
        """How long the worker itself has waited for a processor, for `late_since`."""
        return _read_again(self._own)

    def late_since(self, before: bytes) -> float:
        """Seconds that the worker was ready to run since then, and did not."""
        return _thread(_read_again(self._own)).waited - _thread(before).waited if before else 0.0

    def _steal(self) -> float:
        """Seconds that a hypervisor has taken away for each that a processor worked, since the program began."""
        if not self._machine_before:
            return 0.0
        stolen, worked = _processors(_read_again(self._machine))
        stolen_before, worked_before = _processors(self._machine_before)
        return (stolen - stolen_before) / max(worked - worked_before, _TICK)


def see(processes: Iterable[str]) -> Seen:
    threads: dict[str, Thread] = {}
    ran = 0.0
    for pid in processes:
        with contextlib.suppress(OSError, ValueError):  # it ends under our eyes
            ran += _ran(pid)
            for number in os.listdir(f"/proc/{pid}/task")[: _MOST_THREADS - len(threads)]:
                state = _read(f"/proc/{pid}/task/{number}/stat").rpartition(b")")[2][1:2]
                schedstat = _read(f"/proc/{pid}/task/{number}/schedstat")
                threads[number] = _thread(schedstat)._replace(ready=state == b"R")
    return Seen(threads, ran)


def alone(pid: int, schedstat: bytes) -> Seen:
    """The same of a process that has one thread and has had no children, by what the kernel says of it."""
    if not schedstat:
        return NOTHING
    thread = _thread(schedstat)
    return Seen({str(pid): thread}, thread.ran)


def _opened(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _read(path: str) -> bytes:
    """Empty if it is not there, or not any more."""
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
    """Seconds, ever and of all processors: taken away by a hypervisor, and worked."""
    user, nice, system, _, _, interrupts, softer, stolen = map(int, stat.split()[1:9])
    return stolen * _TICK, (user + nice + system + interrupts + softer) * _TICK


def _ran(pid: str) -> float:
    """Seconds that a process has computed, its threads and children that are gone included."""
    return sum(map(int, _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[11:15])) * _TICK
