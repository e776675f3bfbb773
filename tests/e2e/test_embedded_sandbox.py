"""Specifics of the embedded sandbox: profiles, interpreters, caches, worker turnover."""

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from serving import until

from patience import patient
from toolyard import Limits, LocalSandbox, Program, SandboxError, Verdict
from toolyard.errors import ProgramError, SandboxBusyError, SandboxClosedError, SessionLostError


async def run(sandbox: LocalSandbox, code: str, **limits: object):
    return await sandbox.run(Program(code), Limits(**limits) if limits else None)


async def test_programs_that_import_numpy_soon_start_from_a_zygote_that_has_it():
    async with LocalSandbox(workers=1) as sandbox:
        probe = "import numpy, sys\nprint(sys.modules['numpy'].__version__)"
        await run(sandbox, probe)
        async with asyncio.timeout(30):
            await sandbox._pool.zygote("numpy")
        execution = await run(sandbox, probe)
        assert execution.ok
        assert sandbox.statistics().zygotes["numpy"] == 1
        already = await run(sandbox, "import sys\nbefore = 'numpy.linalg' in sys.modules\nimport numpy\nprint(before)")
        assert already.stdout == "True\n"


async def test_a_profile_whose_packages_are_missing_does_no_harm():
    async with LocalSandbox(workers=1, profiles={"odd": ["no_such_package"]}) as sandbox:
        for _ in range(3):
            execution = await run(sandbox, "import no_such_package")
            assert "ModuleNotFoundError" in execution.stderr
            await asyncio.sleep(0.2)


async def test_programs_get_the_interpreter_they_were_promised():
    base = str(Path(sys.executable).resolve())  # noqa: ASYNC240 - a link on the local disk
    async with LocalSandbox(workers=1, python=base) as sandbox:
        execution = await run(sandbox, "import sys; print(sys.prefix == sys.base_prefix, sys.version_info[:2])")
        assert execution.stdout == f"True {sys.version_info[:2]}\n"


async def test_a_read_only_path_of_the_users_is_in_sight_and_cannot_be_written(tmp_path: Path):
    os.chmod(tmp_path, 0o755)
    (tmp_path / "data.txt").write_text("from outside")
    async with LocalSandbox(workers=1, read_only_paths=[str(tmp_path)]) as sandbox:
        execution = await run(sandbox, f"print(open({str(tmp_path / 'data.txt')!r}).read())")
        assert execution.stdout == "from outside\n"
        for _ in range(2):  # also once files had to be wiped around it
            execution = await run(sandbox, f"open('x', 'w').close(); open({str(tmp_path / 'new')!r}, 'w')")
            assert execution.verdict is Verdict.FAILED
        assert (await run(sandbox, f"print(open({str(tmp_path / 'data.txt')!r}).read())")).ok
    assert os.listdir(tmp_path) == ["data.txt"]


async def test_workers_are_replaced_after_their_number_of_runs():
    async with LocalSandbox(workers=1, max_runs_per_worker=3) as sandbox:
        layouts = [(await run(sandbox, "import os; print(os.stat('/proc/1').st_ctime_ns)")).stdout for _ in range(9)]
    assert len(set(layouts)) >= 3


async def test_hash_order_is_the_same_in_every_run():
    async with LocalSandbox(workers=2) as sandbox:
        outputs = {(await run(sandbox, "print({'a', 'b', 'c', 'd'}, hash('x'))")).stdout for _ in range(4)}
    assert len(outputs) == 1


@pytest.mark.toolchain("c")
async def test_a_program_compiled_once_runs_on_many_inputs():
    code = '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d\\n", 2 * x); }'
    async with LocalSandbox(workers=2) as sandbox:
        executions = await asyncio.gather(*(sandbox.run(Program(code, "c", stdin=str(n))) for n in range(12)))
    assert [execution.stdout for execution in executions] == [f"{2 * n}\n" for n in range(12)]
    assert sum(not execution.compile_cached for execution in executions) == 1


@pytest.mark.toolchain("c")
async def test_a_compile_error_is_a_verdict_with_the_compilers_words():
    async with LocalSandbox(workers=1) as sandbox:
        execution = await sandbox.run(Program("int main() { return x; }", "c"))
    assert execution.verdict is Verdict.COMPILE_FAILED
    assert execution.run is None
    assert "main.c" in execution.stderr
    assert "‘x’ undeclared" in execution.stderr


async def test_what_cannot_start_in_time_says_so_and_costs_nothing():
    async with LocalSandbox(workers=1) as sandbox:
        running = asyncio.ensure_future(run(sandbox, "import time; time.sleep(0.5)"))
        await asyncio.sleep(0.1)
        with pytest.raises(SandboxBusyError):
            await sandbox.run(Program("print(1)"), start_within=0.05)
        assert (await running).ok
        assert (await sandbox.run(Program("print(1)"), start_within=0.5)).ok


async def test_run_time_does_not_include_waiting():
    async with LocalSandbox(workers=1) as sandbox:
        sleeping = (run(sandbox, "import time; time.sleep(0.3)", run_seconds=1) for _ in range(5))
        executions = await asyncio.gather(*sleeping)
    assert all(execution.ok for execution in executions)
    assert max(execution.queue_seconds for execution in executions) > 1


async def test_a_closed_sandbox_says_so():
    sandbox = LocalSandbox(workers=1)
    with pytest.raises(SandboxClosedError, match="async with"):
        await run(sandbox, "print(1)")
    async with sandbox:
        running = asyncio.ensure_future(run(sandbox, "import time; time.sleep(30)"))
        await asyncio.sleep(0.2)
    with pytest.raises(SandboxClosedError):
        await running


async def test_a_lower_level_than_full_is_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        async with LocalSandbox(workers=1, isolation="confined") as sandbox:
            assert (await run(sandbox, "print(1)")).isolation == "confined"
    assert "isolation level 'confined', not 'full'" in caplog.text


async def test_a_program_too_large_to_send_is_refused():
    async with LocalSandbox(workers=1) as sandbox:
        with pytest.raises(ProgramError, match="the maximum is"):
            await sandbox.run(Program("print(1)", stdin=bytes(257 << 20)))


async def test_large_requests_and_replies_leave_no_memory_behind():
    async with LocalSandbox(workers=1) as sandbox:
        for _ in range(3):
            program = Program("import sys; print(len(sys.stdin.buffer.read()))", stdin=bytes(40 << 20))
            assert (await sandbox.run(program)).stdout == f"{40 << 20}\n"
        own = await run(sandbox, "print(int(open('/proc/self/statm').read().split()[1]) * 4096)")
        assert int(own.stdout) < 60 << 20


async def test_who_leaves_after_the_first_of_many_cases_does_not_wait_for_the_others():
    async def seconds(most: int) -> float:
        began = time.monotonic()
        async with aclosing(sandbox.run_each(Program("print(input())"), [str(n) for n in range(1500)])) as executions:
            for n in range(most):
                assert (await anext(executions)).stdout == f"{n}\n"
        return time.monotonic() - began

    async with LocalSandbox(workers=1) as sandbox:
        everything = await seconds(1500)
        assert await seconds(1) < everything / 4
        assert await seconds(3) < everything / 4


async def test_a_session_expires_when_idle():
    async with LocalSandbox(workers=1, session_idle_seconds=0.3) as sandbox, sandbox.session() as session:
        assert (await session.run("x = 1")).ok
        await asyncio.sleep(0.6)
        with pytest.raises(SessionLostError, match=r"expired after 0\.3 s"):
            await session.run("x")
        assert sandbox.statistics().sessions == 0


async def test_a_session_whose_cell_waits_for_a_worker_is_not_idle():
    async with LocalSandbox(workers=1, session_idle_seconds=0.3) as sandbox, sandbox.session() as session:
        busy = asyncio.create_task(run(sandbox, "import time; time.sleep(1)"))
        await until(lambda: sandbox.statistics().busy == 1)
        first, second = await asyncio.gather(session.run("x = 1"), session.run("print(x)"))
        assert busy.done()
        assert first.ok
        assert second.stdout == "1\n"


async def test_no_more_sessions_than_allowed():
    async with LocalSandbox(workers=1, max_sessions=1) as sandbox, sandbox.session():
        with pytest.raises(SandboxBusyError, match="max_sessions"):
            async with sandbox.session():
                pass


async def test_a_hungry_session_is_lost_and_says_why():
    async with LocalSandbox(workers=1) as sandbox, sandbox.session(Limits(memory_bytes=100 << 20)) as session:
        result = await session.run("x = b'x' * (600 << 20)\nimport time; time.sleep(1)")
        assert result.session_lost or result.error is not None
        assert result.verdict in (Verdict.MEMORY_EXCEEDED, Verdict.FAILED)


async def test_opening_is_quick_and_the_first_program_too():
    start = time.monotonic()
    async with LocalSandbox(workers=1) as sandbox:
        await run(sandbox, "print(1)")
    assert time.monotonic() - start < patient(5)


async def test_a_failing_worker_start_is_an_error_of_ours():
    async with LocalSandbox(workers=1, read_only_paths=["/proc/self/no-such-thing"]) as sandbox:
        assert (await run(sandbox, "print(1)")).ok  # a path that is not there is simply not shown
    with pytest.raises(SandboxError):
        async with LocalSandbox(workers=1, python="/bin/true"):
            pass


async def test_a_cell_whose_session_is_closed_meanwhile_is_told_so():
    async with LocalSandbox(workers=1) as sandbox, sandbox.session() as session, asyncio.TaskGroup() as group:

        async def run_cell() -> None:
            with pytest.raises(SessionLostError, match="closed"):
                await session.run("import time; time.sleep(20)")

        running = group.create_task(run_cell())
        await asyncio.sleep(0.5)
        assert not running.done()
        await session.close()


@pytest.mark.kernel("confined")
async def test_a_session_whose_worker_is_killed_between_two_cells_says_so() -> None:
    async with LocalSandbox(workers=1) as sandbox, sandbox.session() as session:
        assert (await session.run("1")).ok
        worker = session._worker
        assert worker is not None
        os.kill(worker._launcher, signal.SIGKILL)
        await until(lambda: not worker.alive)
        with pytest.raises(SessionLostError, match="worker died between two cells"):
            await session.run("1")
        assert sandbox.statistics().sessions == 0
