"""Finds out what this machine supports by trying it: every attempt runs in a child and is undone with it."""

from __future__ import annotations

import errno
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec

from . import cgroups, kernel, launch, root, seccomp

MODULES = ("pytest",)
"""Modules that some languages need from the interpreter."""
NAMESPACES = {
    "mount namespace": kernel.CLONE_NEWNS,
    "pid namespace": kernel.CLONE_NEWPID,
    "network namespace": kernel.CLONE_NEWNET,
    "ipc namespace": kernel.CLONE_NEWIPC,
    "uts namespace": kernel.CLONE_NEWUTS,
}


def attempt(action: Callable[[], None], flags: int = 0) -> str:
    """Run `action` in a child, in new namespaces if `flags` say so; returns "" or why it failed."""
    said_read, said_write = os.pipe()
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        try:
            if flags:
                kernel.unshare(flags)
                kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            os.write(said_write, b".")
            os.read(go_read, 1)
            inner = os.fork() if flags & kernel.CLONE_NEWPID else 0
            if inner:
                os.waitpid(inner, 0)
                os._exit(0)
            action()
        except BaseException as error:
            os.write(said_write, str(error).encode()[:500])
            os._exit(1)
        os._exit(0)
    os.close(said_write)
    os.close(go_read)
    said = os.read(said_read, 512)
    if said == b"." and flags & kernel.CLONE_NEWUSER:
        try:
            map_ids(pid)
        except OSError as error:
            said += f"cannot map user ids: {error.strerror}".encode()
    os.close(go_write)
    while chunk := os.read(said_read, 512):
        said += chunk
    os.close(said_read)
    os.waitpid(pid, 0)
    return said.decode("utf-8", "replace").lstrip(".")


def map_ids(pid: int) -> None:
    """If we are root: the jail's root is root during setup, its user an unused id. Otherwise both are our own user."""
    maps = {"uid_map": f"1000 {os.geteuid()} 1", "gid_map": f"1000 {os.getegid()} 1"}
    if os.geteuid() == 0:
        maps = dict.fromkeys(maps, f"0 0 1\n1000 {launch.OWN_USER_BASE + pid} 1")
    else:
        cgroups.write(f"/proc/{pid}/setgroups", "deny")
    for name, text in maps.items():
        cgroups.write(f"/proc/{pid}/{name}", text)


def _private_root() -> None:
    root.build(launch.ROOT, [], [], 1 << 20, [])
    root.enter(launch.ROOT)
    if os.listdir(root.WORK) or not os.path.exists("/proc/self"):
        raise OSError("the private root is not what was built")


def _landlock() -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.restrict_with_landlock(["/usr"], [], kernel.landlock_abi())
    try:
        os.listdir("/etc")
    except PermissionError:
        return
    raise OSError("Landlock is present but does not restrict")


def _seccomp() -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.install_seccomp(seccomp.build_filter(cgroup=False))
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        if error.errno == errno.ENETUNREACH:
            return
    raise OSError("the seccomp filter is installed but does not refuse")


def _own_user() -> None:
    """Without a private root, another user must be able to access the interpreter in its place."""
    closed = [folder for path in _prefixes() for folder in _above(path) if not os.stat(folder).st_mode & 0o001]
    kernel.become(launch.OWN_USER_BASE + os.getpid())
    try:
        for path in _prefixes():
            os.listdir(path)
        os.stat(sys.executable)
    except PermissionError:
        where = closed[0] if closed else sys.base_prefix
        raise OSError(f"the interpreter is in {where}, which other users cannot access") from None


def _limit_processes() -> None:
    """The kernel's limit on a user's processes does not apply to root of the initial user namespace."""
    kernel.drop_capabilities()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        pid = os.fork()
    except BlockingIOError:
        return
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    raise OSError("the number of processes of this user is not limited")


def _prefixes() -> list[str]:
    return sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix})


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) or "/" for end in range(1, len(parts) + 1)]


def probe() -> dict[str, object]:
    """Return for each feature "" if it works, otherwise the reason why not."""
    found: dict[str, str] = {"user namespace": attempt(lambda: None, kernel.CLONE_NEWUSER)}
    for name, flag in NAMESPACES.items():
        found[name] = attempt(lambda: None, kernel.CLONE_NEWUSER | flag)
    found["private root"] = attempt(_private_root, kernel.NAMESPACES)
    found["landlock"] = attempt(_landlock)
    found["seccomp"] = attempt(_seccomp)
    found["own user id"] = attempt(_own_user) if os.geteuid() == 0 else "only for root"
    cgroup = cgroups.usable()
    found["cgroup"] = "" if cgroup else "no writable memory cgroup (v1, or v2 with delegation)"
    return {
        "features": found,
        "cgroup": cgroup,
        "limits_processes": not attempt(_limit_processes) or (cgroup is not None and cgroups.limit_processes(cgroup)),
        "landlock_abi": kernel.landlock_abi(),
        "root": os.geteuid() == 0,
        "python": {
            "executable": sys.executable,
            "version": platform.python_version(),
            "prefixes": _prefixes(),
            "modules": [name for name in MODULES if find_spec(name)],
        },
    }
