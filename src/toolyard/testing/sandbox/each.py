"""What `run_each` promises: one program on many inputs gives the same results as `run` for each input.

For sandboxes that have it; the protocol does not require it. Tested from outside, like the rest of the contract.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from textwrap import dedent
from typing import Any, Protocol

import pytest

from toolyard.errors import ProgramError
from toolyard.sandbox.protocol import MIB, Execution, Limits, Program, Sandbox, StageResult, Verdict

Input = str | bytes | None


class EachSandbox(Sandbox, Protocol):
    def run_each(
        self, program: Program, stdins: Sequence[Input], limits: Limits | None = None, *, batch_results: bool = False
    ) -> AsyncGenerator[Execution]: ...


async def collect(
    sandbox: EachSandbox, code: str, stdins: Sequence[Input], limits: Limits | None = None, **given: Any
) -> list[Execution]:
    return [execution async for execution in sandbox.run_each(Program(dedent(code), **given), stdins, limits)]


def without_measurements(execution: Execution) -> Execution:
    """The execution without measurements, `compile_cached` and the worker's directory, for comparisons."""

    def stage(result: StageResult | None) -> StageResult | None:
        if result is None:
            return None
        stderr = re.sub(rb'"[^"]*/main\.py"', b'"main.py"', result.stderr_bytes)
        measured = {"wall_seconds": 0.0, "cpu_seconds": 0.0, "max_memory_bytes": 0, "starved_seconds": 0.0}
        return replace(result, stderr_bytes=stderr, **measured)

    return replace(
        execution,
        run=stage(execution.run),
        compile=stage(execution.compile),
        queue_seconds=0.0,
        compile_cached=False,
    )


class EachContract:
    """Subclass it and provide the class-scoped fixture `sandbox`: an open sandbox that has `run_each`."""

    pytestmark = pytest.mark.asyncio(loop_scope="class")

    @pytest.mark.parametrize(
        ("code", "stdins", "given"),
        [
            pytest.param("print(input())", ["a", "ü\n", "", None, "b\nc"], {}, id="echo"),
            pytest.param(
                "import sys\nprint(len(sys.stdin.read()))", ["x" * 100_000, "", "y" * 300_000], {}, id="sizes"
            ),
            pytest.param("import sys\nsys.exit(int(input()))", ["0", "3", "255"], {}, id="exits"),
            pytest.param("raise ValueError(input())", ["1", "2"], {}, id="exceptions"),
            pytest.param("if x\n", ["1", "2"], {}, id="syntax error"),
            pytest.param("import os\nos.kill(os.getpid(), int(input()))", ["0", "6", "11", "0"], {}, id="signals"),
            pytest.param(
                "open('f', 'a').write(input())", ["1", "2"], {"fetch_files": ["f", "none"]}, id="files fetched"
            ),
            pytest.param("print(open('f').read())", ["", ""], {"files": {"f": b"given"}}, id="files given"),
        ],
    )
    async def test_run_each_returns_what_run_returns(
        self, sandbox: EachSandbox, code: str, stdins: list[Input], given: dict[str, Any]
    ) -> None:
        alone = [without_measurements(await sandbox.run(Program(code, stdin=stdin, **given))) for stdin in stdins]
        assert [without_measurements(execution) for execution in await collect(sandbox, code, stdins, **given)] == alone

    async def test_no_inputs_give_nothing(self, sandbox: EachSandbox) -> None:
        assert await collect(sandbox, "print(1)", []) == []

    async def test_hundreds_of_results_arrive_in_order(self, sandbox: EachSandbox) -> None:
        found = await collect(sandbox, "print(input())", [str(number) for number in range(300)])
        assert [execution.stdout for execution in found] == [f"{number}\n" for number in range(300)]

    async def test_one_inputs_timeout_does_not_affect_the_others(self, sandbox: EachSandbox) -> None:
        code = "word = input()\nprint(word, flush=True)\nwhile word == 'loop': pass"
        found = await collect(sandbox, code, ["1", "loop", "2", "loop", "3"], Limits(run_seconds=0.5))
        assert [execution.stdout for execution in found] == ["1\n", "loop\n", "2\n", "loop\n", "3\n"]
        late = [execution.verdict is Verdict.TIMED_OUT for execution in found]
        assert late == [False, True, False, True, False]

    async def test_runs_leave_no_traces_for_each_other(self, sandbox: EachSandbox) -> None:
        code = """
        import builtins, os
        print(sorted(os.listdir()), os.environ.get("LEFT"), hasattr(builtins, "left"), input())
        open("left", "w").close()
        os.environ["LEFT"] = "1"
        builtins.left = 1
        """
        first, *others = [execution.stdout for execution in await collect(sandbox, code, ["-"] * 4)]
        assert others == [first] * 3

    async def test_large_outputs_arrive_whole(self, sandbox: EachSandbox) -> None:
        limits = Limits(output_bytes=8 * MIB)
        found = await collect(sandbox, "print(input() * (3 << 20))", ["a", "b", "c"], limits)
        assert [execution.stdout for execution in found] == [letter * (3 << 20) + "\n" for letter in "abc"]

    async def test_a_compile_failure_is_reported_for_each_input(self, sandbox: EachSandbox) -> None:
        found = await collect(sandbox, "int main() { return 1 }", ["1", "2"], language="c")
        assert [execution.verdict for execution in found] == [Verdict.COMPILE_FAILED] * 2
        assert found[0].stderr == found[1].stderr != ""

    async def test_a_program_with_its_own_stdin_is_refused(self, sandbox: EachSandbox) -> None:
        with pytest.raises(ProgramError, match="stdin"):
            await collect(sandbox, "print(1)", ["1"], stdin="2")

    async def test_an_unknown_language_is_refused(self, sandbox: EachSandbox) -> None:
        with pytest.raises(ProgramError, match="klingon"):
            await collect(sandbox, "print(1)", ["1", "2"], language="klingon")

    async def test_each_result_arrives_as_soon_as_it_is_ready(self, sandbox: EachSandbox) -> None:
        program = Program("import time\nprint(time.sleep(float(input())))")
        begun = time.monotonic()
        async with aclosing(sandbox.run_each(program, ["0", "0", "30"], Limits(run_seconds=60))) as executions:
            assert (await anext(executions)).ok
            assert (await anext(executions)).ok
            assert time.monotonic() - begun < 10

    async def test_batched_results_are_the_same_in_the_same_order(self, sandbox: EachSandbox) -> None:
        program = Program("n = int(input())\nprint(n)\nif n % 7 == 3: raise SystemExit(n)")
        stdins = [str(n) for n in range(40)]
        one_by_one = [execution async for execution in sandbox.run_each(program, stdins)]
        batched = [execution async for execution in sandbox.run_each(program, stdins, batch_results=True)]
        assert [without_measurements(execution) for execution in batched] == [
            without_measurements(execution) for execution in one_by_one
        ]
        assert [execution.stdout for execution in batched] == [f"{n}\n" for n in range(40)]
        async with aclosing(sandbox.run_each(program, stdins, batch_results=True)) as executions:
            assert (await anext(executions)).stdout == "0\n"
        assert (await sandbox.run(Program("print('next')"))).stdout == "next\n"

    async def test_leaving_early_stops_the_remaining_runs(self, sandbox: EachSandbox) -> None:
        """Batches that kept running would occupy every worker for a minute."""
        program = Program("import time\ntime.sleep(float(input()))")

        async def leave() -> None:
            async with aclosing(sandbox.run_each(program, ["0", "60", "60"], Limits(run_seconds=60))) as executions:
                await anext(executions)

        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(leave())
        assert (await sandbox.run(Program("print('next')"))).stdout == "next\n"
        assert time.monotonic() - begun < 20

    async def test_cancelling_stops_the_batch(self, sandbox: EachSandbox) -> None:
        patient = Limits(run_seconds=60)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            batches = [
                group.create_task(collect(sandbox, "import time; time.sleep(60)", ["", ""], patient)) for _ in range(8)
            ]
            await asyncio.sleep(1)
            for batch in batches:
                batch.cancel()
        assert (await sandbox.run(Program("print('next')"))).stdout == "next\n"
        assert time.monotonic() - begun < 20
