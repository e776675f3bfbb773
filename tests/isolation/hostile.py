"""What the attacks share: small limits, raw system calls from Python, and a short way to run a program."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

from ways import Way

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program

QUICK = Limits(run_seconds=20, compile_seconds=20, memory_bytes=192 * MIB, disk_bytes=32 * MIB, processes=64)
"""Small, so that an attack reaches them soon; but for time, which only those reach that set a limit of their own."""

CALLS: dict[str, tuple[int, int | None]] = {
    # system call: (its number on x86_64, on aarch64); None: there is no such call
    "capget": (125, 90), "truncate": (76, 45), "openat": (257, 56), "openat2": (437, 437),
    "io_setup": (206, 0), "inotify_init1": (294, 26), "fcntl": (72, 25), "setrlimit": (160, 164),
    "ioctl": (16, 29), "shmget": (29, 194), "socket": (41, 198), "socketpair": (53, 199), "clone": (56, 220),
    "semget": (64, 190), "msgget": (68, 186), "ptrace": (101, 117), "syslog": (103, 116),
    "rt_sigqueueinfo": (129, 138), "personality": (135, 92), "setpriority": (141, 140), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "mlock": (149, 228), "mlockall": (151, 230), "modify_ldt": (154, None),
    "pivot_root": (155, 41), "adjtimex": (159, 171), "chroot": (161, 51), "acct": (163, 89),
    "settimeofday": (164, 170), "mount": (165, 40), "umount2": (166, 39), "swapon": (167, 224), "reboot": (169, 142),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "init_module": (175, 105), "delete_module": (176, 106), "quotactl": (179, 60), "tkill": (200, 130),
    "sched_setaffinity": (203, 122), "clock_settime": (227, 112), "mq_open": (240, 180), "kexec_load": (246, 104),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "ioprio_set": (251, 30),
    "ioprio_get": (252, 31), "unshare": (272, 97), "vmsplice": (278, 75), "move_pages": (279, 239),
    "perf_event_open": (298, 241), "fanotify_init": (300, 262), "prlimit64": (302, 261),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "setns": (308, 268),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "finit_module": (313, 273),
    "bpf": (321, 280), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "clone3": (435, 435), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount_setattr": (442, 442), "landlock_create_ruleset": (444, 444), "memfd_secret": (447, 447),
    "file_setattr": (469, 469),
}  # fmt: skip
NUMBERS = {name: numbers[platform.machine() == "aarch64"] for name, numbers in CALLS.items()}

SYSCALLS = f'''
import ctypes, errno, os, sys
NUMBERS = {NUMBERS}
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *args):
    """The name of the error a system call ended with, or "done"."""
    ctypes.set_errno(0)
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return "done" if libc.syscall(ctypes.c_long(NUMBERS[name]), *words) >= 0 else errno.errorcode[ctypes.get_errno()]

def attempt(action, *args, **options):
    """The name of the error a call into the standard library ended with, or what it returned."""
    try:
        return action(*args, **options)
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
'''
"""Put before an attack that names system calls or wants errors as words."""


async def run(
    sandbox: LocalSandbox | Way,
    code: str,
    language: str = "python",
    *,
    stdin: str | bytes | None = None,
    files: Mapping[str, bytes] | None = None,
    fetch_files: Sequence[str] = (),
    **limits: float,
) -> Execution:
    """Run an attack. Indented source is fine; `limits` change single fields of `QUICK`."""
    program = Program(dedent(code), language, stdin=stdin, files=files or {}, fetch_files=fetch_files)
    return await sandbox.run(program, QUICK.model_copy(update=limits))


async def words(sandbox: LocalSandbox | Way, code: str, **options: float) -> list[str]:
    """Run an attack that answers in words, with `call` and `attempt` at hand."""
    execution = await run(sandbox, SYSCALLS + dedent(code), **options)
    assert execution.ok, execution
    return execution.stdout.split()


def open_to_everybody(path: Path) -> Path:
    """So that only the sandbox keeps a program from this file of the host's, and not its mode or a directory's."""
    path.chmod(0o666 if path.is_file() else 0o755)
    for folder in path.parents:
        if str(folder).startswith("/tmp/") and folder.stat().st_uid == os.getuid():
            folder.chmod(0o755)
    return path


def content_of(path: str | Path) -> bytes | None:
    return Path(path).read_bytes() if Path(path).is_file() else None


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def host_processes(marker: str) -> list[int]:
    """Processes of this machine whose command line, environment or name shows `marker`, the asking one left out."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if marker.encode() in file.read():
                        found.append(int(name))
            except OSError:
                continue
    return found


def below_us(name: str) -> list[int]:
    """Processes of that name among our descendants, however far down."""
    parents: dict[int, int] = {}
    named: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                head, _, tail = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")
            except OSError:
                continue
            parents[int(entry)] = int(tail.split()[1])
            if head.partition("(")[2] == name:
                named.append(int(entry))

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [pid for pid in named if is_ours(pid)]


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Fails if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.01)
