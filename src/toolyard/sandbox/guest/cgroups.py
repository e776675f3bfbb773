"""Memory and process-count groups, version 1 or 2, made by the zygote where it may. One group per worker."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from .watch import Cgroup

_FILES = {
    1: ("memory.limit_in_bytes", "memory.oom_control", "memory.usage_in_bytes", "memory.stat"),
    2: ("memory.max", "memory.events", "memory.current", "memory.stat"),
}
_NAME = "toolyard-"


def own_base(version: int, controller: str) -> str | None:
    """The directory of this process's own group in the hierarchy that has `controller`, as mounted here."""
    mount = None
    with open("/proc/self/mounts") as file:
        for line in file:
            _, place, kind, options, *_ = line.split()
            if (version == 2 and kind == "cgroup2") or (kind == "cgroup" and controller in options.split(",")):
                mount = place
                break
    if mount is None:
        return None
    with open("/proc/self/cgroup") as file:
        for line in file:
            number, names, path = line.rstrip("\n").split(":", 2)
            if (version == 2 and number == "0") or (version == 1 and controller in names.split(",")):
                base = mount + path.rstrip("/")
                return base if os.path.isdir(base) else mount
    return None


class Group:
    """One worker's group: in every hierarchy it needs, a directory of the same name."""

    def __init__(self, version: int, directories: list[str]) -> None:
        self._version = version
        self._directories = directories
        for directory in directories:
            os.mkdir(directory)
        self.path = directories[0]

    def join(self) -> None:
        for directory in self._directories:
            write(f"{directory}/cgroup.procs", "0")

    def for_worker(self) -> Cgroup:
        limit, *others = (f"{self.path}/{name}" for name in _FILES[self._version])
        handles = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in others]
        pids = [path for directory in self._directories if os.path.exists(path := f"{directory}/pids.max")]
        processes = os.open(pids[0], os.O_RDWR | os.O_CLOEXEC) if pids else None
        return Cgroup(processes, os.open(limit, os.O_RDWR | os.O_CLOEXEC), *handles)

    def lift_limits(self) -> None:
        write(f"{self.path}/{_FILES[self._version][0]}", "-1" if self._version == 1 else "max")
        for directory in self._directories:
            with contextlib.suppress(FileNotFoundError):
                write(f"{directory}/pids.max", "max")


class Parent:
    """The zygote's own directory, below which its workers' groups live."""

    def __init__(self, config: tuple[int, list[str]]) -> None:
        self._version, bases = config
        self._count = 0
        self._spare: list[Group] = []
        sweep(bases)
        self._directories = [f"{base}/{_NAME}{os.getpid()}" for base in bases]
        for directory in self._directories:
            os.makedirs(directory, exist_ok=True)
            if self._version == 2:
                write(f"{directory}/cgroup.subtree_control", "+memory +pids")

    def group(self) -> Group:
        """A group without processes and limits. Used ones are used again: the kernel is slow to forget a group."""
        if self._spare:
            group = self._spare.pop()
            group.lift_limits()
            return group
        self._count += 1
        return Group(self._version, [f"{directory}/{self._count}" for directory in self._directories])

    def take_back(self, group: Group) -> None:
        self._spare.append(group)

    def remove(self) -> None:
        for directory in self._directories:
            with contextlib.suppress(OSError):
                remove([entry.path for entry in os.scandir(directory) if entry.is_dir()])
        remove(self._directories)


def sweep(bases: Sequence[str], zygote: int | None = None) -> None:
    """Remove what killed zygotes left: of `zygote` with patience, of others only what goes at once.

    A group in use cannot be removed, and waiting for somebody else's would hold up everyone who starts or stops.
    """
    for base in bases:
        for name in os.listdir(base):
            pid = name.removeprefix(_NAME)
            if name.startswith(_NAME) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(FileNotFoundError):  # somebody else sweeps, too
                    inner = [entry.path for entry in os.scandir(f"{base}/{name}") if entry.is_dir()]
                    remove([*inner, f"{base}/{name}"], tries=100 if pid == str(zygote) else 1)


def remove(directories: list[str], tries: int = 100) -> None:
    """A group can be removed once its last process is gone for good, which takes the kernel a moment."""
    for directory in directories:
        for _ in range(tries):
            try:
                os.rmdir(directory)
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.002)


def write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def usable() -> tuple[int, list[str]] | None:
    """Try it: make a group, set a limit, read its events, remove it. Returns what `Parent` needs, or None."""
    for version, controllers in ((1, ("memory", "pids")), (2, ("memory",))):
        bases = [base for controller in controllers if (base := own_base(version, controller))]
        if not bases:
            continue
        parent = None
        try:
            if version == 2:
                write(f"{bases[0]}/cgroup.subtree_control", "+memory +pids")
            parent = Parent((version, bases))
            parent.group().for_worker().set_limit(64 << 20)
            return version, bases
        except OSError:
            continue
        finally:
            if parent is not None:
                parent.remove()
    return None
