"""The limiter of a cluster keeps the contract, on a real Ray."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from toolyard.limits.protocol import Limiter
from toolyard.testing import LimiterContract
from toolyard.testing.limiter.contract import Make

ray = pytest.importorskip("ray", reason="needs Ray")

from toolyard.limits.cluster.ray import NAMESPACE, PREFIX, RayLimiter  # noqa: E402 - needs Ray


@pytest.mark.usefixtures("ray_connection")
class TestRay(LimiterContract):
    quick_tests = frozenset(
        {
            "test_exactly_as_many_as_the_limit_run_at_once",
            "test_a_cancelled_waiter_loses_no_permit",
            "test_limiters_with_the_same_name_and_limit_share_permits",
            "test_the_same_name_with_another_limit_is_an_error_that_shows_both",
            "test_a_lower_limit_interrupts_nobody_and_starts_nobody_until_enough_have_left",
            "test_closing_fails_waiters_and_newcomers_and_lets_holders_finish",
            "test_statistics_show_who_runs_and_who_waits",
        }
    )
    """Each test starts a process of Ray's: `make test-all` runs the others, which `TestLocal` runs as well."""
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
