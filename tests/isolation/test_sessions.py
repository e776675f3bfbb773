"""A session is a program that keeps running: attacks between its cells and through their protocol."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

import pytest
from hostile import QUICK, host_processes, names_in, open_to_everybody, run, until

from patience import patient
from toolyard.errors import ProgramError, SandboxError, SessionLostError
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="session")
namespaces = pytest.mark.kernel("namespaces")


@namespaces
async def test_a_hungry_cell_ends_the_session_with_a_verdict(sandbox: LocalSandbox) -> None:
    async with sandbox.session(QUICK) as session:
        result = await session.run(
            "print('before', flush=True)\na = []\nwhile True: a.append(bytearray(b'x') * (1 << 20))"
        )
        assert result.verdict is Verdict.MEMORY_EXCEEDED
        assert result.stdout == "before\n"
        assert result.session_lost
        with pytest.raises(SessionLostError):
            await session.run("1")


@namespaces
async def test_memory_that_grows_between_cells_is_limited_too(sandbox: LocalSandbox) -> None:
    marker = f"60{uuid.uuid4().int % 10**12}"
    grow = f"""
import os, subprocess, threading, time
subprocess.Popen(["sleep", "{marker}"])
hoard = []
def grow():
    while not os.path.exists("begin"):
        time.sleep(0.01)
    while True:
        hoard.append(bytearray(b"x") * (1 << 20))
        time.sleep(0.001)
threading.Thread(target=grow, daemon=True).start()
"""
    async with sandbox.session(QUICK) as session:
        assert (await session.run(grow)).ok
        assert host_processes(marker)
        await session.write_files({"begin": b""})
        await until(lambda: not host_processes(marker))  # without a cell: its own memory would be looked at
        with pytest.raises(SessionLostError):
            await session.run("print(len(hoard))")
    assert (await run(sandbox, "print(1)")).stdout == "1\n"


async def test_a_cell_that_floods_is_stopped(any_level: LocalSandbox) -> None:
    limits = QUICK.model_copy(update={"output_bytes": 1000, "flood_bytes": 4 * MIB})
    async with any_level.session(limits) as session:
        result = await session.run("while True: print('x' * 1000)")
        assert result.verdict is Verdict.OUTPUT_EXCEEDED
        assert result.truncated
        assert result.stdout.startswith("x" * 999)


@pytest.mark.any_user
async def test_what_a_cell_displays_is_bounded(any_level: LocalSandbox) -> None:
    async with any_level.session(QUICK) as session:
        result = await session.run("class A:\n    def __repr__(self): return 'x' * 50_000_000\nA()")
        assert sum(len(text) for bundle in result.display for text in bundle.values()) < 16 * MIB
        result = await session.run("for _ in range(100): display('x' * 1_000_000)")
        assert sum(len(text) for bundle in result.display for text in bundle.values()) < 16 * MIB
        assert result.verdict in (Verdict.OK, Verdict.OUTPUT_EXCEEDED, Verdict.FAILED, Verdict.MEMORY_EXCEEDED)


@pytest.mark.parametrize("way", ["daemon", "command", "thread", "stopped child", "child without its first thread"])
async def test_nothing_of_a_session_outlives_it(any_level: LocalSandbox, way: str) -> None:
    marker = f"60{uuid.uuid4().int % 10**12}"
    async with any_level.session(QUICK) as session:
        await session.run(
            {
                "daemon": f"import os\nif os.fork() == 0:\n os.setsid()\n os.fork() and os._exit(0)\n"
                f" os.execv('/bin/sleep', ['sleep', '{marker}'])",
                "command": f"import subprocess; subprocess.Popen(['sleep', '{marker}'], start_new_session=True)",
                "thread": f"import threading, os; threading.Thread(target=os.system, args=('sleep {marker}',)).start()",
                "child without its first thread": "import ctypes, os, threading\nif os.fork() == 0:\n"
                f" threading.Thread(target=os.system, args=('sleep {marker}',)).start()\n"
                " ctypes.CDLL(None).syscall(93 if os.uname().machine == 'aarch64' else 60, 0)",
                "stopped child": f"import subprocess; p = subprocess.Popen(['sleep', '{marker}']); p.send_signal(19)",
            }[way]
        )
        await until(lambda: host_processes(marker))
    await until(lambda: not host_processes(marker))


@pytest.mark.any_user
@pytest.mark.parametrize(
    "cell",
    [
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.closerange(0, 100)",
        "import os; os.close(3); os.close(4)",
        "import os; os.dup2(1, 4); os.write(4, b'x')",
        "import os; os.execv('/bin/true', ['true'])",
        "import sys; sys.settrace(lambda *a: 1 / 0)\nimport json; json.dumps = None",
        "import builtins; builtins.compile = builtins.eval = None; import ast; ast.parse = None",
        "import os, struct; os.write(4, struct.pack('<I', 0xFFFFFFFF))",
        "import os, struct; os.write(4, struct.pack('<I', 3) + b'xyz')",
        "import os, struct; os.write(4, struct.pack('<I', 2) + b'[]')",
        'import os, struct; os.write(4, struct.pack("<I", 20) + b\'{"error":1,"display":2}\'[:20])',
        "import os, struct; os.write(4, struct.pack('<I', 50_000) + b'[' * 50_000)",
        """import os
x = b'{"error":' + b"[" * 30_000 + b"]" * 30_000 + b"}"; os.write(4, len(x).to_bytes(4, 'little') + x)""",
    ],
)
async def test_a_cell_that_breaks_its_own_loop_harms_only_itself(any_level: LocalSandbox, cell: str) -> None:
    """Whatever it says or does on the pipe of answers: a result, or the loss of the session; never a hang."""
    async with asyncio.timeout(60), any_level.session(QUICK) as session:
        try:
            for code in (cell, "print(1)", "print(2)"):
                result = await session.run(code, seconds=0.2)
                assert isinstance(result.stdout, str)
        except SandboxError:
            pass
    assert (await run(any_level, "print(1)")).stdout == "1\n"


@pytest.mark.any_user
async def test_text_that_is_no_unicode_arrives_as_escapes(any_level: LocalSandbox) -> None:
    """JSON could not carry it to a service's client."""
    async with any_level.session(QUICK) as session:
        result = await session.run("display('\\ud800'); raise ValueError('\\udfff')")
        assert result.error is not None
        told = [
            result.error.evalue,
            *result.error.traceback,
            *(t for bundle in result.display for t in bundle.values()),
        ]
        assert "\\udfff" in result.error.evalue
        "".join(told).encode()


@pytest.mark.any_user
async def test_a_cell_that_will_not_be_interrupted_is_killed_soon(any_level: LocalSandbox) -> None:
    async with any_level.session(QUICK) as session:
        began = time.monotonic()
        result = await session.run(
            "import signal\nsignal.signal(signal.SIGINT, lambda *_: None)\nwhile True: pass", seconds=0.3
        )
    assert result.verdict is Verdict.TIMED_OUT
    assert result.session_lost
    assert time.monotonic() - began < patient(10)


@pytest.mark.any_user
@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "", "..", "a\0b"])
async def test_a_file_name_that_leaves_the_session_is_refused(any_level: LocalSandbox, name: str) -> None:
    async with any_level.session(QUICK) as session:
        with pytest.raises(ProgramError):
            await session.write_files({name: b"x"})
        assert (await session.run("print(1)")).stdout == "1\n"


async def test_files_are_not_led_astray_by_what_the_session_put_there(any_level: LocalSandbox, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    open_to_everybody(victim)
    async with any_level.session(QUICK) as session:
        await session.run(
            f"""
import os
os.symlink({str(victim)!r}, "link")
os.symlink({str(tmp_path)!r}, "folder")
os.symlink("/etc/passwd", "passwd")
os.mkfifo("pipe")
os.mkdir("directory")
"""
        )
        names = ["link", "folder/victim", "passwd", "pipe", "directory", "../../etc/passwd", str(victim), "missing"]
        async with asyncio.timeout(20):
            assert await session.read_files(names) == {}
        for name in ("link", "folder/victim", "folder/new", "pipe", "directory"):
            async with asyncio.timeout(20):
                with pytest.raises(ProgramError):
                    await session.write_files({name: b"changed"})
    assert victim.read_text() == "as it was"
    assert names_in(tmp_path) == ["victim"]


async def test_a_session_cannot_hold_back_the_host_while_files_move(any_level: LocalSandbox) -> None:
    """Its threads may kill, stop or outrun the file helper; then the session or the files are lost."""
    hinder = """
import os, signal, threading
def hinder():
    mine = (os.getpid(), threading.get_native_id())
    while True:
        for target in range(2, 400):
            if target not in mine:
                for number in (signal.SIGSTOP, signal.SIGKILL):
                    try:
                        os.kill(target, number)
                    except OSError:
                        pass
threading.Thread(target=hinder, daemon=True).start()
"""
    async with asyncio.timeout(60):
        async with any_level.session(QUICK) as session:
            assert (await session.run(hinder)).ok
            for _ in range(3):
                try:
                    await session.write_files({"a": b"x" * 100_000})
                    await session.read_files(["a"])
                except (SandboxError, ProgramError):
                    pass
    assert (await run(any_level, "print(1)")).stdout == "1\n"


@namespaces
@pytest.mark.parametrize("size", [1, 10 * MIB])
async def test_a_stopped_file_helper_is_killed_soon(sandbox: LocalSandbox, size: int) -> None:
    stop = """
import os, signal, threading
def stop():
    mine = (os.getpid(), threading.get_native_id())
    while True:
        for target in range(2, 400):
            if target not in mine:
                try:
                    os.kill(target, signal.SIGSTOP)
                except OSError:
                    pass
threading.Thread(target=stop, daemon=True).start()
"""
    async with asyncio.timeout(60), sandbox.session(QUICK) as session:
        assert (await session.run(stop)).ok
        began = time.monotonic()
        with pytest.raises(ProgramError, match="interfered"):  # noqa: PT012 - it has to be caught at work
            for _ in range(100):
                await session.read_files(["a"])
                await session.write_files({"a": b"x" * size})
        assert time.monotonic() - began < patient(20)
        assert (await session.run("print(1)")).stdout == "1\n"


@namespaces
async def test_a_session_that_fills_its_disk_is_told_so(sandbox: LocalSandbox) -> None:
    async with sandbox.session(QUICK) as session:
        result = await session.run(
            "for n in range(100): open(str(n), 'wb').write(b'x' * (1 << 20))\nimport time; time.sleep(1)"
        )
        assert result.verdict is Verdict.DISK_EXCEEDED
