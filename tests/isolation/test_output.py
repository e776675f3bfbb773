"""A program that drowns its reader: what is kept is bounded, said to be cut, and the flood ends."""

from __future__ import annotations

import time

import pytest
from hostile import run

from patience import patient
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Limits, Program, Verdict

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.any_user]

FLOOD = "import os\nblock = b'x' * 65536\nwhile True:\n    for handle in {handles}:\n        os.write(handle, block)"


@pytest.mark.parametrize("handles", [(1,), (2,), (1, 2)], ids=["stdout", "stderr", "both"])
async def test_an_endless_flood_is_stopped_and_cut(any_level: LocalSandbox, handles: tuple[int, ...]) -> None:
    execution = await run(any_level, FLOOD.format(handles=handles), output_bytes=100_000, flood_bytes=8 * MIB)
    assert execution.verdict is Verdict.OUTPUT_EXCEEDED
    assert execution.run
    kept = {1: execution.run.stdout_bytes, 2: execution.run.stderr_bytes}
    cut = {1: execution.run.stdout_truncated, 2: execution.run.stderr_truncated}
    for handle in handles:
        assert kept[handle] == b"x" * 100_000
        assert cut[handle]


async def test_a_flood_below_the_stop_is_read_to_its_end_and_cut(any_level: LocalSandbox) -> None:
    execution = await run(any_level, "print('x' * 3_000_000); print('end')", output_bytes=1000)
    assert execution.ok
    assert execution.stdout == "x" * 1000
    assert execution.truncated


async def test_output_cut_in_its_last_bytes_is_said_to_be_cut(any_level: LocalSandbox) -> None:
    for written in (1001, 1500, 5000, 60_000):
        execution = await run(any_level, f"import os; os.write(1, b'x' * {written})", output_bytes=1000)
        assert execution.truncated, written
    exact = await run(any_level, "import os; os.write(1, b'x' * 1000)", output_bytes=1000)
    assert not exact.truncated


async def test_a_daemon_that_floods_after_its_parent_left_delays_nothing(any_level: LocalSandbox) -> None:
    began = time.monotonic()
    execution = await run(
        any_level,
        "import os\nif os.fork() == 0:\n while True: os.write(1, b'x' * 65536)\nimport time; time.sleep(0.1)",
    )
    assert execution.verdict in (Verdict.OK, Verdict.OUTPUT_EXCEEDED)
    assert time.monotonic() - began < patient(10)


async def test_a_larger_pipe_does_not_smuggle_more_than_the_limit(any_level: LocalSandbox) -> None:
    execution = await run(
        any_level,
        "import fcntl, os\ntry: fcntl.fcntl(1, 1031, 1 << 20)\nexcept OSError: pass\nos.write(1, b'x' * 1_000_000)",
        output_bytes=1000,
    )
    assert execution.run
    assert execution.run.stdout_bytes == b"x" * 1000
    assert execution.truncated


async def test_a_closed_stdout_is_the_programs_own_loss(any_level: LocalSandbox) -> None:
    execution = await run(any_level, "import os, time\nos.close(1); os.close(2); os.close(0)\ntime.sleep(0.1)")
    assert execution.ok
    assert execution.stdout == execution.stderr == ""


async def test_stdin_that_nobody_reads_delays_nothing(any_level: LocalSandbox) -> None:
    began = time.monotonic()
    execution = await run(any_level, "import os; os.close(0); print(1)", stdin=b"x" * (8 * MIB))
    assert execution.stdout == "1\n"
    assert time.monotonic() - began < patient(10)


async def test_a_stream_that_never_runs_dry_does_not_put_off_the_time_limit(any_level: LocalSandbox) -> None:
    drip = "import os\nfor _ in range(3): os.fork()\nwhile True: os.write(1, b'x')"
    begun = time.monotonic()
    execution = await any_level.run(Program(drip), Limits(run_seconds=0.5, flood_bytes=1 << 40))
    assert execution.verdict is Verdict.TIMED_OUT
    assert time.monotonic() - begun < patient(5)
