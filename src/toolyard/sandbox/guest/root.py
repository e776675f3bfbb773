"""The private root: a read-only view of the interpreter and toolchains, and a few size-limited writable directories."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from . import kernel

WORK = "/sandbox"
WRITABLE = (WORK, "/tmp", "/var/tmp", "/dev/shm", "/mnt", "/data")
DEVICES = ("null", "zero", "full", "random", "urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf")

_ETC = {
    "passwd": "root:x:0:0:root:/:/bin/sh\nuser:x:1000:1000:user:/sandbox:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def _bind(root: str, source: str) -> None:
    target = root + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    kernel.bind_read_only(os.path.realpath(source), target)


def _outermost(paths: list[str]) -> list[str]:
    """Drop paths below another of them: a bind includes its whole tree."""
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path == other or path.startswith(other + "/") for other in kept):
            kept.append(path)
    return kept


def build(root: str, binds: list[tuple[str, str]], read_only: list[str], disk_bytes: int, devices: list[str]) -> None:
    """Mount the new root on `root`. The caller is alone in its mount namespace and pivots to it afterwards."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("root", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    _writable(root, disk_bytes)
    links = [path for path in SYSTEM if os.path.islink(path)]
    for path in links:
        os.symlink(os.readlink(path), root + path)
    wanted = [path for path in (*SYSTEM, *SYSTEM_FILES, *read_only) if path not in links and os.path.exists(path)]
    for path in _outermost(wanted):
        _bind(root, path)
    for source, target in binds:
        os.makedirs(root + target, exist_ok=True)
        kernel.bind_read_only(source, root + target)
    os.makedirs(root + "/etc", exist_ok=True)
    for name, text in _ETC.items():
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text)
    _devices(root, devices)
    os.makedirs(root + "/proc", exist_ok=True)
    # While the old /proc is still visible: the kernel refuses a new one to a process that cannot see a complete one.
    kernel.mount("proc", root + "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def _devices(root: str, more: list[str]) -> None:
    os.makedirs(root + "/dev", exist_ok=True)
    for path in (*(f"/dev/{name}" for name in DEVICES), *more):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        with open(root + path, "w"):
            pass
        kernel.mount(path, root + path, None, kernel.MS_BIND)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")


def _writable(root: str, disk_bytes: int) -> None:
    """Use one tmpfs for all writable directories, so that one size and one inode count limit them together."""
    hidden = root + "/.writable"
    os.mkdir(hidden)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("writable", hidden, "tmpfs", flags, f"size={disk_bytes},nr_inodes=32768,mode=755")
    for path in WRITABLE:
        inside = hidden + "/" + path.strip("/").replace("/", "-")
        os.mkdir(inside)
        os.chmod(inside, 0o1777)
        os.makedirs(root + path, exist_ok=True)
        kernel.mount(inside, root + path, None, kernel.MS_BIND)
    kernel.umount(hidden)
    os.rmdir(hidden)


def enter(root: str) -> None:
    os.chdir(root)
    kernel.pivot_root_here()
    kernel.make_read_only("/")


def _make_removable(directory: int, name: str) -> int:
    os.chmod(name, 0o700, dir_fd=directory)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)


def fixtures(read_only: list[str]) -> frozenset[str]:
    """Mount points inside writable directories, such as an interpreter below /tmp, and the directories above them."""
    kept: set[str] = set()
    for path in _outermost(read_only):
        above = path
        while any(above.startswith(writable + "/") for writable in WRITABLE):
            kept.add(above)
            above = os.path.dirname(above)
    return frozenset(kept)


def wipe(path: str, kept: frozenset[str] = frozenset()) -> None:
    """Empty a directory, except for `kept`. All processes that could write to it are dead.

    Flattens instead of recursing, so that a tree three thousand levels deep needs no stack and no long path.
    """
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        os.chmod(path, 0o700)  # `restore` resets it
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    moved = 0
    try:
        while names := [name for name in os.listdir(top) if f"{path}/{name}" not in kept]:
            for name in names:
                try:
                    os.unlink(name, dir_fd=top)
                    continue
                except (IsADirectoryError, PermissionError):
                    inner = _make_removable(top, name)
                try:
                    for entry in os.listdir(inner):
                        try:
                            os.unlink(entry, dir_fd=inner)
                        except (IsADirectoryError, PermissionError):
                            os.chmod(entry, 0o700, dir_fd=inner)
                            moved += 1
                            os.rename(entry, f".moved-{moved}", src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    for inner_path in kept:
        # A kept directory that we own may contain new files; a mount point itself is read-only.
        if os.path.dirname(inner_path) == path and os.access(inner_path, os.W_OK):
            wipe(inner_path, kept)


def restore(path: str, mode: int) -> None:
    """Undo what a program can do to a directory it owns: attributes, access lists, mode, times."""
    for name in os.listxattr(path):
        if name.startswith(("user.", "system.posix_acl_")):
            os.removexattr(path, name)
    if os.stat(path).st_mode & 0o7777 != mode:
        os.chmod(path, mode)
    os.utime(path, (0, 0))


def renew_times(path: str) -> None:
    """Set all times of an empty directory to now, if setting them directly has no effect (see `seccomp`)."""
    os.mkdir(f"{path}/.now")
    os.rmdir(f"{path}/.now")
    os.listdir(path)  # updates the access time, since the directory has changed


class WritableDirectories:
    """The writable directories of a worker, between two programs."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._kept = fixtures(config["read_only"]) if config["namespaces"] else frozenset[str]()
        self._clean_inodes = -1
        self.free_inodes = -1
        """If this many are free after the usual file was removed, there is nothing else to clean. -1: unknown."""

    def settle(self) -> None:
        """Take their current state as the clean one."""
        self._clean_inodes = self._inodes()
        if self._clean_inodes >= 0 and not self._config["owns_directories"]:
            self.free_inodes = os.statvfs(self._config["work"]).f_ffree

    def clean(self, usual: str) -> bool:
        """Remove everything a program wrote; `usual` is the one file that is always there. Returns False on failure."""
        try:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                os.unlink(usual)
            dirty = self._clean_inodes < 0 or self._inodes() != self._clean_inodes
            if dirty:
                for path in self._config["writable"]:
                    wipe(path, self._kept)
            if self._config["owns_directories"]:
                for path in self._config["writable"]:
                    restore(path, self._config["directory_mode"])
            return not dirty or self._inodes() == self._clean_inodes
        except OSError:
            return False

    def forget_times(self) -> None:
        """Reset times, so that the next program cannot learn which directories this one used. No one waits for it."""
        if not self._config["namespaces"]:
            for path in self._config["writable"]:
                renew_times(path)
        elif not self._config["owns_directories"]:  # otherwise `restore` has set them
            for path in self._config["writable"]:
                os.utime(path)

    def _inodes(self) -> int:
        """How many are in use; -1 if they cannot be counted."""
        if not self._config["namespaces"]:
            return -1
        space = os.statvfs(self._config["work"])
        return space.f_files - space.f_ffree
