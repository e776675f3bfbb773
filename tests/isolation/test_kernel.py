"""The kernel's doors: privileges, namespaces, mounts, and system calls that no program needs."""

from __future__ import annotations

import os
import platform

import pytest
from hostile import run, words

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Verdict

pytestmark = pytest.mark.asyncio(loop_scope="session")
namespaces = pytest.mark.kernel("namespaces")
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of this architecture's system calls")

REFUSED = {
    # name: (number on x86_64, arguments that would do something)
    "ptrace": (101, "0, 0, 0, 0"),
    "io_uring_setup": (425, "8, ctypes.create_string_buffer(120)"),
    "io_uring_enter": (426, "0, 0, 0, 0"),
    "io_uring_register": (427, "0, 0, 0, 0"),
    "keyctl": (250, "0, -3, 0"),
    "add_key": (248, "b'user', b'name', b'payload', 7, -3"),
    "request_key": (249, "b'user', b'name', 0, -3"),
    "bpf": (321, "0, ctypes.create_string_buffer(128), 128"),
    "perf_event_open": (298, "ctypes.create_string_buffer(128), 0, -1, -1, 0"),
    "userfaultfd": (323, "1"),
    "unshare, user": (272, "0x10000000"),
    "unshare, mount": (272, "0x20000"),
    "unshare, network": (272, "0x40000000"),
    "setns": (308, "0, 0"),
    "mount": (165, "b'x', b'/tmp', b'tmpfs', 0, 0"),
    "umount2": (166, "b'/proc', 2"),
    "pivot_root": (155, "b'.', b'.'"),
    "chroot": (161, "b'/tmp'"),
    "open_tree": (428, "-100, b'/', 1"),
    "move_mount": (429, "0, b'', -100, b'/tmp', 0"),
    "fsopen": (430, "b'tmpfs', 0"),
    "fsmount": (432, "0, 0, 0"),
    "mount_setattr": (442, "-100, b'/', 0, ctypes.create_string_buffer(32), 32"),
    "name_to_handle_at": (303, "-100, b'/', ctypes.create_string_buffer(128), ctypes.create_string_buffer(8), 0"),
    "open_by_handle_at": (304, "0, ctypes.create_string_buffer(128), 0"),
    "fanotify_init": (300, "0, 0"),
    "sethostname": (170, "b'owned', 5"),
    "setdomainname": (171, "b'owned', 5"),
    "reboot": (169, "0xfee1dead, 672274793, 0"),
    "kexec_load": (246, "0, 0, 0, 0"),
    "init_module": (175, "b'', 0, b''"),
    "finit_module": (313, "0, b'', 0"),
    "delete_module": (176, "b'x', 0"),
    "swapon": (167, "b'/tmp/x', 0"),
    "acct": (163, "b'/tmp/x'"),
    "settimeofday": (164, "ctypes.create_string_buffer(16), 0"),
    "clock_settime": (227, "0, ctypes.create_string_buffer(16)"),
    "adjtimex": (159, "ctypes.create_string_buffer(256)"),
    "syslog": (103, "3, ctypes.create_string_buffer(64), 64"),
    "iopl": (172, "3"),
    "ioperm": (173, "0, 1, 1"),
    "modify_ldt": (154, "1, ctypes.create_string_buffer(16), 16"),
    "personality": (135, "0x0040000"),
    "process_vm_readv": (310, "1, 0, 0, 0, 0, 0"),
    "process_vm_writev": (311, "1, 0, 0, 0, 0, 0"),
    "kcmp": (312, "1, 1, 0, 0, 0"),
    "pidfd_getfd": (438, "0, 0, 0"),
    "process_madvise": (440, "0, 0, 0, 0, 0"),
    "move_pages": (279, "1, 0, 0, 0, 0, 0"),
    "memfd_secret": (447, "0"),
    "vmsplice": (278, "1, 0, 0, 0"),
    "quotactl": (179, "0, 0, 0, 0"),
    "shmget": (29, "0, 4096, 0o1600"),
    "msgget": (68, "0, 0o1600"),
    "semget": (64, "0, 1, 0o1600"),
    "mq_open": (240, "b'queue', 0o102, 0o600, 0"),
    "sched_setscheduler": (144, "0, 1, ctypes.byref(ctypes.c_int(1))"),
    "sched_setaffinity of the worker": (203, "os.getppid(), 8, ctypes.byref(ctypes.c_ulong(1))"),
    "setpriority of the worker": (141, "0, os.getppid(), 19"),
    "setpriority of everybody": (141, "2, 0, 19"),
    "prlimit of the worker": (302, "os.getppid(), 7, ctypes.create_string_buffer(16), 0"),
    "ioprio_set": (251, "1, os.getppid(), 0"),
    "socketpair, inet": (53, "2, 1, 0, ctypes.create_string_buffer(8)"),
    "landlock_create_ruleset": (444, "0, 0, 1"),
    "clone, new user namespace": (56, "0x10000011, 0, 0, 0, 0"),
    "clone, new pid namespace": (56, "0x20000011, 0, 0, 0, 0"),
    "clone3": (435, "ctypes.create_string_buffer(b'\\x00\\x00\\x00\\x10' + bytes(84)), 88"),
    "inode flags by ioctl": (16, "os.open('.', 0), 0x40086602, ctypes.byref(ctypes.c_long(0x40))"),
    "inode attributes by ioctl": (16, "os.open('.', 0), 0x401c5820, ctypes.create_string_buffer(28)"),
    "file_setattr": (469, "-100, b'.', ctypes.create_string_buffer(24), 24, 0"),
    "terminal input by ioctl": (16, "0, 0x5412, b'x'"),
}


@x86
@pytest.mark.parametrize("name", REFUSED)
async def test_the_kernel_refuses(any_level: LocalSandbox, name: str) -> None:
    number, arguments = REFUSED[name]
    told = await words(any_level, f"print(call({number}, {arguments}))")
    assert told[0] in {"EPERM", "ENOSYS", "ENETUNREACH"}


@x86
@pytest.mark.toolchain("c")
async def test_a_c_program_is_refused_the_same(any_level: LocalSandbox) -> None:
    """Nothing depends on the language: the filter sits below them all, also after execve."""
    calls = {number for number, _ in REFUSED.values()} - {16, 53, 56, 141, 203, 302}
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
    execution = await run(any_level, source.replace("NUMBERS", ", ".join(map(str, sorted(calls)))), "c")
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
async def test_a_program_has_no_privilege_and_no_way_to_one(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        """
        import re, subprocess
        wanted = r"^(Cap\\w+|NoNewPrivs|Seccomp|Uid|Gid|Groups|Seccomp_filters):[ \\t]*(.*)$"
        executed = subprocess.check_output(["/bin/cat", "/proc/self/status"], text=True)
        for text in (open("/proc/self/status").read(), executed):
            for name, value in re.findall(wanted, text, re.M):
                print(name, *value.split())
        """,
    )
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


async def test_no_user_id_but_its_own_can_be_taken(any_level: LocalSandbox) -> None:
    told = await words(
        any_level,
        """
        others = [number for number in (0, 1, 1001, 65534) if number != os.getuid()]
        for number in others:
            print(attempt(os.setuid, number), attempt(os.setresuid, number, number, number), attempt(os.setgid, number))
        print(attempt(os.setgroups, [27]), attempt(os.setgroups, [0]))
        """,
    )
    assert set(told) <= {"EPERM", "EINVAL"}


@pytest.mark.toolchain("c")
async def test_a_setuid_program_gains_nothing(any_level: LocalSandbox) -> None:
    execution = await run(
        any_level,
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
async def test_every_mount_is_nosuid_and_the_root_is_read_only(sandbox: LocalSandbox) -> None:
    execution = await run(sandbox, "print(open('/proc/self/mounts').read())")
    mounts = [line.split()[1:4:2] for line in execution.stdout.splitlines() if line]
    writable = {"/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/mnt", "/data", "/proc"}
    for place, options in mounts:
        flags = options.split(",")
        assert "ro" in flags or place in writable or place.startswith("/dev/"), (place, options)
        assert "nosuid" in flags or place.startswith("/dev/"), (place, options)


@namespaces
async def test_the_host_keeps_its_name(sandbox: LocalSandbox) -> None:
    told = await words(
        sandbox,
        """
        import socket
        print(socket.gethostname(), call(170, b"owned", 5), attempt(os.open, "/proc/sys/kernel/hostname", os.O_WRONLY))
        """,
    )
    assert told[0] == "sandbox"
    assert set(told[1:]) <= {"EPERM", "EACCES"}


@namespaces
async def test_namespaces_are_all_its_own(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        "import os\nfor name in sorted(os.listdir('/proc/self/ns')): print(name, os.readlink('/proc/self/ns/' + name))",
    )
    theirs = dict(line.split() for line in execution.stdout.splitlines())
    for name in ("user", "mnt", "pid", "net", "ipc", "uts"):
        assert theirs[name] != os.readlink(f"/proc/self/ns/{name}")


async def test_scheduling_cannot_be_turned_to_advantage(any_level: LocalSandbox) -> None:
    told = await words(
        any_level,
        """
        class Parameter(ctypes.Structure):
            _fields_ = [("priority", ctypes.c_int)]
        print(call(144, 0, 1, ctypes.byref(Parameter(50))), call(142, 0, ctypes.byref(Parameter(50))))
        print(attempt(os.nice, -5), attempt(os.setpriority, os.PRIO_PROCESS, 0, -10))
        """,
    )
    assert set(told) <= {"EPERM", "EACCES"}


async def test_io_priority_and_memory_locks_are_out_of_reach(any_level: LocalSandbox) -> None:
    told = await words(
        any_level,
        """
        size = 64 << 20
        libc.mmap.restype = ctypes.c_void_p
        area = libc.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, 0)
        print(call(149, ctypes.c_void_p(area), size), call(151, 3))   # mlock, mlockall
        """,
    )
    assert set(told) <= {"EPERM", "ENOMEM", "EAGAIN"}
