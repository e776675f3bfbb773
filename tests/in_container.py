"""Run a command as in a container with Docker's default profile: `python tests/in_container.py WHO COMMAND …`.

The relevant parts of such a container are reproduced without Docker: its seccomp profile for namespaces and mounts
go, its set of capabilities, and no cgroup that could be written. WHO is `root`, `user` (as with `docker run --user`),
or `open-root`: root again, whose interpreter everybody can reach, as in the images that people use.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from as_user import CHECKOUT, USER, kernel, open_up

MACHINE = platform.machine()
CAPABILITIES = 0xA80425FB
REFUSED = {
    # mount, umount2, pivot_root, unshare, setns, kexec_load, kexec_file_load, init_module, finit_module, delete_module,
    # reboot, chroot, bpf, perf_event_open, keyctl, add_key, request_key, userfaultfd
    "x86_64": (165, 166, 155, 272, 308, 246, 320, 175, 313, 176, 169, 161, 321, 298, 250, 248, 249, 323),
    "aarch64": (40, 39, 41, 97, 268, 104, 294, 105, 273, 106, 142, 51, 280, 241, 219, 217, 218, 282),
}
REFUSED_EVERYWHERE = (
    428, 429, 430, 431, 432, 433, 442,  # open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr
    425, 426, 427,  # io_uring
)  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000


def profile() -> bytes:
    """Only what the sandbox would like to do and must do without."""
    refuse, allow = (RETURN, 0, 0, ERROR | errno.EPERM), (RETURN, 0, 0, ALLOW)
    program = [
        *_refusals((*REFUSED[MACHINE], *REFUSED_EVERYWHERE)),
        (EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERROR | errno.ENOSYS),
        (EQUAL, 1, 0, CLONE[MACHINE]), allow,
        (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, kernel.NAMESPACES | kernel.CLONE_NEWCGROUP), refuse, allow,
    ]  # fmt: skip
    return _packed(program)


def refusal(*numbers: int) -> bytes:
    """A filter that refuses these system calls, and no others."""
    return _packed([*_refusals(numbers), (RETURN, 0, 0, ALLOW)])


Line = tuple[int, int, int, int]


def _refusals(numbers: tuple[int, ...]) -> list[Line]:
    refuse = (RETURN, 0, 0, ERROR | errno.EPERM)
    return [(LOAD, 0, 0, 0), *[line for number in numbers for line in ((EQUAL, 0, 1, number), refuse)]]


def _packed(program: list[Line]) -> bytes:
    return b"".join(struct.pack("HBBI", *line) for line in program)


def become_contained(who: str) -> None:
    if os.getuid() == 0:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        if os.path.isdir("/sys/fs/cgroup"):
            kernel.mount("none", "/sys/fs/cgroup", "tmpfs", kernel.MS_RDONLY)
        if who != "root":
            open_up(sorted({sys.prefix, sys.base_prefix, CHECKOUT}))
        kernel.install_seccomp(profile())
        kernel.drop_capabilities(CAPABILITIES)
        if who == "user":
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
    else:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.install_seccomp(profile())


if __name__ == "__main__":
    become_contained(sys.argv[1])
    os.chdir(CHECKOUT)
    os.execvp(sys.argv[2], sys.argv[2:])
