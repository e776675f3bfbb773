"""Run a command as in the first container of a pod: `python tests/in_pod.py MANIFEST VOLUME COMMAND …`, as root.

What the kubelet and a container runtime make of a pod's security settings is reproduced without them: its user
namespace, seccomp profile, capabilities, user, /proc and read-only root. AppArmor's default profile is played by a
filter that refuses mounts. Settings that are left out have Kubernetes' own defaults: Unconfined, root, the usual
capabilities, a masked /proc, no user namespace. Of volumes there are an empty /tmp, and the folder VOLUME in its place.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from as_user import CHECKOUT, kernel, open_up
from in_container import CAPABILITIES, MACHINE, profile, refusal

MOUNT = {"x86_64": 165, "aarch64": 40}
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NUMBERS = {"SETGID": 6, "SETUID": 7, "SYS_ADMIN": 21}
FIRST_ID, IDS = 65536, 65536
"""The ids of the pod's user namespace, as the kubelet chooses them."""
MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list")
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


def first_pod(manifest: str) -> dict[str, Any]:
    document = next(yaml.safe_load_all(Path(manifest).read_text()))
    return document["spec"] if document["kind"] == "Pod" else document["spec"]["template"]["spec"]


def prepare_files(volume: str) -> None:
    """As root of the machine: the interpreter can be reached by everybody, and /tmp is empty otherwise."""
    needed = sorted({sys.prefix, sys.base_prefix, CHECKOUT, volume})
    open_up(needed)
    handles = {path: os.open(path, os.O_PATH) for path in needed if path.startswith("/tmp/")}
    kernel.mount("tmp", "/tmp", "tmpfs", 0, "mode=1777")
    for path, handle in handles.items():
        os.makedirs(path, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{handle}", path, None, kernel.MS_BIND | kernel.MS_REC)


def wait_for(child: int) -> NoReturn:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)


def enter_namespaces(*, own_users: bool) -> None:
    """Continue as the first process of a new pid namespace with its own /proc."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | (kernel.CLONE_NEWUSER if own_users else 0)
    ready, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(ready[1])
        os.read(ready[0], 1)
        if own_users:
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child}/{name}").write_text(f"0 {FIRST_ID} {IDS}")
        os.close(mapped[1])
        wait_for(child)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.unshare(flags)
    os.close(mapped[1])
    os.write(ready[1], b".")
    os.read(mapped[0], 1)
    first = os.fork()
    if first:
        wait_for(first)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def cover(*, masked: bool) -> None:
    """Of cgroups there are none, or a sandbox in the pod would remove those of processes that it does not see."""
    if os.path.isdir("/sys/fs/cgroup"):
        kernel.mount("none", "/sys/fs/cgroup", "tmpfs", kernel.MS_RDONLY)
    if masked:
        for path in filter(os.path.exists, MASKED):
            kernel.mount("/dev/null", path, None, kernel.MS_BIND)
        for path in filter(os.path.exists, READ_ONLY):
            kernel.bind_read_only(path, path)


def kept_capabilities(security: dict[str, Any]) -> int:
    listed = security.get("capabilities", {})
    kept = 0 if "ALL" in listed.get("drop", []) else CAPABILITIES
    return kept | sum(1 << NUMBERS[name] for name in listed.get("add", []))


def become_contained(pod: dict[str, Any], volume: str) -> None:
    """Give up what a process of the pod's first container does not have."""
    security = {**pod.get("securityContext", {}), **pod["containers"][0].get("securityContext", {})}
    privileged, capabilities = security.get("privileged", False), kept_capabilities(security)
    prepare_files(volume)
    enter_namespaces(own_users=pod.get("hostUsers") is False)
    os.setgroups([])
    if security.get("readOnlyRootFilesystem"):
        kernel.make_read_only("/")
    cover(masked=not privileged and security.get("procMount") != "Unmasked")
    if not privileged:
        if security.get("appArmorProfile", {}).get("type") == "RuntimeDefault":
            kernel.install_seccomp(refusal(MOUNT[MACHINE]))
        if security.get("seccompProfile", {}).get("type") == "RuntimeDefault":
            administrator = capabilities >> NUMBERS["SYS_ADMIN"] & 1
            kernel.install_seccomp(refusal(PIVOT_ROOT[MACHINE]) if administrator else profile())
    user = security.get("runAsUser", 0)
    if not privileged:
        kernel.drop_capabilities(capabilities | (1 << 6 | 1 << 7 if user else 0))
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if security.get("allowPrivilegeEscalation") is False:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


if __name__ == "__main__":
    spec = first_pod(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for the command alone
    become_contained(spec, sys.argv[2])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execvp(sys.argv[3], sys.argv[3:])
