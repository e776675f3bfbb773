"""A container with Docker's default profile: no namespaces for us, a read-only cgroup tree, few capabilities.

It is played by a process that gives these rights away before it opens a sandbox (tests/in_container.py). As root its
interpreter lies where everybody can reach it, as in most images. The level is `confined`, and the core of the threat
list holds there, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hostile import QUICK, SYSCALLS
from test_faults import alive, wait_until

from toolyard.errors import IsolationError
from toolyard.sandbox import local
from toolyard.sandbox.isolation import Grants, Level
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Program

pytestmark = [pytest.mark.kernel("landlock", "seccomp")]

CHECKOUT = Path(__file__).parent.parent.parent
needs_own_user = pytest.mark.skipif(os.getuid() != 0, reason="only as root do programs have a user id of their own")


# --------------------------------------------------------------------------------------------------- the container
def play_older_landlock(version: int) -> None:
    """Have sandboxes of this process believe that the kernel's Landlock is of an older version, and use no more."""
    newest = local.probe

    async def probe(python: str | None = None) -> Grants:
        return (await newest(python)).model_copy(update={"landlock_abi": version})

    local.probe = probe


async def serve(*read_only_paths: str) -> None:
    """In the container: run the programs from stdin, one per line, and print the results."""
    async with LocalSandbox(workers=2, read_only_paths=read_only_paths) as sandbox:
        told: dict[str, Any] = {"level": sandbox.level, "memory_limit": sandbox.grants.memory_limit}
        print(json.dumps(told), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            program = Program(asked["code"], asked["language"], fetch_files=asked["fetch_files"])
            execution = await sandbox.run(program, QUICK.model_copy(update=asked["limits"]))
            told = {
                "verdict": execution.verdict, "stdout": execution.stdout, "stderr": execution.stderr,
                "isolation": execution.isolation, "files": sorted(execution.files),
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
sys.path[:0] = {[os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]!r}
import test_in_a_container as container
"""


def python_inside(code: str) -> list[str]:
    who = "user" if os.getuid() else "open-root"
    return [sys.executable, str(CHECKOUT / "tests/in_container.py"), who, sys.executable, "-c", INSIDE + code]


class Container:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.told = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the sandbox in the container ended; see its stderr above"
        return json.loads(line)

    def run(
        self, code: str, language: str = "python", fetch_files: Sequence[str] = (), **limits: float
    ) -> dict[str, Any]:
        assert self._process.stdin
        asked = {"code": code, "language": language, "fetch_files": fetch_files, "limits": limits}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()


SECRET = uuid.uuid4().hex


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    with open_container("asyncio.run(container.serve())") as opened:
        yield opened


@contextlib.contextmanager
def open_container(code: str) -> Generator[Container]:
    environment = {**os.environ, "HOST_SECRET": SECRET}
    with subprocess.Popen(
        python_inside(code),
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
    assert "supports only 'confined'" in done.stdout
    for part in (
        "user namespace: [Errno 1] unshare: Operation not permitted",
        "mount namespace",
        "pid namespace",
        "private root",
    ):
        assert part in done.stdout
    assert "toolyard doctor" in done.stdout


@pytest.mark.exhaustive
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


@needs_own_user
def test_what_lies_in_a_closed_directory_cannot_even_be_looked_at(container: Container) -> None:
    folder = Path("/tmp") / f"host-{uuid.uuid4().hex}"
    folder.mkdir(mode=0o700)
    try:
        (folder / "secret").write_text("the host's secret")
        told = container.run(
            SYSCALLS + f"print(attempt(os.stat, '{folder}/secret'), attempt(os.chdir, '{folder}'), "
            f"attempt(os.readlink, '{folder}/secret'), os.access('{folder}/secret', os.F_OK))"
        )
        assert told["stdout"] == "EACCES EACCES EACCES False\n", told
    finally:
        (folder / "secret").unlink()
        folder.rmdir()


@needs_own_user
@pytest.mark.parametrize("version", [1, 2, 3])
def test_no_file_of_the_host_is_emptied_under_an_older_landlock(version: int) -> None:
    """Before version 3 it does not cover truncation: neither by name, nor of a file opened for reading."""
    folder = Path("/tmp") / f"host-{uuid.uuid4().hex}"
    (folder / "readable").mkdir(parents=True)
    places = {"closed": 0o600, "open": 0o666, "readable/open": 0o666}
    for name, mode in places.items():
        (folder / name).write_text("the host's")
        (folder / name).chmod(mode)
    code = f"container.play_older_landlock({version})\nasyncio.run(container.serve('{folder}/readable'))"
    try:
        with open_container(code) as older:
            told = older.run(
                SYSCALLS
                + f"""
import struct
names = [os.path.join("{folder}", name).encode() for name in {list(places)}]
print(open(names[2]).read() == "the host's")
for name in names:
    attempt(os.truncate, name, 0)
    call("truncate", name, 0)
    for access in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, 3):
        call("openat", -100, name, access | os.O_TRUNC)
        call("openat2", -100, name, struct.pack("QQQ", access | os.O_TRUNC, 0, 0), 24)
with open("own", "w") as file:
    file.write("mine")
    file.truncate(2)
print(os.path.getsize("own"), open("own", "w").write(""), os.path.getsize("own"))
"""
            )
        assert told["stdout"] == "True\n2 0 0\n", told
        assert {name: (folder / name).read_text() for name in places} == dict.fromkeys(places, "the host's")
    finally:
        shutil.rmtree(folder)


@needs_own_user
def test_files_are_fetched_through_no_link_under_an_older_landlock() -> None:
    code = """
import os
os.makedirs("folder/inner")
for name in ("own", "folder/inner/own"):
    open(name, "w").write("mine")
os.symlink("own", "link")
os.symlink("folder", "linked")
os.symlink("/usr/bin", "elsewhere")
"""
    names = ["own", "folder/inner/own", "link", "linked/inner/own", "elsewhere/env", "folder/", "missing"]
    with open_container("container.play_older_landlock(2)\nasyncio.run(container.serve())") as older:
        told = older.run(code, fetch_files=names)
    assert told["files"] == ["folder/inner/own", "own"], told


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
    """Shared memory, and mappings declared as stacks. Without a cgroup, processes are not added up."""
    told = container.run(HOARD.replace("{way}", way), memory_bytes=128 * MIB)
    assert told["verdict"] == "ok", told
    assert int(told["stdout"].split()[-1]) < 128, told


def test_zeros_can_be_read_and_a_file_be_mapped_and_shared(container: Container) -> None:
    """What a program can still use: memory that counts as a file."""
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
