"""`RaySandbox`, in front of a node's service, keeps the same contract on a real Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from toolyard.testing import EachContract, PythonSemantics, SandboxContract, SessionContract

pytest.importorskip("ray", reason="needs Ray")

from toolyard.sandbox.cluster.ray import RaySandbox

pytestmark = [pytest.mark.kernel("confined"), pytest.mark.slow, pytest.mark.usefixtures("ray_connection")]
"""Slow: programs take the way of `TestRemote`. What is Ray's is tested in `tests/cluster`."""


class TestRay(SandboxContract, SessionContract, PythonSemantics):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[RaySandbox]:
        async with RaySandbox() as sandbox:
            yield sandbox


class TestEachRay(EachContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[RaySandbox]:
        async with RaySandbox() as sandbox:
            yield sandbox
