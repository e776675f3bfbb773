"""One sandbox for each level, shared by all attacks: what one of them breaks, the next one finds."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from ways import Batch, Run, Session, Way

from patience import PatientSandbox
from toolyard.sandbox.isolation import Level
from toolyard.sandbox.local import LocalSandbox


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "any_user: about our own bookkeeping, clocks and protocols, which are the same for every user; left out of the "
        "run as an ordinary one",
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def best() -> AsyncIterator[LocalSandbox]:
    """The best this machine grants."""
    async with PatientSandbox(workers=2) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def confined() -> AsyncIterator[LocalSandbox]:
    """As in a container with the default profile: no namespaces."""
    async with PatientSandbox(workers=2, isolation="confined") as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(best: LocalSandbox) -> LocalSandbox:
    """For claims of full isolation. Tests with it are marked `kernel("namespaces")`."""
    if best.level is not Level.FULL:
        reason = f"this machine grants only {best.level.value!r}: {best.grants.missing}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return best


@pytest.fixture(params=["best", "confined"])
def any_level(request: pytest.FixtureRequest) -> LocalSandbox:
    """For claims that hold wherever programs run at all."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["best", "confined", "batch", "session"])
def any_way(request: pytest.FixtureRequest) -> Way:
    """Likewise, and in whatever way they run; cases and cells at full isolation only, where cases are forked."""
    if request.param in ("batch", "session"):
        sandbox = request.getfixturevalue("sandbox")
        return Batch(sandbox) if request.param == "batch" else Session(sandbox)
    return Run(request.getfixturevalue(request.param))


@pytest.fixture(params=[Run, Batch, Session], ids=["run", "batch", "session"])
def full_way(request: pytest.FixtureRequest, sandbox: LocalSandbox) -> Way:
    """For claims of full isolation in whatever way. Tests with it are marked `kernel("namespaces")`."""
    return request.param(sandbox)
