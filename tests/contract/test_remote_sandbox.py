"""`RemoteSandbox`, in front of our own service and the embedded sandbox behind that, keeps the same contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.remote import RemoteSandbox
from toolyard.sandbox.service import ServiceConfig, open_service
from toolyard.testing import PythonSemantics, SandboxContract, SessionContract


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
