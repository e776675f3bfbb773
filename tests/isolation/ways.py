"""The three ways to run a program: on its own, as a case of a batch, and as a cell of a session."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from patience import again_if_busy
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Limits, Program, StageResult

THE_PARENT = """
import os, sys

def others():
    return sorted({int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, os.getpid()})

parent = [*others(), 1 << 21][0]
if not others():
    print("without a parent", file=sys.stderr)
"""
"""The process that all cases are forked from, by its number; nobody, in a run without it. `getppid` is the worker."""

WITHOUT_PARENT = "without a parent"


async def cases(sandbox: LocalSandbox, program: Program, stdins: Sequence[str | bytes | None], limits: Limits):
    """Run a Python program as cases that are forked from one parent. `others` and `parent` are at its hand."""
    program = program.model_copy(update={"code": THE_PARENT + program.code})

    async def run() -> list[Execution]:
        return [execution async for execution in sandbox.run_each(program, stdins, limits)]

    for _ in range(5):
        found = await again_if_busy(run)
        if WITHOUT_PARENT not in found[0].stderr:
            return found
        # On a busy machine, none may be ready within its half a second.
    raise AssertionError("the cases were run one by one, without a parent")


class Way(Protocol):
    """As much of a sandbox as most attacks need."""

    @property
    def sandbox(self) -> LocalSandbox: ...

    async def run(self, program: Program, limits: Limits) -> Execution: ...


@dataclass(frozen=True)
class Run:
    sandbox: LocalSandbox

    async def run(self, program: Program, limits: Limits) -> Execution:
        return await self.sandbox.run(program, limits)


@dataclass(frozen=True)
class Batch:
    """The program runs twice; the result is the second case's, which sees what the first one left."""

    sandbox: LocalSandbox

    async def run(self, program: Program, limits: Limits) -> Execution:
        alike, program = [program.stdin] * 2, program.model_copy(update={"stdin": None})
        if program.language != "python":  # which is run one by one
            return [execution async for execution in self.sandbox.run_each(program, alike, limits)][1]
        _, second = await cases(self.sandbox, program, alike, limits)
        assert "without a parent" not in second.stderr
        return second


@dataclass(frozen=True)
class Session:
    """The program is the only cell of a new session. Of its exit code we know if it has ended the session."""

    sandbox: LocalSandbox

    async def run(self, program: Program, limits: Limits) -> Execution:
        assert program.stdin is None, "a cell has no input"
        async with self.sandbox.session(limits) as session:
            await session.write_files({"main.py": program.code.encode(), **program.files})
            cell = await session.run(program.code)
            files = {} if cell.session_lost else await session.read_files(program.fetch_files)
        said = str(cell.error or "")
        code = re.search(r"exit code (-?\d+)", said) if cell.session_lost else None
        stage = StageResult(
            cell.verdict, int(code[1]) if code else None, cell.stdout.encode(), (cell.stderr + said).encode()
        )
        return Execution(cell.verdict, stage, files=files)
