"""Time limits on a machine that has too little time: what a program waits for a processor is not its own time.

Strangers compute on one processor, and the program is bound to the same one.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from hostile import QUICK, run

from patience import patient
from toolyard.errors import SandboxError
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Program, Verdict

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone, pytest.mark.kernel("namespaces")]

PROCESSOR = min(os.sched_getaffinity(0))
THERE = f"import os, time\nos.sched_setaffinity(0, {{{PROCESSOR}}})\n"
COMPUTE = """
def compute(seconds):
    while time.process_time() < seconds:
        pass
"""
BUSY = f"import os\nos.sched_setaffinity(0, {{{PROCESSOR}}})\nwhile True: pass"


@contextmanager
def strangers(count: int) -> Generator[None]:
    # Each in a session of its own: the kernel may share out time by sessions.
    command = [sys.executable, "-c", BUSY]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


async def test_a_program_that_starves_is_given_the_time_it_lost(sandbox: LocalSandbox) -> None:
    with strangers(4):
        execution = await run(sandbox, f"{THERE}{COMPUTE}compute(0.5)\nprint('done')", run_seconds=1)
    assert execution.run
    assert (execution.verdict, execution.stdout) == (Verdict.OK, "done\n")
    assert execution.run.wall_seconds > 1.2, "or it was not starved"
    assert execution.run.starved_seconds > 0.5 * (execution.run.wall_seconds - 0.5)


async def test_a_case_of_many_likewise(sandbox: LocalSandbox) -> None:
    program = Program(f"{THERE}{COMPUTE}compute(float(input()))\nprint('done')")
    limits = QUICK.model_copy(update={"run_seconds": 1})
    with strangers(4):
        found = [one async for one in sandbox.run_each(program, ["0", "0.5", "0"], limits)]
    assert [(one.verdict, one.stdout) for one in found] == [(Verdict.OK, "done\n")] * 3
    assert found[1].run
    assert found[1].run.starved_seconds > 0.5 * (found[1].wall_seconds - 0.5)


async def test_a_cell_likewise(sandbox: LocalSandbox) -> None:
    async with sandbox.session() as session:
        await session.run(THERE + COMPUTE.replace("process_time() <", "process_time() - began <").replace(
            "    while", "    began = time.process_time()\n    while"
        ))  # fmt: skip
        await session.run("compute(0.5)", seconds=5)  # which counts for the first cell alone
        with strangers(4):
            cell = await session.run("compute(0.5)\nprint('done')", seconds=1)
    assert (cell.verdict, cell.stdout) == (Verdict.OK, "done\n")
    assert cell.wall_seconds > 1.2


async def test_one_that_computes_for_too_long_is_stopped_when_its_own_time_is_up(sandbox: LocalSandbox) -> None:
    with strangers(1):
        execution = await run(sandbox, f"{THERE}{COMPUTE}compute(60)", run_seconds=0.5)
    assert execution.verdict is Verdict.TIMED_OUT
    assert execution.run
    assert 0.3 < execution.run.cpu_seconds < 0.8


@pytest.mark.parametrize("code", ["time.sleep(60)", "os.read(os.pipe()[0], 1)"])
async def test_one_that_waits_for_something_else_keeps_its_limit(sandbox: LocalSandbox, code: str) -> None:
    with strangers(4):
        execution = await run(sandbox, f"{THERE}{code}", run_seconds=1)
    assert execution.verdict is Verdict.TIMED_OUT
    assert execution.wall_seconds < patient(1.5)


COUNTED = """
import struct
times = os.open("times", os.O_CREAT | os.O_WRONLY)

def compute(seconds):
    while (spent := time.process_time()) < seconds:
        os.pwrite(times, struct.pack("d", spent), 8 * os.getpid())
"""


@pytest.mark.parametrize(
    "code",
    [
        "import threading\nfor _ in range(16): threading.Thread(target=compute, args=(60,)).start()",
        "for _ in range(4): os.fork()\ncompute(60)",
        "while True:\n    if os.fork() == 0: compute(0.01); os._exit(0)\n    os.wait()",
    ],
    ids=["threads", "processes", "processes that come and go"],
)
async def test_nobody_gains_time_by_getting_in_its_own_way(sandbox: LocalSandbox, code: str) -> None:
    """However busy the machine is, they have no more of the processor than their limit says."""
    execution = await run(sandbox, f"{THERE}{COUNTED}{code}", run_seconds=1, fetch_files=["times"])
    assert execution.verdict is Verdict.TIMED_OUT
    spent = sum(time for (time,) in struct.iter_unpack("d", execution.files["times"]))
    assert 0.2 < spent < 1.3


@pytest.mark.slow
async def test_one_that_starves_for_very_long_is_our_failure(sandbox: LocalSandbox) -> None:
    program = Program(f"{THERE}{COMPUTE}compute(60)", "python")
    limits = QUICK.model_copy(update={"run_seconds": 0.2})
    with strangers(40), pytest.raises(SandboxError, match="the machine is too busy"):
        await LocalSandbox.run(sandbox, program, limits)  # not again, as the others
