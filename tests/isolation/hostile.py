"""What the attacks share: small limits, raw system calls from Python, and a short way to run a program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from textwrap import dedent

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program

QUICK = Limits(run_seconds=5, compile_seconds=20, memory_bytes=192 * MIB, disk_bytes=32 * MIB, processes=64)
"""Small, so that an attack reaches them soon."""

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
    **limits: float | int,
) -> Execution:
    """Run an attack. Indented source is fine; `limits` change single fields of `QUICK`."""
    program = Program(dedent(code), language, stdin=stdin, files=files or {}, fetch_files=fetch_files)
    return await sandbox.run(program, QUICK.model_copy(update=limits))


async def words(sandbox: LocalSandbox, code: str, **options: float | int) -> list[str]:
    """Run an attack that answers in words, with `call` and `attempt` at hand."""
    execution = await run(sandbox, SYSCALLS + dedent(code), **options)
    assert execution.ok, execution
    return execution.stdout.split()


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
