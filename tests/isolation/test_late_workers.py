"""Time limits on a machine with far too much to do: a worker that is late itself lets no program pass its limit.

Here the worker is stopped while the program runs, and goes on when the program has ended by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from hostile import QUICK, below_us, run, until

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Program, Verdict

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.alone, pytest.mark.any_user]

SECONDS = 1.0
SLOW = """
import ctypes, time
name_process = ctypes.CDLL(None).prctl
name_process(15, b"begun", 0, 0, 0)
time.sleep(1.5)
name_process(15, b"ended", 0, 0, 0)
"""
"""Shows by the name of its process how far it is."""


async def end_unwatched(last_state: str) -> None:
    """Stop the worker from the beginning of `SLOW` until its process is in `last_state`."""
    await until(lambda: below_us("begun"))
    [program] = below_us("begun")
    worker = int(stat(program)[1])
    os.kill(worker, signal.SIGSTOP)
    try:
        await until(lambda: program not in below_us("begun") and stat(program)[0] in last_state)
    finally:
        os.kill(worker, signal.SIGCONT)


def stat(pid: int) -> list[str]:
    """State and parent, and more. A process that is gone is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z"]


async def test_a_program_that_ended_by_itself_after_its_limit_timed_out(any_level: LocalSandbox) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(run(any_level, SLOW, run_seconds=SECONDS))
        await end_unwatched("Z")
    execution = running.result()
    assert (execution.verdict, execution.exit_code) == (Verdict.TIMED_OUT, None)
    assert execution.wall_seconds > SECONDS


async def test_a_case_of_many_that_ended_by_itself_after_its_limit_timed_out(any_level: LocalSandbox) -> None:
    async def cases() -> list[Execution]:
        program = Program(f"if input() == 'slow':{SLOW.replace(chr(10), chr(10) + '    ')}")
        limits = QUICK.model_copy(update={"run_seconds": SECONDS})
        return [one async for one in any_level.run_each(program, ["quick", "slow", "quick"], limits)]

    async with asyncio.TaskGroup() as group:
        running = group.create_task(cases())
        await end_unwatched("Z")
    assert [one.verdict for one in running.result()] == [Verdict.OK, Verdict.TIMED_OUT, Verdict.OK]


async def test_a_cell_that_ended_by_itself_after_its_limit_timed_out_and_its_session_lives(
    any_level: LocalSandbox,
) -> None:
    async with any_level.session() as session:
        await session.run("x = 1")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(session.run(SLOW, seconds=SECONDS))
            await end_unwatched("S")
        cell = running.result()
        assert (cell.verdict, cell.session_lost) == (Verdict.TIMED_OUT, False)
        assert (await session.run("print(x)")).stdout == "1\n"
