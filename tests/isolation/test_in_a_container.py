"""A container with Docker's default profile: no namespaces for us, a read-only cgroup tree, few capabilities.

It is played by a process that gives these rights away before it opens a sandbox. The level is `confined`, and the core
of the threat list holds there, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import QUICK, SYSCALLS
from test_faults import alive, wait_until

from toolyard.errors import IsolationError
from toolyard.sandbox.isolation import Level
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Program

pytestmark = [pytest.mark.kernel("landlock", "seccomp")]

DOCKERS_CAPABILITIES = 0xA80425FB
NEW_NAMESPACES = 0x7E020000
REFUSED = {
    "x86_64": {"unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155},
    "aarch64": {"unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41},
}
NEWER_REFUSED = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "mount_setattr": 442,
}
OTHERS = {
    "x86_64": {"audit": 0xC000003E, "clone": 56, "seccomp": 317, "capset": 126},
    "aarch64": {"audit": 0xC00000B7, "clone": 220, "seccomp": 277, "capset": 91},
}
CLONE3 = 435


# --------------------------------------------------------------------------------------------------- the container
def dockers_filter() -> bytes:
    load, equal, any_of, answer = 0x20, 0x15, 0x45, 0x06
    allow, refuse, absent = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    numbers = OTHERS[platform.machine()]
    program = [(load, 0, 0, 4), (equal, 1, 0, numbers["audit"]), (answer, 0, 0, allow), (load, 0, 0, 0)]
    for number in [*REFUSED[platform.machine()].values(), *NEWER_REFUSED.values()]:
        program += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    program += [(equal, 0, 1, CLONE3), (answer, 0, 0, absent)]
    program += [
        (equal, 0, 3, numbers["clone"]),
        (load, 0, 0, 16),
        (any_of, 0, 1, NEW_NAMESPACES),
        (answer, 0, 0, refuse),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in [*program, (answer, 0, 0, allow)])


def enter_container() -> None:
    """Give away for good what a process in a container does not have."""
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = OTHERS[platform.machine()]

    def checked(result: int, what: str) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), what)

    def call(number: int, *words: object) -> int:
        return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(w) if isinstance(w, int) else w for w in words])

    if os.getuid() == 0:
        checked(libc.unshare(0x20000), "unshare")
        checked(libc.mount(None, b"/", None, ctypes.c_ulong(0x44000), None), "mount private")
        checked(libc.mount(b"none", b"/sys/fs/cgroup", b"tmpfs", ctypes.c_ulong(1), None), "mount over cgroup")
    else:
        checked(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    program = dockers_filter()
    buffer = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    checked(call(numbers["seccomp"], 1, 0, pointer), "seccomp")
    if os.getuid() == 0:
        for capability in range(41):
            if not DOCKERS_CAPABILITIES >> capability & 1:
                checked(libc.prctl(24, ctypes.c_ulong(capability), 0, 0, 0), "drop from the bounding set")
        kept = struct.pack("6I", DOCKERS_CAPABILITIES, DOCKERS_CAPABILITIES, 0, 0, 0, 0)
        checked(call(numbers["capset"], struct.pack("Ii", 0x20080522, 0), kept), "capset")


async def serve() -> None:
    """In the container: run the programs that come in, one line each, and tell what became of them."""
    async with LocalSandbox(workers=2) as sandbox:
        told: dict[str, Any] = {"level": sandbox.level, "memory_limit": sandbox.grants.memory_limit}
        print(json.dumps(told), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            execution = await sandbox.run(
                Program(asked["code"], asked["language"]), QUICK.model_copy(update=asked["limits"])
            )
            told = {
                "verdict": execution.verdict, "stdout": execution.stdout, "stderr": execution.stderr,
                "isolation": execution.isolation,
            }  # fmt: skip
            print(json.dumps(told), flush=True)


async def insist() -> None:
    """In the container: ask for more than it has."""
    try:
        async with LocalSandbox(isolation="required"):
            print("opened")
    except IsolationError as error:
        print(error)


INSIDE = f"""
import asyncio, os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_in_a_container as container
container.enter_container()
"""


def python_inside(code: str) -> list[str]:
    return [sys.executable, "-c", INSIDE + code]


class Container:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.told = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the sandbox in the container ended; see its stderr above"
        return json.loads(line)

    def run(self, code: str, language: str = "python", **limits: float) -> dict[str, Any]:
        assert self._process.stdin
        print(json.dumps({"code": code, "language": language, "limits": limits}), file=self._process.stdin, flush=True)
        return self._answer()


SECRET = uuid.uuid4().hex


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    environment = {**os.environ, "HOST_SECRET": SECRET}
    with subprocess.Popen(
        python_inside("asyncio.run(container.serve())"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        yield Container(process)
        assert process.stdin
        process.stdin.close()
        assert process.wait(15) == 0


# --------------------------------------------------------------------------------------------------- what is offered
def test_the_level_is_named_and_every_execution_bears_it(container: Container) -> None:
    assert container.told == {"level": Level.CONFINED, "memory_limit": "per process"}
    assert container.run("print(1)")["isolation"] == Level.CONFINED


def test_full_isolation_is_refused_and_the_message_names_what_is_missing() -> None:
    done = subprocess.run(
        python_inside("asyncio.run(container.insist())"), capture_output=True, text=True, timeout=60, check=True
    )
    assert "grants only 'confined'" in done.stdout
    for part in (
        "user namespace: [Errno 1] unshare: Operation not permitted",
        "mount namespace",
        "pid namespace",
        "private root",
    ):
        assert part in done.stdout
    assert "toolyard doctor" in done.stdout


def test_the_doctor_says_confined_and_what_to_do_about_it(without_torch: dict[str, str]) -> None:
    code = "from toolyard.cli.main import main\nsys.argv = ['toolyard', 'doctor', '--json']\nsys.exit(main())"
    environment = {**os.environ, **without_torch, "PATH": "/nowhere"}  # nor compilers, so that it is quick
    done = subprocess.run(
        python_inside(code), capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["isolation"], report["can_run"], report["memory_limit"]) == ("confined", True, "per process")
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["user namespace"]["status"] != "ok"
    assert "seccomp" in checks["user namespace"]["remedy"]
    assert checks["cgroup"]["remedy"]
    assert checks["landlock"]["status"] == checks["seccomp"]["status"] == "ok"


@pytest.mark.parametrize(
    ("language", "code"),
    [
        (
            "python",
            "import subprocess, threading\nprint(subprocess.check_output(['echo', 'hello'], text=True), end='')",
        ),
        ("bash", "echo hello > file && cat file"),
        pytest.param("c", '#include <stdio.h>\nint main(void) { puts("hello"); }', marks=pytest.mark.toolchain("c")),
    ],
)
def test_programs_run(container: Container, language: str, code: str) -> None:
    told = container.run(code, language)
    assert (told["verdict"], told["stdout"]) == ("ok", "hello\n"), told


def test_a_compiler_is_confined_like_a_program(container: Container, tmp_path: Path) -> None:
    secret = tmp_path / "secret.h"
    secret.write_text("#error the host's secret")
    told = container.run(f'#include "{secret}"\nint main(void) {{}}', "c")
    assert told["verdict"] == "compile_failed"
    assert "the host's secret" not in told["stderr"]


# --------------------------------------------------------------------------------------------------- attacks
@pytest.mark.parametrize("mode", [0o700, 0o755], ids=["in a closed directory", "in an open one"])
def test_files_of_the_host_are_closed(container: Container, mode: int) -> None:
    folder = Path("/tmp") / f"host-{uuid.uuid4().hex}"
    folder.mkdir(mode=mode)
    try:
        (folder / "secret").write_text("the host's secret")
        told = container.run(
            SYSCALLS
            + f"""
import subprocess
place = "{folder}/secret"
os.symlink(place, "link")
print(attempt(open, place), attempt(open, "link"), attempt(os.listdir, "{folder}"), attempt(os.listdir, "/tmp"))
print(attempt(os.link, place, "hard"), attempt(os.rename, place, "moved"), attempt(os.unlink, place))
print(attempt(open, "{folder}/new", "w"), attempt(open, place, "a"), attempt(os.truncate, place, 0))
print(subprocess.run(["/bin/cat", place], capture_output=True).returncode)
"""
        )
        assert set(told["stdout"].split()) <= {"EACCES", "EPERM", "EXDEV", "ENOENT", "1"}, told
        assert (folder / "secret").read_text() == "the host's secret"
        assert [path.name for path in folder.iterdir()] == ["secret"]
    finally:
        (folder / "secret").unlink()
        folder.rmdir()


@pytest.mark.parametrize(
    "place", ["/etc/shadow", "/etc/passwd", "/root", "/home", "/proc/1/environ", str(Path(__file__))]
)
def test_places_of_the_system_are_closed(container: Container, place: str) -> None:
    told = container.run(SYSCALLS + f"print(attempt(os.listdir, {place!r}), attempt(open, {place!r}))")
    assert set(told["stdout"].split()) <= {"EACCES", "EPERM", "ENOENT", "ENOTDIR", "EISDIR"}, told


def test_the_environment_of_the_host_is_closed(container: Container) -> None:
    told = container.run(
        """
import os, subprocess
print(dict(os.environ), subprocess.check_output("env"))
for pid in ("self", os.getppid(), *range(1, 5000)):
    try:
        print(open(f"/proc/{pid}/environ").read())
    except OSError:
        pass
"""
    )
    assert told["verdict"] == "ok"
    assert SECRET not in told["stdout"] + told["stderr"]


def test_services_of_the_host_cannot_be_reached(container: Container, tmp_path: Path) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    name = uuid.uuid4().hex
    try:
        listeners[1].bind(f"\0{name}")
        listeners[2].bind(f"/tmp/{name}")
        for listener in listeners[1:]:
            listener.listen()
        for listener in listeners:
            listener.settimeout(0.1)
        told = container.run(
            SYSCALLS
            + f"""
import socket
def reach(family, kind, address):
    with socket.socket(family, kind) as it:
        return it.sendto(b"x", address) if kind == socket.SOCK_DGRAM else it.connect(address)
port = {listeners[0].getsockname()[1]}
print(attempt(reach, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)))
print(attempt(reach, socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)))
print(attempt(reach, socket.AF_INET6, socket.SOCK_STREAM, ("::1", port)))
print(attempt(reach, socket.AF_UNIX, socket.SOCK_STREAM, "\\0{name}"))
print(attempt(reach, socket.AF_UNIX, socket.SOCK_STREAM, "/tmp/{name}"))
print(attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1), attempt(socket.socket, socket.AF_NETLINK, 3, 0))
"""
        )
        assert set(told["stdout"].split()) <= {"ENETUNREACH", "EPERM", "EACCES", "ECONNREFUSED"}, told
        for listener in listeners:
            with pytest.raises(TimeoutError):
                listener.accept()
    finally:
        for listener in listeners:
            listener.close()
        os.unlink(f"/tmp/{name}")


NAMED = "import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'{marker}', 0, 0, 0)\n"


def test_a_daemon_does_not_outlive_its_result(container: Container) -> None:
    marker = f"ty{uuid.uuid4().hex[:12]}"
    daemon = "if os.fork() == 0:\n  os.setsid(); os.fork() and os._exit(0)\n  os.closerange(0, 9); time.sleep(600)\n"
    told = container.run(NAMED.format(marker=marker) + daemon + "time.sleep(0.2)\nprint('left')")
    assert told["stdout"] == "left\n"
    assert alive(marker) == []


def test_a_fork_bomb_is_bounded_and_ends_with_its_time(container: Container) -> None:
    marker = f"ty{uuid.uuid4().hex[:12]}"
    bomb = "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    told = container.run(NAMED.format(marker=marker) + bomb, run_seconds=0.5, processes=16)
    assert told["verdict"] == "timed_out"
    wait_until(lambda: not alive(marker))
    assert container.run("print(1)")["stdout"] == "1\n"


def test_past_the_limit_fork_fails_inside_the_program(container: Container) -> None:
    code = """
import os, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except BlockingIOError:
    print("refused")
"""
    told = container.run(code, processes=16)
    assert (told["verdict"], told["stdout"]) == ("ok", "refused\n")


def test_a_memory_hog_is_stopped(container: Container) -> None:
    told = container.run("held = []\nwhile True: held.append(bytearray(1 << 20))", memory_bytes=128 * MIB)
    assert told["verdict"] == "memory_exceeded" or "MemoryError" in told["stderr"], told
    assert told["verdict"] != "timed_out"
    assert container.run("print(1)")["stdout"] == "1\n"


HOARD = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
SHARED, PRIVATE, ANONYMOUS, GROWS_DOWN, STEP = 0x1, 0x2, 0x20, 0x100, 16 << 20

def take(flags, handle=-1):
    area = libc.mmap(None, ctypes.c_size_t(STEP), 3, flags, handle, 0)
    if area == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    for at in range(area, area + STEP, 4096):
        ctypes.c_char.from_address(at).value = b"x"

def take_file(handle):
    os.write(handle, bytes(STEP))

held = 0
try:
    while held < 1 << 30:
        {way}
        held += STEP
except OSError as error:
    print(error)
print(held >> 20)
"""


@pytest.mark.parametrize(
    "way",
    [
        "take(SHARED | ANONYMOUS)",
        "take(3 | ANONYMOUS)",
        "take(PRIVATE | ANONYMOUS | GROWS_DOWN)",
        "take(SHARED, os.open('/dev/zero', os.O_RDWR))",
        "take_file(os.memfd_create('hoard'))",
    ],
)
def test_memory_that_no_limit_of_a_process_counts_cannot_be_had(container: Container, way: str) -> None:
    """Shared memory, and what poses as a stack. Nobody adds up the processes here: there is no cgroup."""
    told = container.run(HOARD.replace("{way}", way), memory_bytes=128 * MIB)
    assert told["verdict"] == "ok", told
    assert int(told["stdout"].split()[-1]) < 128, told


def test_zeros_can_be_read_and_a_file_be_mapped_and_shared(container: Container) -> None:
    """What a program still has of it: memory that counts as a file."""
    told = container.run(
        """
import mmap, os
with open("/dev/zero", "rb", buffering=0) as zeros, open("file", "w+b") as file:
    file.write(zeros.read(4096))
    file.flush()
    with mmap.mmap(file.fileno(), 0) as shared:
        if os.fork() == 0:
            shared[0] = 7
            os._exit(0)
        os.wait()
        print(shared[0])
"""
    )
    assert told["stdout"] == "7\n", told


def test_signals_to_everybody_reach_nobody(container: Container) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        told = container.run(
            SYSCALLS
            + f"""
for target in ({os.getpid()}, {bystander.pid}, os.getppid(), -1):
    attempt(os.kill, target, 9)
print("sent")
"""
        )
        assert told["stdout"] == "sent\n"
        assert bystander.poll() is None
        bystander.kill()
    assert container.run("print(1)")["stdout"] == "1\n"


def test_no_way_back_to_privileges(container: Container) -> None:
    told = container.run(
        SYSCALLS
        + """
print(attempt(os.setuid, 0) if os.getuid() else "EPERM", attempt(os.chroot, "."))
print(call("unshare", 0x10000000), call("unshare", 0x20000), call("mount", b"none", b".", b"tmpfs", 0, 0))
print(call("ptrace", 16, os.getppid(), 0, 0))
print(call("bpf", 0, 0, 0), call("keyctl", 0, 0, 0), call("io_uring_setup", 1, 0), call("pivot_root", b".", b"."))
"""
    )
    assert set(told["stdout"].split()) <= {"EPERM", "ENOSYS"}, told
