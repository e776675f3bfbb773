"""Memory and process-count cgroups, version 1 or 2, created by the zygote if it may. One group per worker."""

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
            if kind == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or controller in options.split(",")):
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
    """One worker's group: a directory of the same name in every hierarchy it needs."""

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
    """The zygote's own directory, which contains its workers' groups."""

    def __init__(self, config: tuple[int, list[str]]) -> None:
        self._version, bases = config
        self._count = 0
        self._spare: list[Group] = []
        sweep(bases)
        self._directories = [f"{base}/{_NAME}{os.getpid()}" for base in bases]
        for directory in self._directories:
            os.makedirs(directory, exist_ok=True)
            if self._version == 2:
                _pass_on(directory)

    def group(self) -> Group:
        """A group without processes and limits. Groups are reused: the kernel is slow to release one."""
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
    """Remove what killed zygotes left: retry for `zygote`, try once for others.

    A group in use cannot be removed, and waiting for someone else's would delay everyone who starts or stops.
    """
    for base in bases:
        for name in os.listdir(base):
            pid = name.removeprefix(_NAME)
            if name.startswith(_NAME) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(FileNotFoundError):  # another process may be sweeping too
                    inner = [entry.path for entry in os.scandir(f"{base}/{name}") if entry.is_dir()]
                    remove([*inner, f"{base}/{name}"], tries=100 if pid == str(zygote) else 1)


def remove(directories: list[str], tries: int = 100) -> None:
    """A group can be removed when its last process is completely gone, which takes the kernel a moment."""
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
    """Find where groups can be created, by creating one: version, and the directories for `Parent`. Otherwise None."""
    first = [base for controller in ("memory", "pids") if (base := own_base(1, controller))]
    if first and _works(1, first):
        return 1, first
    # A version 2 group that has processes, as ours does, cannot delegate its controllers: go up to one that can.
    base = own_base(2, "memory")
    while base is not None and os.path.exists(f"{base}/cgroup.procs"):
        if _works(2, [base]):
            return 2, [base]
        base = os.path.dirname(base)
    return None


def limit_processes(config: tuple[int, list[str]]) -> bool:
    """Whether groups in these directories, which are `usable`, also limit the number of processes."""
    version, bases = config
    if version == 1:
        return len(bases) > 1
    with open(f"{bases[0]}/cgroup.subtree_control") as file:
        return "pids" in file.read().split()


def _works(version: int, bases: list[str]) -> bool:
    parent = None
    try:
        if version == 2:
            _pass_on(bases[0])
        parent = Parent((version, bases))
        parent.group().for_worker().set_limit(64 << 20)
    except OSError:
        return False
    finally:
        if parent is not None:
            parent.remove()
    return True


def _pass_on(directory: str) -> None:
    """Delegate the memory controller, which we need, and the pids controller, which is good to have."""
    with open(f"{directory}/cgroup.subtree_control") as file:
        passed = file.read().split()
    if "memory" not in passed:
        write(f"{directory}/cgroup.subtree_control", "+memory")
    with contextlib.suppress(OSError):
        if "pids" not in passed:
            write(f"{directory}/cgroup.subtree_control", "+pids")
