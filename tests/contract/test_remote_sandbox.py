"""`RemoteSandbox`, in front of our own service and the embedded sandbox behind that, keeps the same contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.remote.sandbox import RemoteSandbox
from toolyard.sandbox.service.server import ServiceConfig, open_service
from toolyard.testing import EachContract, PythonSemantics, SandboxContract, SessionContract


@pytest.mark.kernel("confined")
class TestRemote(SandboxContract, SessionContract, PythonSemantics):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[RemoteSandbox]:
        async with (
            LocalSandbox(workers=2) as local,
            open_service(ServiceConfig(port=0, grace_seconds=0.2), local) as service,
            RemoteSandbox(service.url) as remote,
        ):
            yield remote


@pytest.mark.kernel("confined")
class TestEachRemote(EachContract):
    """Many inputs in one request."""

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[RemoteSandbox]:
        async with (
            LocalSandbox(workers=2) as local,
            open_service(ServiceConfig(port=0, grace_seconds=0.2, max_wait_seconds=60), local) as service,
            RemoteSandbox(service.url) as remote,
        ):
            yield remote


@pytest.mark.kernel("confined")
@pytest.mark.slow
class TestEachOneByOne(EachContract):
    """With a server that takes no batches, as a foreign one: a request each."""

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[RemoteSandbox]:
        async with (
            LocalSandbox(workers=2) as local,
            open_service(ServiceConfig(port=0, grace_seconds=0.2, max_wait_seconds=60, max_cases=1), local) as service,
            RemoteSandbox(service.url) as remote,
        ):
            yield remote
