"""What a program must never read: the host's files and environment, other processes, other runs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import uuid
from pathlib import Path

import pytest
from hostile import SYSCALLS, open_to_everybody, run, words
from ways import Way

from toolyard.sandbox.host.session import LocalSession
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Program

pytestmark = pytest.mark.asyncio(loop_scope="session")
namespaces = pytest.mark.kernel("namespaces")

CHECKOUT = Path(__file__).parent.parent.parent
PYTHON = Path(sys.executable).resolve().parent


@pytest.fixture(scope="module")
def host_secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that everybody on the host can read."""
    path = tmp_path_factory.mktemp("open") / "secret"
    path.write_text("the host's secret")
    return open_to_everybody(path)


# ----------------------------------------------------------------------------------------------------------- host files
@pytest.mark.parametrize("way", ["open", "listdir", "exec", "chdir into", "link to", "map"])
async def test_a_host_file_cannot_be_read(any_way: Way, host_secret: Path, way: str) -> None:
    execution = await run(
        any_way,
        SYSCALLS
        + f"""
import mmap, subprocess
place = {str(host_secret)!r}
ways = {{
    "open": lambda: open(place).read(),
    "listdir": lambda: os.listdir(os.path.dirname(place)),
    "exec": lambda: subprocess.run(["/bin/cat", place], capture_output=True).stdout or "EACCES",
    "chdir into": lambda: (os.chdir(os.path.dirname(place)), open("secret").read()),
    "link to": lambda: (os.symlink(place, "link"), open("link").read()),
    "map": lambda: mmap.mmap(os.open(place, os.O_RDONLY), 0, prot=mmap.PROT_READ)[:],
}}
print(attempt(ways[{way!r}]))
""",
    )
    assert execution.stdout.strip() in {"ENOENT", "EACCES", "EPERM", "FileNotFoundError"}
    assert "the host's secret" not in execution.stdout + execution.stderr


async def test_private_places_of_the_host_are_closed(any_way: Way) -> None:
    places = [
        "/etc/shadow",
        "/etc/gshadow",
        "/etc/sudoers",
        "/etc/ssh",
        "/var/lib",
        "/var/log",
        "/run",
        "/boot",
        "/sys",
    ]
    places += [str(CHECKOUT / name) for name in ("pyproject.toml", "src", "tests", ".git")]
    places += [
        str(Path.home() / name) for name in (".ssh", ".bashrc", ".profile", ".bash_history", ".gitconfig", ".config")
    ]
    told = await words(
        any_way,
        f"""
        for place in {places!r}:
            print(attempt(os.open, place, os.O_RDONLY))
        """,
    )
    assert set(told) <= {"ENOENT", "EACCES"}


@namespaces
async def test_of_home_directories_only_interpreters_and_toolchains_are_visible(sandbox: LocalSandbox) -> None:
    shown = {*sandbox.grants.python.prefixes, *sandbox._compilers.read_only}
    execution = await run(
        sandbox,
        f"""
        import os
        for top in ("/root", "/home", {str(Path.home())!r}, {str(CHECKOUT)!r}):
            for folder, folders, files in os.walk(top):
                if any(folder == place or folder.startswith(place + "/") for place in {shown!r}):
                    folders.clear()
                    continue
                print(*[os.path.join(folder, name) for name in files], sep="\\n", end="")
        """,
        run_seconds=20,
    )
    assert execution.ok
    assert execution.stdout == ""
    assert not [place for place in shown if place in ("/root", "/home", str(Path.home()), str(CHECKOUT))]


@namespaces
async def test_tokens_beside_a_toolchain_are_not_visible(sandbox: LocalSandbox) -> None:
    """`~/.cargo/bin/rustc` must not bring `~/.cargo/credentials.toml` along."""
    shown = [Path(place) for place in sandbox._compilers.read_only]
    secrets = [
        ".cargo/credentials.toml",
        ".cargo/credentials",
        ".npmrc",
        ".config",
        ".netrc",
        ".gem/credentials",
        ".m2",
    ]
    for secret in (Path.home() / name for name in secrets):
        assert not [place for place in shown if place == secret or place in secret.parents]


@namespaces
async def test_the_root_has_nothing_but_what_a_program_needs(full_way: Way) -> None:
    execution = await run(full_way, "import os; print(*sorted(os.listdir('/'))); print(*sorted(os.listdir('/etc')))")
    top, etc = (set(line.split()) for line in execution.stdout.splitlines())
    system = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "proc", "dev"}
    own = {"sandbox", "tmp", "var", "mnt", "data"}
    ways = {Path(path).parts[1] for path in (sys.prefix, sys.base_prefix)} | {"root", "home", "opt", "nix"}
    assert top <= system | own | ways, "beyond the system, only the way to the interpreter and to toolchains"
    assert not etc & {"shadow", "gshadow", "sudoers", "ssh", "machine-id", "resolv.conf", "hostname"}


async def test_devices_of_the_host_are_closed(any_way: Way) -> None:
    told = await words(
        any_way,
        """
        for name in ("mem", "kmsg", "vda", "sda", "loop0", "tty", "tty0", "console", "ptmx", "fuse", "kvm", "port",
                     "net/tun", "vsock", "mapper/control", "rtc0", "vhost-vsock", "nvme0n1", "dri/card0", "hwrng"):
            print(attempt(os.open, "/dev/" + name, os.O_RDONLY), attempt(os.open, "/dev/" + name, os.O_WRONLY))
        """,
    )
    assert set(told) <= {"ENOENT", "EACCES", "EPERM", "ENXIO"}


# ---------------------------------------------------------------------------------------------------------- environment
async def test_no_variable_of_the_host_reaches_a_program(any_way: Way) -> None:
    """The host's environment is set before the sandbox starts: by pytest itself, among others."""
    marker = [value for name, value in os.environ.items() if len(value) > (3 if name.startswith("PYTEST") else 20)]
    assert marker
    execution = await run(
        any_way,
        """
        import os, subprocess
        print(dict(os.environ))
        for process in ("self", "1", os.getppid(), "thread-self"):
            try:
                print(open(f"/proc/{process}/environ").read())
            except OSError as error:
                print(error.errno)
        print(subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout)
        """,
    )
    assert execution.ok
    assert [name for name in os.environ if name.startswith("PYTEST") and name in execution.stdout] == []
    told = execution.stdout
    for known in (str(Path(sys.executable).parent), str(PYTHON), "/usr/local/bin:/usr/bin:/bin"):  # its own PATH
        told = told.replace(known, "")
    assert [value for value in marker if value in told] == []


SCAN = """
import hashlib, re, sys
wanted = sys.stdin.read().split()
found, scanned = set(), 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        span, rights, *_ = line.split()
        if rights[0] != "r" or "[vvar" in line or "[vsyscall" in line:
            continue
        low, high = (int(part, 16) for part in span.split("-"))
        memory.seek(low)
        try:
            content = memory.read(high - low)
        except OSError:
            continue
        scanned += len(content)
        for run in re.findall(rb"[0-9a-f]{128,}", content):
            windows = (run[at : at + 128] for at in range(len(run) - 127))
            found |= {digest for digest in (hashlib.sha256(w).hexdigest() for w in windows) if digest in wanted}
assert scanned > 1 << 20
print(len(found) > 0)
"""
"""Looks for needles of 128 hexadecimal digits in all of its own memory. It is given their hashes only, on stdin: a
program that knows what it looks for finds itself."""


def make_needle() -> tuple[str, str]:
    needle = uuid.uuid4().hex + uuid.uuid4().hex + uuid.uuid4().hex + uuid.uuid4().hex
    return needle, hashlib.sha256(needle.encode()).hexdigest()


@namespaces
async def test_the_scan_finds_what_is_there(sandbox: LocalSandbox) -> None:
    needle, digest = make_needle()
    assert (await run(sandbox, f"a = '{needle}'\n{SCAN}", stdin=digest, run_seconds=60)).stdout == "True\n"


@pytest.mark.any_user
@namespaces
async def test_no_secret_of_the_host_is_in_a_programs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked interpreter keeps its parent's heap and stack: they must never have held anything of the host's."""
    needle, digest = make_needle()
    monkeypatch.setenv("TOOLYARD_SECRET", needle)
    async with LocalSandbox(workers=1) as alone:
        assert (await run(alone, SCAN, stdin=digest, run_seconds=60)).stdout == "False\n"
        async with alone.session() as session:
            told = await session.run(SCAN.replace("sys.stdin.read().split()", repr([digest])), seconds=60)
            assert told.stdout == "False\n", told


EARLIER = {
    "source": lambda needle: Program(f"a = '{needle}'"),
    "stdin": lambda needle: Program("import sys; sys.stdin.read()", stdin=needle),
    "stdout": lambda needle: Program("print(input())", stdin=needle),
    "stderr": lambda needle: Program("import sys; print(input(), file=sys.stderr)", stdin=needle),
    "a file": lambda needle: Program("open('in').read()", files={"in": needle.encode()}),
    "a file asked back": lambda needle: Program("open('out', 'w').write(input())", stdin=needle, fetch_files=["out"]),
    "an argument": lambda needle: Program("import sys; sys.argv", args=[needle]),
    "a variable": lambda needle: Program("import os; os.environ", env={"SECRET": needle}),
    "a failure": lambda needle: Program(f"raise ValueError('{needle}')"),
}


@namespaces
async def test_no_byte_of_an_earlier_run_is_in_a_programs_memory() -> None:
    needles = {part: make_needle() for part in EARLIER}
    async with LocalSandbox(workers=1) as alone:  # one worker, so that all runs have the same
        for part, (needle, _) in needles.items():
            for _ in range(3):
                assert (await alone.run(EARLIER[part](needle))).run
        digests = " ".join(digest for _, digest in needles.values())
        execution = await run(alone, SCAN.replace("len(found) > 0", "*found"), stdin=digests, run_seconds=60)
    assert execution.ok
    assert [part for part, (_, digest) in needles.items() if digest in execution.stdout] == []


@namespaces
async def test_no_byte_of_another_session_is_in_a_sessions_memory(sandbox: LocalSandbox) -> None:
    """Neither those of a program that has ended, nor those of one that is running."""
    ended, going_on, own = make_needle(), make_needle(), make_needle()

    async def use(session: LocalSession, needle: str) -> None:
        await session.write_files({"in": needle.encode()})
        assert needle in (await session.run("kept = open('in').read(); print(kept)")).stdout
        assert not (await session.run(f"raise ValueError('{needle}')")).ok
        assert await session.read_files(["in"])

    async with sandbox.session() as first:
        await use(first, ended[0])
    async with sandbox.session() as second, sandbox.session() as third:
        await use(second, going_on[0])
        scan = SCAN.replace("sys.stdin.read().split()", repr([ended[1], going_on[1], own[1]]))
        told = await third.run(f"a = '{own[0]}'\n{scan.replace('len(found) > 0', '*found')}", seconds=60)
    assert told.stdout.split() == [own[1]], told


# ------------------------------------------------------------------------------------------------------ other processes
WORKERS_ENTRIES = (
    "environ",
    "mem",
    "maps",
    "smaps",
    "root",
    "cwd",
    "exe",
    "fd",
    "auxv",
    "io",
    "stack",
    "syscall",
    "pagemap",
)


async def test_the_workers_entries_in_proc_are_closed(any_way: Way) -> None:
    told = await words(
        any_way,
        f"""
        for pid in (1, os.getppid()):
            for name in {WORKERS_ENTRIES}:
                place = f"/proc/{{pid}}/{{name}}"
                try:
                    if name in ("root", "cwd", "exe"):
                        os.listdir(place)
                    elif name == "fd":
                        os.listdir(place)
                    else:
                        open(place, "rb").read(1)
                    print("read")
                except OSError as error:
                    print(errno.errorcode[error.errno])
        """,
    )
    assert set(told) <= {"EACCES", "EPERM", "ENOENT", "ENOTDIR"}


@namespaces
async def test_the_hosts_root_is_not_reachable_through_proc(full_way: Way, host_secret: Path) -> None:
    told = await words(
        full_way,
        f"""
        for pid in ("1", "self", "thread-self"):
            print(attempt(open, f"/proc/{{pid}}/root{host_secret}"))
            print(attempt(open, f"/proc/{{pid}}/cwd/../../..{host_secret}"))
        """,
    )
    assert set(told) <= {"EACCES", "ENOENT", "EPERM"}


async def test_other_processes_cannot_be_traced_or_read(any_way: Way) -> None:
    neighbour = asyncio.ensure_future(run(any_way, "import time; time.sleep(0.5); print('unharmed')"))
    told = await words(
        any_way,
        """
        class Span(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
        buffer = ctypes.create_string_buffer(64)
        ours, theirs = Span(ctypes.addressof(buffer), 64), Span(0x400000, 64)
        for target in {1, 2, 3, os.getppid(), os.getpid() - 1, os.getpid() + 1}:
            print(call("ptrace", 16, target, 0, 0))       # PTRACE_ATTACH
            print(call("ptrace", 0x4206, target, 0, 0))   # PTRACE_SEIZE
            print(call("process_vm_readv", target, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0))
            print(call("process_vm_writev", target, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0))
            print(call("pidfd_getfd", 3, 0, 0), call("kcmp", target, os.getpid(), 0, 0, 0))
        print(call("ptrace", 0, 0, 0, 0))   # PTRACE_TRACEME
        """,
    )
    assert set(told) <= {"EPERM", "ENOSYS", "ESRCH"}
    assert (await neighbour).stdout == "unharmed\n"


async def test_a_neighbours_directory_is_closed(any_way: Way) -> None:
    """Where there is no private root, other runs' directories are on the same file system."""
    name = f"secret-{uuid.uuid4().hex}"
    neighbour = asyncio.ensure_future(run(any_way, f"import time\nopen('{name}', 'w').write('mine')\ntime.sleep(1)"))
    await asyncio.sleep(0.3)
    execution = await run(
        any_way,
        f"""
        import glob, os, tempfile
        above = os.path.dirname(os.path.dirname(os.getcwd()))
        found = []
        for top in {{above, "/tmp", "/sandbox", "/var/tmp", "/dev/shm", tempfile.gettempdir()}}:
            for folder, _, names in os.walk(top):
                found += [name for name in names if name == "{name}"]
        for number in range(1, 65536 if above != "/" else 1):
            try:
                open(f"{{above}}/{{number}}/work/{name}")
                found.append("by number")
            except OSError:
                pass
        print(found)
        """,
    )
    assert execution.stdout == "[]\n"
    assert (await neighbour).ok


async def test_the_kernels_log_is_closed(any_way: Way) -> None:
    told = await words(
        any_way,
        """
        buffer = ctypes.create_string_buffer(4096)
        for action in (2, 3, 4, 9, 10):
            print(call("syslog", action, buffer, 4096))
        print(attempt(os.open, "/dev/kmsg", os.O_RDONLY), attempt(os.open, "/proc/kmsg", os.O_RDONLY))
        """,
    )
    assert set(told) <= {"EPERM", "ENOENT", "EACCES"}


@namespaces
async def test_proc_opens_no_door_to_the_host(full_way: Way) -> None:
    told = await words(
        full_way,
        """
        for place in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname",
                      "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/ns_last_pid",
                      "/proc/1/oom_score_adj", "/proc/1/comm", "/proc/1/coredump_filter", "/proc/1/timerslack_ns",
                      "/proc/1/sched", "/proc/1/clear_refs", "/proc/1/attr/current", "/proc/1/uid_map",
                      "/proc/self/uid_map", "/proc/self/setgroups", "/proc/mtrr", "/proc/bus/pci/00/00.0"):
            print(attempt(lambda: os.write(os.open(place, os.O_WRONLY), b"1")))
        for place in ("/proc/kcore", "/proc/kpagecount", "/proc/kpageflags", "/proc/vmallocinfo", "/proc/slabinfo"):
            print(attempt(lambda: os.read(os.open(place, os.O_RDONLY), 1)))
        """,
    )
    assert set(told) <= {"EACCES", "EPERM", "ENOENT", "EROFS", "EIO"}
