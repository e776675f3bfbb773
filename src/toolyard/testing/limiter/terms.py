"""The limiter's contract: names and numbers, statistics, refusals, rates and closing."""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import Any

import pytest

from toolyard.errors import (
    ConfigError,
    LimitConflictError,
    LimiterClosedError,
    LimiterTimeoutError,
    SandboxBusyError,
)
from toolyard.limits.adaptive import GROWTH_SECONDS
from toolyard.limits.protocol import Limiter
from toolyard.testing.limiter.crowd import (
    PATIENCE,
    LimiterClaims,
    Make,
    can_be_held,
    crowd_at,
    eventually,
    in_threads,
    statistics_once,
)


class LimiterTerms(LimiterClaims):
    """A part of `LimiterContract`."""

    # -------------------------------------------------------------------------------------------- names and numbers
    async def test_a_limit_that_is_not_a_positive_whole_number_is_an_error_that_shows_it(self, make: Make) -> None:
        limiter = await make(2)
        wrong: tuple[Any, ...] = (0, -1, 1.5, True, "3")
        for limit in wrong:
            with pytest.raises(ConfigError, match=f"={limit!r} "):
                await make(limit)
            with pytest.raises(ConfigError, match=f"={limit!r} "):
                await limiter.resize(limit)
        assert limiter.limit == 2

    async def test_a_weight_that_is_not_a_positive_number_is_an_error_that_shows_it(self, make: Make) -> None:
        limiter = await make(1)
        for weight in (0, -1.0, math.nan, math.inf):
            with pytest.raises(ConfigError, match=f"={weight!r} .*'odd one'"):
                limiter.permit("odd one", weight=weight)

    @pytest.mark.parametrize("option", ["starts_per_second", "max_hold_seconds"])
    @pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
    async def test_an_option_that_is_not_a_positive_number_is_an_error_that_shows_it(
        self, make: Make, option: str, value: float
    ) -> None:
        options: dict[str, Any] = {option: value}
        with pytest.raises(ConfigError) as wrong:
            await make(2, **options)
        assert repr(value) in str(wrong.value)

    async def test_limiters_with_the_same_name_and_limit_share_permits(self, make: Make) -> None:
        one, two = await make(2, name="shared"), await make(2, name="shared")
        async with one.permit(), two.permit():
            for limiter in (one, two):
                with pytest.raises(LimiterTimeoutError):
                    async with limiter.permit(timeout=0.02):
                        pytest.fail("it got a third one")
        assert await can_be_held(one) == 2
        assert await can_be_held(two) == 2

    async def test_the_same_name_with_another_limit_is_an_error_that_shows_both(self, make: Make) -> None:
        limiter = await make(41, name="shared")
        with pytest.raises(LimitConflictError) as conflict:
            await make(17, name="shared")
        assert isinstance(conflict.value, ConfigError)
        for part in ("shared", "41", "17"):
            assert part in str(conflict.value)
        assert limiter.limit == 41
        await make(41, name="shared")

    async def test_a_second_limiter_of_the_same_name_takes_the_resized_limit(self, make: Make) -> None:
        one = await make(1, name="shared")
        await one.resize(3)
        assert await eventually(lambda: one.limit == 3)
        two = await make(3, name="shared")
        assert two.limit == 3
        assert await can_be_held(two) == 3

    # --------------------------------------------------------------------------------------------------- statistics
    async def test_statistics_show_who_runs_and_who_waits(self, make: Make) -> None:
        limiter = await make(2)
        async with crowd_at(limiter) as crowd:
            crowd.add("first", "a")
            assert await crowd.has_started(1)
            await asyncio.sleep(0.02)
            crowd.add("second", "a", 2.0)
            assert await crowd.has_started(2)
            crowd.add("third", "a", 2.0)
            crowd.add_many(2, "b", 3.0)
            found = await statistics_once(limiter, lambda found: found.waiting == 3)
            assert (found.limit, found.effective_limit) == (2, 2)
            assert (found.in_flight, found.waiting, found.refused, found.expired) == (2, 3, 0, 0)
            a, b = found.tenants["a"], found.tenants["b"]
            assert (a.weight, a.in_flight, a.waiting, a.granted) == (2.0, 2, 1, 2)
            assert (b.weight, b.in_flight, b.waiting, b.granted) == (3.0, 0, 2, 0)
            assert [(holder.tenant, holder.label) for holder in found.holders] == [("a", "first"), ("a", "second")]
            assert found.holders[0].seconds > found.holders[1].seconds >= 0.0
            assert all(str(os.getpid()) in holder.process for holder in found.holders)
            await asyncio.sleep(0.1)
            later = await limiter.statistics()
            for before, after in zip(found.holders, later.holders, strict=True):
                assert before.seconds + 0.05 <= after.seconds < before.seconds + PATIENCE
        found = await statistics_once(limiter, lambda found: found.in_flight == 0)
        assert (found.in_flight, found.waiting, found.holders) == (0, 0, ())
        assert (found.tenants["a"].granted, found.tenants["b"].granted) == (3, 2)
        assert found.wait.count == 5

    async def test_statistics_show_how_long_permits_took(self, make: Make) -> None:
        limiter = await make(1)
        for _ in range(9):
            async with limiter.permit():
                pass
        async with crowd_at(limiter) as crowd:
            crowd.add("holder")
            assert await crowd.has_started(1)
            crowd.add("waiter")
            await asyncio.sleep(0.3)
        wait = (await limiter.statistics()).wait
        assert wait.count == 11
        assert 0.0 <= wait.p50 <= wait.p90 <= wait.p99 <= wait.max < PATIENCE
        assert wait.p50 < 0.25
        assert wait.max >= 0.25
        assert wait.p99 >= 0.25 / 1.19

    # ----------------------------------------------------------------------------------------------------- adaptive
    async def test_a_refusal_lowers_the_limit_and_time_brings_it_back(self, make: Make) -> None:
        limiter = await make(4, adaptive=True)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(2, "t")
            assert await crowd.has_inside(2)
            async with limiter.permit() as permit:
                permit.refused()
                found = await statistics_once(limiter, lambda found: found.refused > 0)
            assert found.refused == 1
            assert found.limit == limiter.limit == 4
            assert 1 <= found.effective_limit < 4
            found = await statistics_once(limiter, lambda found: found.effective_limit == 4)
            assert found.effective_limit == 4
        assert await can_be_held(limiter) == 4

    async def test_after_a_refusal_nobody_starts_until_enough_have_left(self, make: Make) -> None:
        limiter = await make(16, adaptive=True)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(15, "t")
            assert await crowd.has_inside(15)
            async with limiter.permit() as permit:
                for _ in range(16):
                    permit.refused()
                refused = time.monotonic()
                found = await statistics_once(limiter, lambda found: found.refused == 16)
            assert found.effective_limit <= 15
            await asyncio.sleep(self.settle_seconds)
            crowd.add("late")
            await asyncio.sleep(self.settle_seconds)
            assert "late" not in crowd.started or time.monotonic() > refused + GROWTH_SECONDS
            crowd.let_go(*[f"t {n}" for n in range(15)])
            assert await crowd.has_started(16)

    async def test_a_service_that_asks_for_a_pause_gets_it(self, make: Make) -> None:
        limiter = await make(4, adaptive=True)
        async with limiter.permit() as permit:
            asked = time.monotonic()
            permit.refused(retry_after=self._pause)
            permit.refused()  # without a pause, so it does not end the current one
            found = await statistics_once(limiter, lambda found: found.paused_seconds > 0)
            assert 0 < found.paused_seconds <= self._pause
        await self._nobody_starts_before(limiter, asked + self._pause)

    async def test_a_busy_service_counts_as_a_refusal_when_its_error_leaves_the_body(self, make: Make) -> None:
        limiter = await make(4, adaptive=True)
        busy = SandboxBusyError("full", retry_after=self._pause)
        asked = time.monotonic()
        with pytest.raises(SandboxBusyError) as raised:
            async with limiter.permit():
                raise busy
        assert raised.value is busy
        found = await statistics_once(limiter, lambda found: found.refused > 0)
        assert found.refused == 1
        assert found.effective_limit < 4
        await self._nobody_starts_before(limiter, asked + self._pause)
        asked = time.monotonic()
        with pytest.raises(SandboxBusyError), limiter.permit():
            raise busy
        assert (await statistics_once(limiter, lambda found: found.refused > 1)).refused == 2
        await self._nobody_starts_before(limiter, asked + self._pause)

    async def test_a_pause_also_holds_back_earlier_waiters(self, make: Make) -> None:
        limiter = await make(1, adaptive=True)
        starts: list[float] = []

        async def start() -> None:
            async with limiter.permit(timeout=PATIENCE):
                starts.append(time.monotonic())

        async with limiter.permit() as permit:
            waiting = asyncio.create_task(start())
            await statistics_once(limiter, lambda found: found.waiting == 1)
            asked = time.monotonic()
            permit.refused(retry_after=self._pause)
        await waiting
        assert starts[0] >= asked + self._pause - 0.01

    @property
    def _pause(self) -> float:
        return 0.4 + self.settle_seconds

    async def _nobody_starts_before(self, limiter: Limiter, moment: float) -> None:
        """Neither a task nor a thread; afterwards both start by themselves."""
        starts: list[float] = []

        def in_a_thread() -> None:
            with limiter.permit(timeout=PATIENCE):
                starts.append(time.monotonic())

        async def in_a_task() -> None:
            async with limiter.permit(timeout=PATIENCE):
                starts.append(time.monotonic())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(in_a_task())
            await in_threads(1, in_a_thread)
        assert min(starts) >= moment - 0.01

    async def test_a_limiter_that_is_not_adaptive_only_counts_refusals(self, make: Make) -> None:
        limiter = await make(2)
        async with limiter.permit() as permit:
            permit.refused(unavailable=True)
        found = await statistics_once(limiter, lambda found: found.refused > 0)
        assert (found.refused, found.effective_limit) == (1, 2)
        assert await can_be_held(limiter) == 2

    # --------------------------------------------------------------------------------------------- starts per second
    async def test_starts_never_exceed_the_rate_and_waiters_wake_by_themselves(self, make: Make) -> None:
        rate, burst = 20.0, 3.0
        limiter = await make(100, starts_per_second=rate, burst=burst)
        starts: list[float] = []

        async def execution(n: int) -> None:
            async with limiter.permit(f"t{n % 2}"):
                starts.append(time.monotonic())

        asked = time.monotonic()
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for n in range(18):
                tasks.create_task(execution(n))
        for count, start in enumerate(sorted(starts), 1):
            assert count <= burst + rate * (start - asked) + self.extra_starts + 0.01

    # -------------------------------------------------------------------------------------------------------- close
    async def test_closing_fails_waiters_and_newcomers_and_lets_holders_finish(self, make: Make) -> None:
        limiter = await make(1)
        told: list[str] = []

        async def in_a_task() -> None:
            with pytest.raises(LimiterClosedError):
                async with limiter.permit():
                    pytest.fail("it is closed")
            told.append("task")

        def in_a_thread() -> None:
            with pytest.raises(LimiterClosedError), limiter.permit():
                pytest.fail("it is closed")
            told.append("thread")

        async with asyncio.timeout(30), crowd_at(limiter) as crowd, asyncio.TaskGroup() as tasks:
            crowd.add("holder")
            assert await crowd.has_inside(1)
            tasks.create_task(in_a_task())
            tasks.create_task(in_threads(1, in_a_thread))
            found = await statistics_once(limiter, lambda found: found.waiting == 2)
            assert found.waiting == 2
            await limiter.close()
            assert await eventually(lambda: len(told) == 2)
            assert crowd.gauge.inside == 1
            await in_a_task()
            await in_threads(1, in_a_thread)
            crowd.let_go()
        assert sorted(told) == ["task", "task", "thread", "thread"]

    async def test_closing_one_of_two_that_share_a_name_leaves_the_other_open(self, make: Make) -> None:
        one, two = await make(2, name="shared"), await make(2, name="shared")
        await one.close()
        await one.close()
        assert await can_be_held(two) == 2

    async def test_a_name_can_be_used_again_after_all_its_limiters_are_closed(self, make: Make) -> None:
        one, two = await make(2, name="shared"), await make(2, name="shared")
        await one.close()
        await two.close()
        assert await can_be_held(await make(2, name="shared")) == 2
