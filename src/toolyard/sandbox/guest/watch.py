"""Limits of a whole process tree: memory, CPU time, disk.

Sampled every few milliseconds once a program runs longer than that. With a cgroup the kernel counts memory, and this
reads its counters. Without one the worker inspects the tree itself, including what resident size does not show (files
in memory, released shared mappings, page tables, data in sockets), and kills at the limit.
"""

from __future__ import annotations

import mmap
import os
import resource
import time

from . import frames
from .frames import Request
from .starvation import NOTHING, Starvation, see

TICK = 0.02
SLOW_TICK = 0.1
"""If a sample means walking a directory tree."""
OWN_MEMORY = 8 << 20
"""What the worker itself may use inside its group besides the program."""
OWN_PROCESSES = 5
"""In the same group: the launcher, the worker, a child prepared ahead or a parent of cases and its origin, a helper."""
CEILING = 128 << 20
"""How far beyond 125% of its limit a program can get within a sample before the kernel stops it."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_ENTRIES, _DEEPEST = 32768, 128
"""Limits for walking a tree to find its size. In a private root the file system itself counts."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Cgroup:
    """The worker's own memory group, through files opened before it was jailed."""

    def __init__(self, processes: int | None, limit: int, events: int, usage: int, statistics: int) -> None:
        self._processes_file = processes
        self._processes = -1
        self._limit_file = limit
        self.events_file = events
        self._usage_file = usage
        self._statistics_file = statistics
        self._limit = self._allowed = -1
        self.events = os.pread(events, 4096, 0)
        """The group's events, as last read."""

    def set_limit(self, size: int) -> None:
        """Allow `size`. The kernel's limit is higher, to leave room for growth between two samples.

        At the kernel's limit everything in the group stops, including this worker, until the OOM killer acts, which
        handles one group at a time for the whole machine. So sampling the counters stops programs earlier.
        """
        self._allowed = size
        ceiling = size + size // 4 + CEILING
        if ceiling != self._limit:
            os.pwrite(self._limit_file, b"%d" % ceiling, 0)
            self._limit = ceiling

    def set_processes(self, count: int) -> None:
        """How many processes may exist, including this worker."""
        if self._processes_file is not None and count != self._processes:
            os.pwrite(self._processes_file, b"%d" % count, 0)
            self._processes = count

    def exceeded(self) -> bool:
        """Whether more is in use than allowed, not counting what the kernel could reclaim (cached files)."""
        if int(os.pread(self._usage_file, 64, 0)) <= self._allowed:
            return False
        held = 0
        for line in os.pread(self._statistics_file, 8192, 0).splitlines():
            name, _, value = line.partition(b" ")
            if name in (b"rss", b"anon", b"shmem"):
                held += int(value)
        return held > self._allowed

    def lift_limit(self, size: int) -> None:
        """Make room for the worker's own copies of inputs and outputs, which count here too."""
        if size > self._limit:
            os.pwrite(self._limit_file, b"%d" % size, 0)
            self._limit = size

    def killed(self) -> bool:
        """Whether the OOM killer struck here since the last call."""
        before, self.events = self.events, os.pread(self.events_file, 4096, 0)
        return self.events != before and _kills(self.events) != _kills(before)


def _kills(events: bytes) -> int:
    for line in events.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill":
            return int(value)
    return 0


class Watch:
    """The limits of a run that per-process rlimits cannot express."""

    def __init__(self, cgroup: Cgroup | None, writable: list[str], disk_bytes: int, *, pidns: bool) -> None:
        self.cgroup = cgroup
        self._writable = writable
        self._tick = TICK if pidns else SLOW_TICK
        self._disk_bytes = disk_bytes
        self._pidns = pidns
        self.starvation = Starvation()
        self._inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        """Resident in every child from its start: pages shared with the zygote."""
        self._memory = self._space = 0
        self._seconds = self._cpu = 0.0
        self.inspects_processes = False
        """Whether to inspect the program's processes, because nothing else counts for us."""
        self._next = 0.0
        self._cpu_before = 0.0
        self.ours: set[int] = set()
        """Pids besides this one that are not the program's."""

    def make_room(self, size: int) -> None:
        """Call before the worker itself takes `size` bytes, while no program runs."""
        if self.cgroup is not None:
            self.cgroup.lift_limit(2 * size + OWN_MEMORY)

    def begin(self, header: Request, first: int = 0) -> None:
        """`first`: pid of the program's first process, if it exists already."""
        self._seconds, self._cpu = header.wall_seconds, header.cpu_seconds
        self._memory, self._space = header.memory_bytes, header.disk_bytes
        if self.cgroup is not None:
            self.cgroup.set_limit(self._memory + OWN_MEMORY + header.end)
            self.cgroup.set_processes(header.processes + OWN_PROCESSES)
        by_sampling = not self._pidns or self.cgroup is None
        self.inspects_processes = by_sampling or self._cpu != frames.NO_CPU_LIMIT or self._space < self._disk_bytes
        self._next = time.monotonic() + self._tick
        self._cpu_before = self._reaped_seconds()
        if first and self._pidns:
            self.starvation.begin_alone(first)
        else:
            self.starvation.begin()

    def next_wait(self, deadline: float) -> tuple[float, bool]:
        """Milliseconds to wait for events, and whether a sample (rather than the deadline) is due then."""
        now = time.monotonic()
        if self._next < deadline:
            return max(self._next - now, 0.0) * 1000, True
        return max(deadline - now, 0.0) * 1000, False

    def check(self) -> int:
        """Take a sample. Returns the reason to stop, or -1."""
        if self.cgroup is not None and (self.cgroup.killed() or self.cgroup.exceeded()):
            return frames.MEMORY_EXCEEDED
        self._next = time.monotonic() + self._tick
        if not self.inspects_processes:
            return -1
        used = self._used()
        if used > self._space:
            return frames.DISK_EXCEEDED
        if not self._pidns:  # we cannot use /proc: per-process limits have to do
            return -1
        memory, seconds = self._sample()
        if self.cgroup is None and memory + used > self._memory and self._exact_memory() + used > self._memory:
            return frames.MEMORY_EXCEEDED
        if self._cpu != frames.NO_CPU_LIMIT and seconds > self._cpu:
            return frames.CPU_EXCEEDED
        return -1

    def begin_here(self) -> None:
        """For what is already running: count its waiting time for a CPU from here on."""
        self._cpu_before = self._reaped_seconds()
        self.starvation.begin(see(self._processes()) if self._pidns else NOTHING)

    def starved(self) -> float:
        """Seconds that the program has waited for a CPU; 0 if we cannot use /proc."""
        if not self._pidns:
            return 0.0
        found = see(self._processes())
        found = found._replace(ran=found.ran + self._reaped_seconds() - self._cpu_before)
        return self.starvation.seconds(found, time.monotonic())

    def _used(self) -> int:
        if self._pidns:
            space = os.statvfs(self._writable[0])
            return (space.f_blocks - space.f_bfree) * space.f_frsize
        return sum(map(_tree_bytes, self._writable))

    def verdict(self, wall: float, cpu: float = 0.0, peak: int = 0, *, killed: bool | None = None) -> int:
        """The reason for an end that looked like the program's own. `wall`: seconds from its start to its end.
        `peak`: the largest resident size of a process. `killed`: whether the OOM killer struck, if known."""
        if killed is None:
            killed = self.cgroup is not None and self.cgroup.killed()
        if killed or peak > self._memory + self._inherited:  # the latter happened between two samples
            return frames.MEMORY_EXCEEDED
        if self._cpu != frames.NO_CPU_LIMIT and cpu >= self._cpu:
            return frames.CPU_EXCEEDED
        # It may have ended by itself before a late worker stopped it.
        return frames.TIMED_OUT if wall > self._seconds else frames.ENDED

    def _reaped_seconds(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def _sample(self) -> tuple[int, float]:
        """Bytes (an upper bound: shared pages count once per process) and CPU seconds of the tree."""
        pages = ticks = span = 0
        processes = self._processes()
        for pid in processes:
            try:
                with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                    fields = file.read(1024).rpartition(b")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21])
            span += int(fields[20])
        memory = pages * _PAGE
        if self.cgroup is None:
            # More address space than memory: look for memory that resident sizes do not show.
            memory += _in_sockets() + (_beyond_resident(processes) if span > self._memory else 0)
        return memory, ticks / _TICKS_PER_SECOND + self._reaped_seconds() - self._cpu_before

    def _exact_memory(self) -> int:
        """Proportional sizes: pages shared with siblings and the zygote count in part. Expensive, so used last."""
        processes = self._processes()
        return sum(map(_proportional, processes)) + _beyond_resident(processes) + _in_sockets()

    def _processes(self) -> list[str]:
        found = [name for name in os.listdir("/proc") if name.isdigit() and name != "1" and int(name) not in self.ours]
        return list(map(_with_memory, found))


def _with_memory(pid: str) -> str:
    """The id of a thread that shows the process's memory: not the first, if that has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        if len(threads) > 1:
            with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                if file.read(1024).rpartition(b")")[2].split()[0] == b"Z":
                    return threads[1]
    except OSError:
        pass
    return pid


def _tree_bytes(path: str) -> int:
    """Ignores deleted files. A tree that is too large, too deep or unreadable counts as a full disk."""
    handle = os.open(path, _FOLDER)
    try:
        return _bytes_below(handle, [_MOST_ENTRIES], _DEEPEST)
    except (OverflowError, PermissionError):
        return 1 << 62
    finally:
        os.close(handle)


def _bytes_below(folder: int, entries_left: list[int], levels_left: int) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            entries_left[0] -= 1
            if entries_left[0] < 0 or levels_left == 0:
                raise OverflowError
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    inner = os.open(entry.name, _FOLDER, dir_fd=folder)
                    try:
                        total += _bytes_below(inner, entries_left, levels_left - 1)
                    finally:
                        os.close(inner)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it may change meanwhile
    return total


def _proportional(pid: str) -> int:
    """Excludes files in memory and shared mappings, which are counted elsewhere, once."""
    sizes: dict[bytes, int] = {}
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            for line in file.read(4096).splitlines()[1:]:
                name, size, *_ = line.split()
                sizes[name] = int(size) * 1024
    except OSError:
        return 0  # gone, or hidden: `_beyond_resident` counts its whole address space
    return sizes[b"Pss:"] - sizes.get(b"Pss_Shmem:", 0)


def _beyond_resident(processes: list[str]) -> int:
    """What resident sizes leave out: shared mappings, page tables, and the kernel's records of mappings.

    Pages of a shared mapping stay in memory when the process releases them. A process that hides its mappings from us
    counts with its whole address space.
    """
    total = 0
    shared: dict[tuple[bytes, bytes], int] = {}
    for pid in processes:
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                for line in file:
                    total += _MAPPING_RECORD
                    span, _, offset, device, inode = line.split(None, 5)[:5]
                    if device == _SHARED_DEVICE:  # not the name, which the program can change
                        low, _, high = span.partition(b"-")
                        size = int(high, 16) - int(low, 16)
                        shared[inode, offset] = max(shared.get((inode, offset), 0), size)
            total += _status(pid, b"\nVmPTE:")
        except PermissionError:
            total += _status(pid, b"\nVmSize:")
        except OSError:
            continue
    return total + sum(shared.values())


def _status(pid: str, field: bytes) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            _, found, rest = file.read(4096).partition(field)
    except OSError:
        return 0
    return int(rest.split(None, 1)[0]) * 1024 if found else 0


def _in_sockets() -> int:
    """The most that can be in the buffers of all sockets of this network namespace."""
    try:
        with open("/proc/net/sockstat", "rb", buffering=0) as file:
            return int(file.read(64).split()[2]) * _SOCKET_BUFFER
    except OSError:
        return 0


def _socket_buffer() -> int:
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            return int(file.read())
    except OSError:
        return 212992


def _shared_device() -> bytes:
    """The device on which the kernel keeps shared memory that has no file."""
    with mmap.mmap(-1, _PAGE), open("/proc/self/maps", "rb") as file:
        return next((line.split()[3] for line in file if line.endswith(b"/dev/zero (deleted)\n")), b"00:01")


_SHARED_DEVICE = _shared_device()
_SOCKET_BUFFER = _socket_buffer()
_MAPPING_RECORD = 256
"""Approximate size of the kernel's record of one mapping."""
