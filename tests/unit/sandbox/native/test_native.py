"""The sandbox's C library: built, tested in C under sanitizers and for the other processor, and used by Python."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolyard.sandbox.guest import native
from toolyard.sandbox.guest.native import built_library
from toolyard.sandbox.guest.native.build import SOURCE, WARNINGS, build

TESTS = Path(__file__).with_name("test_guest.c")
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}.get(platform.machine(), "x86_64")
SANITIZED = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compiled(folder: Path, *command: str) -> str:
    made = str(folder / "test_guest")
    flags = ("-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{SOURCE.parent}")
    subprocess.run([*command, *flags, "-o", made, str(TESTS)], check=True, timeout=60)
    return made


def check(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("ok test_") >= 6


def test_it_is_built_here_and_used() -> None:
    """`make` builds it. Without it everything else would silently be tested on the slow path."""
    assert built_library()
    assert native.why_not() == ""


@pytest.mark.toolchain("c")
def test_the_compiler_finds_nothing_to_warn_of(tmp_path: Path) -> None:
    assert "-Werror" in WARNINGS
    build(library=tmp_path / "guest.so", strict=True)
    assert (tmp_path / "guest.so").stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["guest.so"]


@pytest.mark.toolchain("c")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("-O2",), id="as it is"),
        pytest.param(SANITIZED, id="address and undefined-behaviour sanitizers", marks=pytest.mark.slow),
    ],
)
def test_its_tests_in_c_pass(tmp_path: Path, flags: tuple[str, ...]) -> None:
    check(compiled(tmp_path, "gcc", *flags))


@pytest.mark.skipif(
    shutil.which(f"{OTHER}-linux-gnu-gcc") is None or shutil.which(f"qemu-{OTHER}") is None,
    reason=f"needs a compiler and an emulator for {OTHER}; .ci/toolchains installs them",
)
def test_its_parts_pass_on_the_other_processor(tmp_path: Path) -> None:
    """Not the forking of siblings, which the emulator cannot."""
    check(f"qemu-{OTHER}", compiled(tmp_path, f"{OTHER}-linux-gnu-gcc", "-O2", "-static"), "parts")


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "guest.so"
    library.write_bytes(b"for another machine")
    monkeypatch.setattr(native, "LIBRARY", str(library))
    assert "guest.so" in native.why_not()
    library.unlink()
    assert (built_library(), native.why_not()) == ("", "not built")
    monkeypatch.setenv("TOOLYARD_NATIVE", "0")
    assert "TOOLYARD_NATIVE" in native.why_not()


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "Case", native.Siblings)
    assert "other sources" in native.why_not()


# Siblings -------------------------------------------------------------------------------------------------------------

SCRIPT = """
import array, ctypes, json, os, signal, socket, sys
sys.path.insert(0, sys.argv[1])
from guest import native, program
from guest.batch import parent

program.BLOCKED = (signal.SIGINT, signal.SIGXCPU)
class Interpreter:
    path = "main.py"
processors = os.sched_getaffinity(0)
spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]  # so that the sockets have larger numbers
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
setup = parent.Setup(native.Native(native.built_library()), Interpreter, processors)
begin, argument = setup.fork if json.loads(sys.argv[2]) else setup.fork_with_control
signal.pthread_sigmask(signal.SIG_BLOCK, program.BLOCKED)
forked = os.fork()
if forked == 0:
    os.dup2(theirs.fileno(), parent.CONTROL)
    os.closerange(parent.CONTROL + 1, 1 << 16)
    os.sched_setaffinity(0, {min(processors)})
    try:
        begin(argument)
        print(json.dumps({
            "input": sys.stdin.readline(), "parent": os.getppid(), "pid": os.getpid(), "session": os.getsid(0),
            "processors": sorted(os.sched_getaffinity(0)), "blocked": sorted(signal.pthread_sigmask(0, [])),
            "open": sorted(map(int, os.listdir("/proc/self/fd"))), "thread": __import__("threading").get_native_id(),
        }), flush=True)
        print("and this", file=sys.stderr, flush=True)
    finally:
        os._exit(7)
theirs.close()
found = []
for number in range(3):
    pipes = [os.pipe() for _ in range(3)]
    os.write(pipes[0][1], b"message %d\\n" % number)
    given = array.array("i", [pipes[0][0], pipes[1][1], pipes[2][1]])
    os.kill(forked, signal.SIGINT)  # which is for none of them
    ours.sendmsg([b"c"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)])
    for handle in given:
        os.close(handle)
    line = os.read(pipes[1][0], 10000)
    pid, status = os.wait()
    found.append({**json.loads(line), "said": os.read(pipes[2][0], 100).decode(), "waited": pid, "status": status >> 8})
ours.close()
pid, status = os.wait()
about = {"me": os.getpid(), "processors": sorted(processors), "parent": [pid == forked, status]}
print(json.dumps({**about, "found": found}))
"""


@pytest.mark.parametrize("close", [True, False])
def test_a_sibling_for_every_message(close: bool) -> None:
    """In an interpreter of its own, since it forks."""
    command = [sys.executable, "-c", SCRIPT, str(SOURCE.parents[2]), json.dumps(close)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done
    told = json.loads(done.stdout)
    for number, one in enumerate(told["found"]):
        assert one["input"] == f"message {number}\n"
        assert one["said"] == "and this\n"
        assert one["parent"] == told["me"]
        assert one["pid"] == one["session"] == one["waited"] == one["thread"]
        assert one["processors"] == told["processors"]
        assert one["blocked"] == []
        assert one["status"] == 7
        streams = [0, 1, 2] if close else [0, 1, 2, 3]
        assert one["open"][: len(streams)] == streams
        assert len(one["open"]) == len(streams) + 1, "and what lists them"
    assert told["parent"] == [True, 0], "it ends by itself when nobody is there any more"
