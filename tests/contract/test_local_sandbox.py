"""The embedded sandbox keeps the contract, at the best level of this machine and without namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Program
from toolyard.testing import PythonSemantics, SandboxContract, SessionContract


async def with_numpy_at_hand(sandbox: LocalSandbox) -> LocalSandbox:
    """So that programs with numpy are forked from a zygote that has it, which is where they could go wrong."""
    await sandbox.run(Program("import numpy"))
    async with asyncio.timeout(60):
        while "numpy" not in sandbox.process_ids:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.05)
    return sandbox


@pytest.mark.kernel("full")
class TestFull(SandboxContract, SessionContract, PythonSemantics):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[LocalSandbox]:
        async with LocalSandbox(workers=2, isolation="required") as sandbox:
            yield await with_numpy_at_hand(sandbox)


@pytest.mark.kernel("confined")
class TestConfined(SandboxContract, SessionContract, PythonSemantics):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[LocalSandbox]:
        async with LocalSandbox(workers=2, isolation="confined") as sandbox:
            yield await with_numpy_at_hand(sandbox)
