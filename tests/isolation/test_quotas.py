"""What the kernel counts per user or gives to few: no program takes it from the host or from its neighbours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from hostile import SYSCALLS, run, words
from ways import Way

from toolyard.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio(loop_scope="session")
ORDINARY_CLASS = """
import asyncio, os, sys
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Limits, Program

sys.path[:0] = [sys.argv[3], os.path.dirname(sys.argv[3])]
from ways import Batch, Run, Session

PROGRAM = "import os; print(os.sched_getscheduler(0) == os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))"

async def main():
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[2]))
    async with LocalSandbox(workers=1, isolation=sys.argv[1]) as sandbox:
        for way in (Run, Batch, Session):
            if way is not Batch or sandbox.level != "confined":
                print((await way(sandbox).run(Program(PROGRAM), Limits())).stdout, end="")
        print((await sandbox.run(Program(f"python3 -c '{PROGRAM}'", "bash"))).stdout, end="")

asyncio.run(main())
"""


async def test_a_crash_starts_no_handler_of_the_host(any_way: Way) -> None:
    """Only a limit of 1 does that: with 0 the kernel still starts a program that core_pattern names, as root."""
    told = await words(
        any_way,
        """
        import resource
        print(*resource.getrlimit(resource.RLIMIT_CORE))
        for wanted in ((0, 1), (0, 0)):
            attempt(resource.setrlimit, resource.RLIMIT_CORE, wanted)
            attempt(resource.prlimit, 0, resource.RLIMIT_CORE, wanted)
            call("setrlimit", resource.RLIMIT_CORE, ctypes.create_string_buffer(16))
            print(*resource.getrlimit(resource.RLIMIT_CORE))
        """,
    )
    assert told == ["1"] * 6


async def test_a_limit_that_is_not_on_core_files_can_still_be_lowered(any_level: LocalSandbox) -> None:
    execution = await run(any_level, "ulimit -c 0 && ulimit -n 20 && ulimit -n", "bash")
    assert execution.stdout == "20\n"


async def test_pending_signals_and_timers_are_few(any_way: Way) -> None:
    """The kernel counts both per user, with all other processes of that user."""
    told = await words(
        any_way,
        """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
        wait = ctypes.create_string_buffer(128)
        ctypes.c_int.from_buffer(wait, 0).value = signal.SIGRTMIN
        ctypes.c_int.from_buffer(wait, 8).value = -1  # SI_QUEUE
        queued = 0
        while queued < 5000 and call("rt_sigqueueinfo", os.getpid(), int(signal.SIGRTMIN), wait) == "done":
            queued += 1
        event, timer = ctypes.create_string_buffer(64), ctypes.c_int()
        ctypes.c_int.from_buffer(event, 8).value = signal.SIGRTMIN
        timers = 0
        while timers < 5000 and libc.timer_create(1, event, ctypes.byref(timer)) == 0:
            timers += 1
        print(queued, timers)
        """,
    )
    assert int(told[0]) + int(told[1]) <= 1000


HOARD = """
import signal, time
event, timer = ctypes.create_string_buffer(64), ctypes.c_void_p()
ctypes.c_int.from_buffer(event, 8).value = signal.SIGRTMIN
while libc.timer_create(1, event, ctypes.byref(timer)) == 0:
    pass
for number in range(8):
    if os.fork() == 0:
        pipes = []
        try:
            while True:
                pipes.append(os.pipe())
        except OSError:
            time.sleep(60)
print("hoarded", flush=True)
time.sleep(2.5)
"""
SHARE = """
import fcntl, signal
event, timer = ctypes.create_string_buffer(64), ctypes.c_void_p()
ctypes.c_int.from_buffer(event, 8).value = signal.SIGRTMIN
print(libc.timer_create(1, event, ctypes.byref(timer)), fcntl.fcntl(os.pipe()[0], 1032))
"""


@pytest.mark.kernel("namespaces")
@pytest.mark.skipif(
    os.getuid() != 0, reason="only as root do workers have user ids of their own, and so their own pipes"
)
async def test_a_hoarder_leaves_its_neighbour_and_the_host_their_share(sandbox: LocalSandbox) -> None:
    usual = (await words(sandbox, SHARE))[1]
    async with asyncio.TaskGroup() as group:
        hoarder = group.create_task(run(sandbox, SYSCALLS + HOARD))
        await asyncio.sleep(2)
        neighbour = group.create_task(words(sandbox, SHARE))
        code = [sys.executable, "-c", SYSCALLS + SHARE]
        host = await asyncio.to_thread(subprocess.run, code, capture_output=True, text=True, timeout=30, check=True)
    assert hoarder.result().stdout == "hoarded\n"
    assert neighbour.result() == host.stdout.split() == ["0", usual]


async def test_a_few_timers_and_queued_signals_work(any_level: LocalSandbox) -> None:
    told = await words(
        any_level,
        """
        import signal
        fired = []
        signal.signal(signal.SIGRTMIN, lambda *_: fired.append(1))
        event, timer = ctypes.create_string_buffer(64), ctypes.c_void_p()
        ctypes.c_int.from_buffer(event, 8).value = signal.SIGRTMIN
        assert libc.timer_create(1, event, ctypes.byref(timer)) == 0
        when = (ctypes.c_long * 4)(0, 0, 0, 1_000_000)
        assert libc.timer_settime(timer, 0, when, None) == 0
        signal.pause()
        print(len(fired))
        """,
    )
    assert told == ["1"]


async def test_limits_that_no_program_needs_are_small(any_way: Way) -> None:
    told = await words(
        any_way,
        """
        import resource
        for name in ("MSGQUEUE", "NICE", "RTPRIO", "MEMLOCK"):
            print(*resource.getrlimit(getattr(resource, f"RLIMIT_{name}")))
        """,
    )
    assert told == ["0"] * 6 + [str(64 << 10)] * 2


@pytest.mark.parametrize("isolation", ["best", "confined"])
@pytest.mark.parametrize("nice", [3, pytest.param(-1, marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root"))])
async def test_programs_run_in_the_ordinary_class_whatever_the_hosts(isolation: str, nice: int) -> None:
    """Tried with the batch class, which children inherit just as they inherit a real-time class."""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", ORDINARY_CLASS, isolation, str(nice), os.path.dirname(__file__)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"True {max(nice, 0)}\n" * (4 if isolation == "best" else 3)
