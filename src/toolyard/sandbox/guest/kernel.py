"""System calls that Python does not provide: namespaces, mounts, capabilities, Landlock."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import socket
import stat
import struct

libc = ctypes.CDLL(None, use_errno=True)
MACHINE = platform.machine()

# Numbers that differ between the two architectures; all calls newer than 423 have the same number everywhere.
_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277},
}
OPENAT2, MOUNT_SETATTR = 437, 442
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 0x02, 0x04, 0x08, 0x10


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, what: str, *args: object) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _checked(libc.syscall(ctypes.c_long(number), *words), what)


def unshare(flags: int) -> None:
    _checked(libc.unshare(flags), "unshare")


def prctl(option: int, a: int = 0, b: int = 0) -> int:
    return _checked(libc.prctl(option, ctypes.c_ulong(a), ctypes.c_ulong(b), 0, 0), "prctl")


_prctl = ctypes.PyDLL(None).prctl
"""Keeps the GIL and stores no errno: writes to half as many pages as a call through `libc`."""


def make_dumpable() -> None:
    """Let a program read its own /proc entries."""
    _prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    result = libc.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode())
    _checked(result, f"mount {source or kind} on {target}")


def umount(target: str) -> None:
    _checked(libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root_here() -> None:
    """Make the current directory the root of this mount namespace and unmount the old one."""
    syscall(_NUMBERS[MACHINE]["pivot_root"], "pivot_root", b".", b".")
    umount(".")
    os.chdir("/")


def make_read_only(path: str, *, with_submounts: bool = False) -> None:
    """Make a mount read-only (also nosuid, nodev), keeping all flags that are locked."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    flags = AT_RECURSIVE if with_submounts else 0
    try:
        syscall(MOUNT_SETATTR, f"mount_setattr {path}", AT_FDCWD, os.fsencode(path), flags, attributes, len(attributes))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        for mounted in _mounts_below(path) if with_submounts else [path]:
            # Before Linux 5.12. A remount inside a user namespace must repeat every locked flag.
            kept = os.statvfs(mounted).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048)
            mount(None, mounted, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def _mounts_below(path: str) -> list[str]:
    with open("/proc/self/mountinfo") as file:
        places = [line.split()[4] for line in file]
    return [place for place in places if place == path or place.startswith(path + "/")]


def bind_read_only(source: str, target: str) -> None:
    """Includes what is mounted below: the kernel refuses a bind that would uncover directories under a mount."""
    mount(source, target, None, MS_BIND | MS_REC)
    make_read_only(target, with_submounts=True)


def become(user: int) -> None:
    """Take another user's id, and drop all capabilities."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    drop_capabilities()


def drop_capabilities(kept: int = 0) -> None:
    """Drop all capabilities except those in the mask; with `no_new_privs`, they can never be regained."""
    for capability in range(64):
        if not kept >> capability & 1 and libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    sets = struct.pack("6I", kept, kept, kept, 0, 0, 0)
    syscall(_NUMBERS[MACHINE]["capset"], "capset", struct.pack("Ii", 0x20080522, 0), sets)


def install_seccomp(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    syscall(_NUMBERS[MACHINE]["seccomp"], "seccomp", 1, 0, pointer)


def listen_on_loopback(port: int) -> socket.socket:
    """Bring up the loopback interface of this network namespace, and listen on it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    interface = struct.pack("16sH14x", b"lo", _IFF_UP)
    fcntl.ioctl(listener, _SIOCSIFFLAGS, interface)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener


def open_beneath(directory: int, name: str, flags: int, *, in_root: bool = False) -> int:
    """Open `name` under `directory` without following symbolic links or leaving it, however the tree changes.

    `in_root` treats an absolute name as one below `directory`.
    """
    resolve = RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | (RESOLVE_IN_ROOT if in_root else RESOLVE_BENEATH)
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, resolve)
    try:
        return syscall(OPENAT2, f"open {name}", directory, os.fsencode(name), how, len(how))
    except OSError as error:
        if error.errno != errno.ENOSYS:  # our own filter refuses it under an old Landlock
            raise
    return _open_step_by_step(directory, name.lstrip("/") if in_root else name, flags)


def _open_step_by_step(directory: int, name: str, flags: int) -> int:
    *folders, last = [part for part in name.split("/") if part] or ["."]
    if name.startswith("/") or ".." in (*folders, last):
        raise OSError(errno.EXDEV, f"open {name}: {os.strerror(errno.EXDEV)}")
    opened: list[int] = []
    try:
        for folder in folders:
            step = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            opened.append(os.open(folder, step, dir_fd=opened[-1] if opened else directory))
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(last, flags, dir_fd=opened[-1] if opened else directory)
    finally:
        for handle in opened:
            os.close(handle)


# ---------------------------------------------------------------------------------------------------------- Landlock
_READ_ONLY = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read directory
_OVERWRITE = 1 << 1 | 1 << 14  # write to an existing file, truncate it
_CONNECT_TCP = 1 << 1
_RULE_PATH, _RULE_PORT = 1, 2
_ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # rights that apply to files: also truncate, ioctl


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 if there is none."""
    return max(libc.syscall(ctypes.c_long(LANDLOCK_CREATE_RULESET), None, ctypes.c_long(0), ctypes.c_long(1)), 0)


def restrict_with_landlock(
    read_only: list[str], writable: list[str], abi: int, *, overwritable: list[str] | None = None, port: int = 0
) -> None:
    """Restrict this process and its children to these paths; no new files can be created below `overwritable`.

    Also no TCP but connections to `port`, and no signals or abstract sockets to processes outside, as far as version
    `abi` supports it.
    """
    if not abi:
        raise OSError(errno.ENOSYS, "Landlock is not available")
    rights = (1 << 13) - 1
    for version, right in ((2, 13), (3, 14), (5, 15)):
        if abi >= version:
            rights |= 1 << right
    attributes = struct.pack("QQQ", rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = syscall(LANDLOCK_CREATE_RULESET, "landlock_create_ruleset", attributes, size, 0)
    for paths, granted in ((read_only, _READ_ONLY), (overwritable or [], _OVERWRITE), (writable, rights)):
        for path in paths:
            try:
                handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            on_directory = stat.S_ISDIR(os.fstat(handle).st_mode)
            allowed = granted & rights & (-1 if on_directory else _ON_FILES)
            rule = struct.pack("=Qi", allowed, handle)
            syscall(LANDLOCK_ADD_RULE, f"landlock {path}", ruleset, _RULE_PATH, rule, 0)
            os.close(handle)
    if port:
        rule = struct.pack("=QQ", _CONNECT_TCP, port)
        syscall(LANDLOCK_ADD_RULE, f"landlock port {port}", ruleset, _RULE_PORT, rule, 0)
    syscall(LANDLOCK_RESTRICT_SELF, "landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def signal_scope(abi: int) -> int:
    """A ruleset that forbids only signals (and abstract sockets) to processes outside; -1 if not supported.

    A process that restricts itself with it can no longer signal its parent. Created ahead, since that is expensive.
    """
    if abi < 6:
        return -1
    attributes = struct.pack("QQQ", 0, 0, 3)
    return syscall(LANDLOCK_CREATE_RULESET, "landlock_create_ruleset", attributes, len(attributes), 0)


def restrict_self(ruleset: int) -> None:
    syscall(LANDLOCK_RESTRICT_SELF, "landlock_restrict_self", ruleset, 0)
