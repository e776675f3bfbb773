"""The embedded sandbox keeps the contract, at the best level of this machine and without namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from patience import PatientSandbox
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Program, Sandbox, Verdict
from toolyard.testing import EachContract, PythonSemantics, SandboxContract, SessionContract
from toolyard.testing.sandbox.contract import run


async def with_numpy_at_hand(sandbox: LocalSandbox) -> LocalSandbox:
    """So that programs with numpy are forked from a zygote that has it, which is where they could go wrong."""
    await sandbox.run(Program("import numpy"))
    async with asyncio.timeout(60):
        while "numpy" not in sandbox.process_ids:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.05)
    return sandbox


@pytest.mark.kernel("full")
class TestFull(SandboxContract, SessionContract, EachContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[LocalSandbox]:
        async with PatientSandbox(workers=2, isolation="required") as sandbox:
            yield sandbox


@pytest.mark.kernel("full")
class TestPythonInFull(PythonSemantics):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[LocalSandbox]:
        async with LocalSandbox(workers=2, isolation="required") as sandbox:
            yield await with_numpy_at_hand(sandbox)


@pytest.mark.slow
@pytest.mark.kernel("confined")
class TestConfined(SandboxContract, SessionContract, EachContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[LocalSandbox]:
        async with PatientSandbox(workers=2, isolation="confined") as sandbox:
            yield sandbox


@pytest.mark.kernel("confined")
class TestPythonInConfined(PythonSemantics):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[LocalSandbox]:
        async with PatientSandbox(workers=2, isolation="confined") as sandbox:
            yield await with_numpy_at_hand(sandbox)

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    async def test_multiprocessing_works(self, sandbox: Sandbox, method: str) -> None:
        """It does not at this level. Its locks are semaphores, those are files in /dev/shm, and that is the host's."""
        execution = await run(sandbox, f"import multiprocessing as mp\nmp.get_context({method!r}).Lock()")
        assert execution.verdict is Verdict.FAILED
        assert execution.stderr.endswith("PermissionError: [Errno 13] Permission denied\n")
