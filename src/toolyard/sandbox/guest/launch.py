"""Turns a fork of the zygote into a jailed worker: namespaces, private root, Landlock, user id, capabilities, seccomp.

Two processes: the launcher stays outside as the jail's parent, only waits, and dies with the zygote; the worker inside
dies with the launcher, and everything it started dies with the worker, which is PID 1.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from types import FrameType
from typing import Any, NoReturn

from . import descendants, kernel, root, seccomp
from .watch import Cgroup
from .worker import Worker

ROOT = "/mnt"
"""Where the private root is mounted before it becomes the root. Visible only in this mount namespace."""
OWN_USER_BASE = 1 << 30
"""If we are root, each worker gets its own user id: this plus its launcher's pid, so no two live ones are the same."""
FIXED_LIMITS = {
    resource.RLIMIT_SIGPENDING: 256,  # timers count as pending signals
    resource.RLIMIT_MEMLOCK: 64 << 10,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_NICE: 0,
    resource.RLIMIT_RTPRIO: 0,
}
"""The same for every program. What the kernel counts per user also counts for the serving user."""


def _die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, by)


def launch(channel: socket.socket, report: int, go: int, config: dict[str, Any], cgroup: Cgroup | None) -> NoReturn:
    """Runs in a fork of the zygote. Reports that ids may be mapped, waits on `go`, becomes the jail's parent."""
    try:
        zygote = os.getppid()
        _use_ordinary_class()
        _start_no_core_handler()
        # Without a pid namespace, the launcher has to clean up orphans before it exits.
        _die_with_parent(signal.SIGKILL if config["namespaces"] else signal.SIGTERM)
        if config["namespaces"]:
            kernel.unshare(kernel.NAMESPACES)
            _die_with_parent()
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            socket.sethostname("sandbox")
        elif not config["user"]:
            config["other_processes"] = count_processes()
        os.write(report, b"m")
        if os.read(go, 1) != b"k" or os.getppid() != zygote:
            os._exit(1)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _become_worker(channel, theirs, report, go, config, cgroup)
        os.write(report, b"p" + pid.to_bytes(4, "little"))
        for handle in (channel, theirs):
            handle.close()
        os.close(report)
        os.close(go)
        _wait_for_worker(pid, ours, config)
    except BaseException as error:
        _report(report, error)
    os._exit(0)


def _use_ordinary_class() -> None:
    """A program in a real-time class would starve its worker of CPU time, and so outlive its limit."""
    with contextlib.suppress(PermissionError):  # a non-root host in the idle class: even lower priority
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _start_no_core_handler() -> None:
    """If core_pattern names a program, a crash starts it as the host's root. Only a limit of 1 prevents that."""
    with contextlib.suppress(ValueError, OSError):  # the host's own hard limit is 0, which only root can raise
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


def count_processes() -> int:
    """Count this user's processes, in all containers that share its id. The kernel only reveals it by trying."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    refused, granted = 0, hard if hard != resource.RLIM_INFINITY else 1 << 22
    while granted - refused > 1:
        limit = (granted + refused) // 2
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
        try:
            pid = os.fork()
        except BlockingIOError:
            refused = limit
            continue
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        granted = limit
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    return refused


def _wait_for_worker(worker: int, asked: socket.socket, config: dict[str, Any]) -> None:
    """Wait until the worker and its programs are gone: when the zygote reaps us, nothing of the jail is left.

    Without a pid namespace: end its programs on request, and finally whatever outlived it.
    """

    def end_worker(number: int, frame: FrameType | None) -> None:
        os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_worker)
    if not config["namespaces"]:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        while asked.recv(1):
            descendants.end_all(worker)
            asked.send(b"d")
    os.waitpid(worker, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its pid may soon be reused
    if not config["namespaces"]:
        descendants.end_all(os.getpid())
        remove_directories(config["writable"])


def remove_directories(writable: list[str]) -> None:
    """Remove what a worker without a private root leaves on the host's disk. Its programs are dead."""
    with contextlib.suppress(OSError):
        for path in writable:
            root.wipe(path)
            os.rmdir(path)
        os.rmdir(os.path.dirname(writable[0]))


def _report(report: int, error: BaseException) -> NoReturn:
    # Exit in any case: a fork that continued from here would act as the zygote.
    try:
        os.write(report, b"e" + f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")[:4000])
    finally:
        os._exit(1)


def _become_worker(
    channel: socket.socket,
    launcher: socket.socket,
    report: int,
    go: int,
    config: dict[str, Any],
    cgroup: Cgroup | None,
) -> NoReturn:
    try:
        _die_with_parent()
        for limit, size in FIXED_LIMITS.items():  # not before the namespaces, or all workers would share one count
            resource.setrlimit(limit, (size, size))
        if config["reachable_port"]:
            _hand_over_listener(channel, config["reachable_port"])
        if config["namespaces"]:
            root.build(ROOT, config["binds"], config["read_only"], config["disk_bytes"], config["devices"])
            root.enter(ROOT)
        else:
            _make_directories(config)
        if not config["namespaces"]:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        config["scope"] = (
            -1 if config["namespaces"] or not config["landlock"] else kernel.signal_scope(config["landlock_abi"])
        )
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if config["landlock"]:
            _landlock(config)
        if config["user"]:
            kernel.become(1000 if config["namespaces"] else config["user"])
        else:
            kernel.drop_capabilities()
        _die_with_parent()  # the kernel resets it when the user id changes
        os.chdir(config["work"])
        worker = Worker(channel, launcher, config, cgroup)
        # Not dumpable: /proc/1 then belongs to no user the program can be, so its memory and files stay closed.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        if config["seccomp"]:
            kernel.install_seccomp(
                seccomp.build_filter(
                    cgroup=cgroup is not None,
                    namespaces=config["namespaces"],
                    own_user=bool(config["user"]),
                    landlock=config["landlock_abi"],
                    tcp=bool(config["reachable_port"]),
                )
            )
        os.write(report, b"r")
    except BaseException as error:
        _report(report, error)
    os.close(report)
    os.close(go)
    worker.serve()


def _hand_over_listener(channel: socket.socket, port: int) -> None:
    """The host accepts the connections of this jail's programs. A socket stays in the namespace it was made in."""
    with kernel.listen_on_loopback(port) as listener:
        socket.send_fds(channel, [b"l"], [listener.fileno()])


def _make_directories(config: dict[str, Any]) -> None:
    for path in config["writable"]:
        os.makedirs(os.path.dirname(path), mode=0o711, exist_ok=True)
        os.mkdir(path, mode=0o700)
        if config["user"]:
            os.chown(path, config["user"], config["user"])


def _landlock(config: dict[str, Any]) -> None:
    devices = [*(f"/dev/{name}" for name in root.DEVICES), *config["devices"]]
    abi = config["landlock_abi"]
    if config["namespaces"]:
        # CUDA names its threads in /proc, and fails if it cannot. This /proc has only the worker's programs and the
        # worker, whose files belong to no user that a program can be.
        named = ["/proc"] if config["devices"] else []
        kernel.restrict_with_landlock(
            ["/"], [*config["writable"], *devices], abi, overwritable=named, port=config["reachable_port"]
        )
    else:
        readable = [*root.SYSTEM, *root.SYSTEM_FILES, *config["read_only"]]
        if not config["cgroup"]:  # a writable /dev/zero can be mapped shared, and that memory is not counted
            devices.remove("/dev/zero")
            readable.append("/dev/zero")
        kernel.restrict_with_landlock(readable, [*config["writable"], *devices], abi)
