"""Limits of a whole process tree: memory, processor time, disk.

With a cgroup the kernel enforces memory, and this only reads what happened. Without one the worker samples the tree
every few milliseconds, counts also what hides from resident size (files in memory, shared mappings that were let go),
and kills at the limit.
"""

from __future__ import annotations

import os
import resource
import time
from typing import Any

from . import frames

TICK = 0.02
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Cgroup:
    """The worker's own memory group, by files opened before it was jailed."""

    def __init__(self, limit: int, events: int) -> None:
        self._limit_file = limit
        self._events_file = events
        self._limit = -1
        self._kills = self.kills()

    def kills(self) -> int:
        for line in os.pread(self._events_file, 4096, 0).splitlines():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill":
                return int(value)
        return 0

    def set_limit(self, size: int) -> None:
        if size != self._limit:
            os.pwrite(self._limit_file, b"%d" % size, 0)
            self._limit = size
        self._kills = self.kills()

    def killed(self) -> bool:
        return self.kills() != self._kills


class Watch:
    """One run's limits that no per-process rlimit can express."""

    def __init__(self, cgroup: Cgroup | None, writable: list[str], disk_bytes: int, *, pidns: bool) -> None:
        self._cgroup = cgroup
        self._disk = writable[0]
        self._disk_bytes = disk_bytes
        self._pidns = pidns
        self._memory = self._space = 0
        self._cpu = 0.0
        self.needed = False
        self._next = 0.0
        self._cpu_before = 0.0

    def begin(self, header: tuple[Any, ...]) -> None:
        self._cpu, self._memory, self._space = header[2], header[3], header[7]
        if self._cgroup is not None:
            self._cgroup.set_limit(self._memory)
        by_sampling = self._pidns and self._cgroup is None
        self.needed = by_sampling or self._cpu != frames.NO_CPU_LIMIT or self._space < self._disk_bytes
        if self.needed:
            self._next = time.monotonic() + TICK
            self._cpu_before = self._reaped_seconds()

    def next_wait(self, deadline: float) -> tuple[float, bool]:
        """Milliseconds to wait for events, and whether it is a sample, rather than the deadline, that then is due."""
        now = time.monotonic()
        if self.needed and self._next < deadline:
            return max(self._next - now, 0.0) * 1000, True
        return max(deadline - now, 0.0) * 1000, False

    def check(self) -> int:
        """Take a sample. Returns the reason to stop, or -1."""
        self._next = time.monotonic() + TICK
        space = os.statvfs(self._disk)
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        if used > self._space and self._pidns:
            return frames.DISK_EXCEEDED
        if not self._pidns:
            return -1
        memory, seconds = self._sample()
        if self._cgroup is None and memory + used > self._memory and self._exact_memory() + used > self._memory:
            return frames.MEMORY_EXCEEDED
        if self._cpu != frames.NO_CPU_LIMIT and seconds > self._cpu:
            return frames.CPU_EXCEEDED
        return -1

    def verdict(self, cpu: float) -> int:
        """The reason for an end that looked like the program's own."""
        if self._cgroup is not None and self._cgroup.killed():
            return frames.MEMORY_EXCEEDED
        if self._cpu != frames.NO_CPU_LIMIT and cpu >= self._cpu:
            return frames.CPU_EXCEEDED
        return frames.ENDED

    def _reaped_seconds(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def _sample(self) -> tuple[int, float]:
        """Resident bytes (an upper bound: shared pages count once per process) and processor seconds of the tree."""
        pages, ticks = 0, 0
        for pid in _processes():
            try:
                with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                    fields = file.read(1024).rpartition(b")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21])
            if int(fields[20]) > self._memory:  # its address space alone is larger than the limit: look closer
                pages += _let_go_shared(pid) // _PAGE
        return pages * _PAGE, ticks / _TICKS_PER_SECOND + self._reaped_seconds() - self._cpu_before

    def _exact_memory(self) -> int:
        """Proportional sizes: pages shared with siblings and with the zygote count in part. Costs more; asked late."""
        total = 0
        for pid in _processes():
            total += _proportional(pid) + _let_go_shared(pid)
        return total


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _proportional(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            for line in file.read(4096).splitlines():
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # hidden by the process itself: then all of it counts
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read(256).split()[1]) * _PAGE
    except OSError:
        return 0


def _let_go_shared(pid: str) -> int:
    """Size of shared anonymous mappings: their pages stay in memory even when the process no longer maps them in."""
    total = 0
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            for line in file:
                if line.endswith(b"/dev/zero (deleted)\n"):
                    low, _, high = line.partition(b" ")[0].partition(b"-")
                    total += int(high, 16) - int(low, 16)
    except OSError:
        return 0
    return total
