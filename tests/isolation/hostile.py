"""What the attacks share: small limits, raw system calls from Python, and a short way to run a program."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program

QUICK = Limits(run_seconds=20, compile_seconds=20, memory_bytes=192 * MIB, disk_bytes=32 * MIB, processes=64)
"""Small, so that an attack reaches them soon; but for time, which only those reach that set a limit of their own."""

SYSCALLS = '''
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *args):
    """The name of the error a system call ended with, or "done"."""
    ctypes.set_errno(0)
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return "done" if libc.syscall(ctypes.c_long(number), *words) >= 0 else errno.errorcode[ctypes.get_errno()]

def attempt(action, *args, **options):
    """The name of the error a call into the standard library ended with, or what it returned."""
    try:
        return action(*args, **options)
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
'''
"""Put before an attack that names system calls or wants errors as words."""


async def run(
    sandbox: LocalSandbox,
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


async def words(sandbox: LocalSandbox, code: str, **options: float) -> list[str]:
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
