"""The kernel's doors: privileges, namespaces, mounts, and system calls that no program needs."""

from __future__ import annotations

import os
import platform

import pytest
from hostile import NUMBERS, run, words
from ways import Way

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Verdict

pytestmark = pytest.mark.asyncio(loop_scope="session")
namespaces = pytest.mark.kernel("namespaces")
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="these doors are not on this architecture")

REFUSED = {
    # the call, and perhaps what about it: arguments that would do something
    "ptrace": "0, 0, 0, 0",
    "io_uring_setup": "8, ctypes.create_string_buffer(120)",
    "io_uring_enter": "0, 0, 0, 0",
    "io_uring_register": "0, 0, 0, 0",
    "keyctl": "0, -3, 0",
    "add_key": "b'user', b'name', b'payload', 7, -3",
    "request_key": "b'user', b'name', 0, -3",
    "bpf": "0, ctypes.create_string_buffer(128), 128",
    "perf_event_open": "ctypes.create_string_buffer(128), 0, -1, -1, 0",
    "userfaultfd": "1",
    "unshare, user": "0x10000000",
    "unshare, mount": "0x20000",
    "unshare, network": "0x40000000",
    "setns": "0, 0",
    "mount": "b'x', b'/tmp', b'tmpfs', 0, 0",
    "umount2": "b'/proc', 2",
    "pivot_root": "b'.', b'.'",
    "chroot": "b'/tmp'",
    "open_tree": "-100, b'/', 1",
    "move_mount": "0, b'', -100, b'/tmp', 0",
    "fsopen": "b'tmpfs', 0",
    "fsmount": "0, 0, 0",
    "mount_setattr": "-100, b'/', 0, ctypes.create_string_buffer(32), 32",
    "name_to_handle_at": "-100, b'/', ctypes.create_string_buffer(128), ctypes.create_string_buffer(8), 0",
    "open_by_handle_at": "0, ctypes.create_string_buffer(128), 0",
    "fanotify_init": "0, 0",
    "sethostname": "b'owned', 5",
    "setdomainname": "b'owned', 5",
    "reboot": "0xfee1dead, 672274793, 0",
    "kexec_load": "0, 0, 0, 0",
    "init_module": "b'', 0, b''",
    "finit_module": "0, b'', 0",
    "delete_module": "b'x', 0",
    "swapon": "b'/tmp/x', 0",
    "acct": "b'/tmp/x'",
    "settimeofday": "ctypes.create_string_buffer(16), 0",
    "clock_settime": "0, ctypes.create_string_buffer(16)",
    "adjtimex": "ctypes.create_string_buffer(256)",
    "syslog": "3, ctypes.create_string_buffer(64), 64",
    "iopl": "3",
    "ioperm": "0, 1, 1",
    "modify_ldt": "1, ctypes.create_string_buffer(16), 16",
    "personality": "0x0040000",
    "process_vm_readv": "1, 0, 0, 0, 0, 0",
    "process_vm_writev": "1, 0, 0, 0, 0, 0",
    "kcmp": "1, 1, 0, 0, 0",
    "pidfd_getfd": "0, 0, 0",
    "process_madvise": "0, 0, 0, 0, 0",
    "move_pages": "1, 0, 0, 0, 0, 0",
    "memfd_secret": "0",
    "vmsplice": "1, 0, 0, 0",
    "quotactl": "0, 0, 0, 0",
    "shmget": "0, 4096, 0o1600",
    "msgget": "0, 0o1600",
    "semget": "0, 1, 0o1600",
    "mq_open": "b'queue', 0o102, 0o600, 0",
    "sched_setscheduler": "0, 1, ctypes.byref(ctypes.c_int(1))",
    "sched_setaffinity of the worker": "os.getppid(), 8, ctypes.byref(ctypes.c_ulong(1))",
    "setpriority of the worker": "0, os.getppid(), 19",
    "setpriority of everybody": "2, 0, 19",
    "prlimit64 of the worker": "os.getppid(), 7, ctypes.create_string_buffer(16), 0",
    "ioprio_set": "1, os.getppid(), 0",
    "socketpair, inet": "2, 1, 0, ctypes.create_string_buffer(8)",
    "landlock_create_ruleset": "0, 0, 1",
    "clone, new user namespace": "0x10000011, 0, 0, 0, 0",
    "clone, new pid namespace": "0x20000011, 0, 0, 0, 0",
    "clone3": "ctypes.create_string_buffer(b'\\x00\\x00\\x00\\x10' + bytes(84)), 88",
    "ioctl, inode flags": "os.open('.', 0), 0x40086602, ctypes.byref(ctypes.c_long(0x40))",
    "ioctl, inode attributes": "os.open('.', 0), 0x401c5820, ctypes.create_string_buffer(28)",
    "file_setattr": "-100, b'.', ctypes.create_string_buffer(24), 24, 0",
    "ioctl, terminal input": "0, 0x5412, b'x'",
    "io_setup": "1000, ctypes.byref(ctypes.c_ulong())",
    "inotify_init1": "0",
    "fcntl, notices about a directory": "os.open('/usr/bin', 0), 1026, 0x80000001",
    "fcntl, a lease on a file": "os.open('main.py', 0), 1024, 0",
    "fcntl, a larger pipe": "os.pipe()[1], 1031, 1 << 20",
}


def call_in(name: str) -> str:
    return name.replace(",", " ").split()[0]


async def test_the_kernel_refuses(any_way: Way) -> None:
    tried = {name: told for name, told in REFUSED.items() if NUMBERS[call_in(name)] is not None}
    told = await words(any_way, "\n".join(f"print(call({call_in(name)!r}, {tried[name]}))" for name in tried))
    answers = dict(zip(tried, told, strict=True))
    assert {name: answer for name, answer in answers.items() if answer not in ("EPERM", "ENOSYS", "ENETUNREACH")} == {}


@pytest.mark.toolchain("c")
async def test_a_c_program_is_refused_the_same(any_level: LocalSandbox) -> None:
    """Nothing depends on the language: the filter sits below them all, also after execve."""
    by_arguments = {"clone", "fcntl", "ioctl", "prlimit64", "sched_setaffinity", "setpriority", "socketpair"}
    calls = {NUMBERS[name] for name in {call_in(name) for name in REFUSED} - by_arguments} - {None}
    source = """
        #define _GNU_SOURCE
        #include <errno.h>
        #include <stdio.h>
        #include <unistd.h>
        #include <sys/syscall.h>
        int main(void) {
            int numbers[] = {NUMBERS};
            for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++) {
                errno = 0;
                if (syscall(numbers[i], 0, 0, 0, 0, 0, 0) >= 0 || (errno != EPERM && errno != ENOSYS))
                    printf("%d: %d\\n", numbers[i], errno);
            }
            return 0;
        }
        """
    execution = await run(any_level, source.replace("NUMBERS", ", ".join(map(str, calls))), "c")
    assert execution.ok, execution
    assert execution.stdout == ""


@x86
@pytest.mark.toolchain("c")
@pytest.mark.parametrize(
    ("door", "source"),
    [
        ("x32", "syscall(0x40000000 | 39);"),
        ("x32 ptrace", "syscall(0x40000000 | 521, 0, 0, 0, 0);"),
        ("int 0x80", 'int number = 20; __asm__ volatile("int $0x80" : "+a"(number) : : "memory");'),
    ],
)
async def test_a_second_door_to_the_kernel_is_deadly(any_level: LocalSandbox, door: str, source: str) -> None:
    """Calls by another table would pass a filter that knows one table only."""
    code = (
        f'#define _GNU_SOURCE\n#include <stdio.h>\n#include <unistd.h>\nint main(void) {{ {source} puts("through"); }}'
    )
    execution = await run(any_level, code, "c")
    assert "through" not in execution.stdout
    assert execution.verdict is Verdict.SIGNALED


# ----------------------------------------------------------------------------------------------------------- privileges
@namespaces
async def test_a_program_has_no_privilege_and_no_way_to_one(full_way: Way) -> None:
    execution = await run(
        full_way,
        """
        import re, subprocess
        wanted = r"^(Cap\\w+|NoNewPrivs|Seccomp|Uid|Gid|Groups|Seccomp_filters):[ \\t]*(.*)$"
        executed = subprocess.check_output(["/bin/cat", "/proc/self/status"], text=True)
        for text in (open("/proc/self/status").read(), executed):
            for name, value in re.findall(wanted, text, re.M):
                print(name, *value.split())
        """,
    )
    assert execution.ok, execution
    for line in execution.stdout.splitlines():
        name, *values = line.split()
        if name.startswith("Cap") and name != "CapBnd":
            assert values == ["0000000000000000"], line
        elif name in ("Uid", "Gid"):
            assert set(values) == {"1000"}, line
        elif name == "NoNewPrivs":
            assert values == ["1"]
        elif name == "Seccomp":
            assert values == ["2"]
        elif name == "Groups":
            assert set(values) <= {"65534"}


async def test_no_capability_is_kept_at_any_level(any_way: Way) -> None:
    told = await words(
        any_way,
        """
        import subprocess
        code = (
            "import ctypes; held = (ctypes.c_uint * 6)()\\n"
            "libc = ctypes.CDLL(None)\\n"
            f"libc.syscall({NUMBERS['capget']}, (ctypes.c_uint * 2)(0x20080522, 0), held); print(*held)\\n"
            "print(*[libc.prctl(47, 1, number, 0, 0) for number in range(41)])"  # ambient ones
        )
        exec(code)
        print(subprocess.check_output([sys.executable, "-c", code], text=True))
        """,
    )
    assert set(told) == {"0"}
    assert len(told) == 2 * (6 + 41)


async def test_no_user_id_but_its_own_can_be_taken(any_way: Way) -> None:
    told = await words(
        any_way,
        """
        others = [number for number in (0, 1, 1001, 65534) if number != os.getuid()]
        for number in others:
            print(attempt(os.setuid, number), attempt(os.setresuid, number, number, number), attempt(os.setgid, number))
        print(attempt(os.setgroups, [27]), attempt(os.setgroups, [0]))
        """,
    )
    assert set(told) <= {"EPERM", "EINVAL"}


@pytest.mark.toolchain("c")
async def test_a_setuid_program_gains_nothing(any_way: Way) -> None:
    execution = await run(
        any_way,
        """
        import os, subprocess, shutil
        for name in ("su", "sudo", "passwd", "mount", "newgrp", "chsh"):
            path = shutil.which(name)
            if path and os.stat(path).st_mode & 0o4000:
                print(name)
        before = os.getuid()
        shutil.copyfile("/usr/bin/id", "id")
        try:
            os.chmod("id", 0o6755)
            print(subprocess.check_output(["./id", "-u"], text=True).strip() == str(before))
        except OSError:
            print(True)
        """,
    )
    assert execution.stdout.split()[-1] == "True"


@namespaces
async def test_every_mount_is_nosuid_and_the_root_is_read_only(full_way: Way) -> None:
    execution = await run(full_way, "print(open('/proc/self/mounts').read())")
    mounts = [line.split()[1:4:2] for line in execution.stdout.splitlines() if line]
    writable = {"/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/mnt", "/data", "/proc"}
    for place, options in mounts:
        flags = options.split(",")
        assert "ro" in flags or place in writable or place.startswith("/dev/"), (place, options)
        assert "nosuid" in flags or place.startswith("/dev/"), (place, options)


@namespaces
async def test_the_host_keeps_its_name(full_way: Way) -> None:
    told = await words(
        full_way,
        """
        import socket
        print(socket.gethostname(), call("sethostname", b"owned", 5))
        print(attempt(os.open, "/proc/sys/kernel/hostname", os.O_WRONLY))
        """,
    )
    assert told[0] == "sandbox"
    assert set(told[1:]) <= {"EPERM", "EACCES"}


@namespaces
async def test_namespaces_are_all_its_own(full_way: Way) -> None:
    execution = await run(
        full_way,
        "import os\nfor name in sorted(os.listdir('/proc/self/ns')): print(name, os.readlink('/proc/self/ns/' + name))",
    )
    theirs = dict(line.split() for line in execution.stdout.splitlines())
    for name in ("user", "mnt", "pid", "net", "ipc", "uts"):
        assert theirs[name] != os.readlink(f"/proc/self/ns/{name}")


async def test_scheduling_cannot_be_turned_to_advantage(any_way: Way) -> None:
    told = await words(
        any_way,
        """
        class Parameter(ctypes.Structure):
            _fields_ = [("priority", ctypes.c_int)]
        print(call("sched_setscheduler", 0, 1, ctypes.byref(Parameter(50))))
        print(call("sched_setparam", 0, ctypes.byref(Parameter(50))))
        print(attempt(os.nice, -5), attempt(os.setpriority, os.PRIO_PROCESS, 0, -10))
        """,
    )
    assert set(told) <= {"EPERM", "EACCES"}


async def test_io_priority_and_memory_locks_are_out_of_reach(any_way: Way) -> None:
    told = await words(
        any_way,
        """
        size = 64 << 20
        libc.mmap.restype = ctypes.c_void_p
        area = libc.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, 0)
        print(call("mlock", ctypes.c_void_p(area), size), call("mlockall", 3))
        """,
    )
    assert set(told) <= {"EPERM", "ENOMEM", "EAGAIN"}
