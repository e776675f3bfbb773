"""The limiter of a cluster keeps the contract, on a real Ray."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from toolyard.limits.protocol import Limiter
from toolyard.testing import LimiterContract
from toolyard.testing.limiter.contract import Make

ray = pytest.importorskip("ray", reason="needs Ray")

from toolyard.limits.cluster.ray import NAMESPACE, PREFIX, RayLimiter  # noqa: E402 - needs Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ty-")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
        logging_level="warning",
    )
    yield
    ray.shutdown()
    deadline = time.monotonic() + 10
    while os.path.exists(folder) and time.monotonic() < deadline:  # Ray's processes write to it until they are gone
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


@pytest.mark.usefixtures("cluster")
class TestRay(LimiterContract):
    settle_seconds = 0.3
    """A change goes to the lender and back, between two processes that share two cores with others."""
    extra_starts = 1
    """The process itself: see `RayLimiter`."""

    @pytest_asyncio.fixture
    async def make(self) -> AsyncIterator[Make]:
        made: list[RayLimiter] = []
        suffix = uuid.uuid4().hex[:8]

        async def make(limit: int, *, name: str | None = None, **options: Any) -> Limiter:
            unique = f"{name or uuid.uuid4().hex}-{suffix}"
            made.append(await asyncio.to_thread(RayLimiter, unique, limit, **options))
            return made[-1]

        yield make
        for limiter in made:
            await limiter.close()
        for name in {limiter.name for limiter in made}:
            ray.kill(ray.get_actor(PREFIX + name, NAMESPACE))
