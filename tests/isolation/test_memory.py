"""A program that wants all the memory gets its limit, whichever way it asks."""

from __future__ import annotations

import asyncio

import pytest
from hostile import run
from ways import Session, Way

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Verdict

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.kernel("namespaces")]

HUNGRY = {
    "heap": """
        hoard = []
        while True:
            hoard.append(bytearray(b"x") * (1 << 20))
        """,
    "private mapping": """
        import mmap
        hoard = []
        while True:
            area = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            area.write(b"x" * (4 << 20))
            hoard.append(area)
        """,
    "shared mapping": """
        import mmap
        hoard = []
        while True:
            area = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
            area.write(b"x" * (4 << 20))
            hoard.append(area)
        """,
    "shared mapping, let go of": """
        import mmap
        hoard = []
        while True:
            area = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
            area.write(b"x" * (4 << 20))
            area.madvise(mmap.MADV_DONTNEED)
            hoard.append(area)
        """,
    "shared mapping, let go of by a process that hides its maps": """
        import ctypes, mmap
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
        hoard = []
        while True:
            area = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
            area.write(b"x" * (4 << 20))
            area.madvise(mmap.MADV_DONTNEED)
            hoard.append(area)
        """,
    "shared mappings, let go of by many processes that each stay small": """
        import mmap, os, time
        while True:
            done_read, done_write = os.pipe()
            if os.fork() == 0:
                area = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
                for at in range(0, 64 << 20, 1 << 20):
                    area[at : at + (1 << 20)] = b"x" * (1 << 20)
                    area.madvise(mmap.MADV_DONTNEED)
                os.write(done_write, b".")
                time.sleep(60)
            os.read(done_read, 1)
        """,
    "shared mapping under a name of its own, let go of": """
        import ctypes, mmap
        libc = ctypes.CDLL(None)
        hoard = []
        while True:
            area = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
            start = ctypes.addressof(ctypes.c_char.from_buffer(area))
            libc.prctl(0x53564d41, 0, ctypes.c_void_p(start), ctypes.c_size_t(4 << 20), b"innocent")
            area.write(b"x" * (4 << 20))
            area.madvise(mmap.MADV_DONTNEED)
            hoard.append(area)
        """,
    "page tables": """
        import mmap
        while True:
            area = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
            for at in range(0, 1 << 40, 2 << 20):
                area[at]
        """,
    "many processes": """
        import os, time
        while True:
            if os.fork() == 0:
                hoard = bytearray(b"x") * (16 << 20)
                time.sleep(60)
            time.sleep(0.01)
        """,
    "processes whose first thread has ended": """
        import ctypes, os, threading, time
        def hold():
            time.sleep(0.3)
            hoard = bytearray(b"x") * (100 << 20)
            time.sleep(60)
        for _ in range(4):
            if os.fork() == 0:
                threading.Thread(target=hold).start()
                ctypes.CDLL(None).syscall(93 if os.uname().machine == "aarch64" else 60, 0)
        time.sleep(2)
        """,
    "grandchildren of a quiet parent": """
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import os\\nif os.fork() == 0:\\n a = []\\n"
                        " while True: a.append(bytearray(b'x') * (1 << 20))\\nelse: import time; time.sleep(60)"])
        """,
}


@pytest.mark.parametrize("way", HUNGRY)
async def test_hunger_by(sandbox: LocalSandbox, way: str) -> None:
    execution = await run(sandbox, HUNGRY[way])
    assert execution.verdict is Verdict.MEMORY_EXCEEDED
    assert execution.run
    assert execution.run.max_memory_bytes < 192 * MIB + 192 * MIB  # a sampled limit may be passed, but not by far


async def test_memory_of_files_without_a_name_is_counted_or_refused(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        """
        import os, sys
        try:
            handles = [os.memfd_create(f"hoard {number}") for number in range(100)]
        except OSError:
            sys.exit(7)
        while True:
            for handle in handles:
                os.write(handle, b"x" * (1 << 20))
        """,
    )
    assert execution.verdict is Verdict.MEMORY_EXCEEDED or execution.exit_code == 7


async def test_memory_of_files_in_every_writable_directory_is_counted(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        """
        import os
        for number in range(100):
            for place in ("/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/mnt", "/data"):
                with open(f"{place}/{number}", "wb") as file:
                    file.write(b"x" * (4 << 20))
        """,
        disk_bytes=256 * MIB,
        memory_bytes=64 * MIB,
    )
    assert execution.verdict is Verdict.MEMORY_EXCEEDED


async def test_memory_in_socket_buffers_is_bounded(sandbox: LocalSandbox) -> None:
    """Kernel memory on a program's behalf: 64 processes × 512 sockets × 8 MiB would be all there is."""
    execution = await run(
        sandbox,
        """
        import os, socket, time
        for _ in range(32):
            if os.fork() == 0:
                pairs = []
                try:
                    while True:
                        left, right = socket.socketpair()
                        pairs.append((left, right))
                        for end in (left, right):
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
                            end.setblocking(False)
                            try:
                                while True:
                                    end.send(b"x" * 65536)
                            except BlockingIOError:
                                pass
                except OSError:
                    time.sleep(60)
        time.sleep(60)
        """,
    )
    assert execution.verdict is Verdict.MEMORY_EXCEEDED


async def test_output_of_a_program_that_ran_out_of_memory_is_kept(full_way: Way) -> None:
    execution = await run(
        full_way, "print('before', flush=True)\na = []\nwhile True: a.append(bytearray(b'x') * 1000000)"
    )
    assert execution.verdict is Verdict.MEMORY_EXCEEDED
    assert execution.stdout == "before\n"


async def test_a_limit_smaller_than_the_interpreter_is_a_verdict(sandbox: LocalSandbox) -> None:
    execution = await run(sandbox, "a = bytearray(b'x') * (8 << 20)", memory_bytes=1 * MIB)
    assert execution.verdict in (Verdict.MEMORY_EXCEEDED, Verdict.FAILED)


async def test_hunger_of_one_program_does_not_touch_its_neighbour(sandbox: LocalSandbox) -> None:
    async with asyncio.TaskGroup() as group:
        hungry = group.create_task(run(sandbox, HUNGRY["heap"]))
        modest = group.create_task(
            run(sandbox, "a = bytearray(b'x') * (64 << 20); import time; time.sleep(1); print(1)")
        )
    assert hungry.result().verdict is Verdict.MEMORY_EXCEEDED
    assert modest.result().stdout == "1\n"


async def test_the_next_program_has_its_own_limit_again(full_way: Way) -> None:
    for memory in (64, 192, 64):
        execution = await run(full_way, HUNGRY["heap"], memory_bytes=memory * MIB)
        assert execution.verdict is Verdict.MEMORY_EXCEEDED or "MemoryError" in execution.stderr  # which a cell may see
        assert execution.run
        assert isinstance(full_way, Session) or 16 * MIB < execution.run.max_memory_bytes < (memory + 128) * MIB
