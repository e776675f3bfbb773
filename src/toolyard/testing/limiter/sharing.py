"""The limiter's contract: the limit, fairness, and changes of the limit."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from toolyard.limits.protocol import Limiter, Permit
from toolyard.testing.limiter.crowd import Gauge, LimiterClaims, Make, can_be_held, crowd_at, eventually


class LimiterSharing(LimiterClaims):
    """A part of `LimiterContract`."""

    # ---------------------------------------------------------------------------------------------------- the limit
    async def test_it_is_a_limiter(self, make: Make) -> None:
        limiter = await make(3)
        assert isinstance(limiter, Limiter)
        assert isinstance(limiter.permit(), Permit)
        assert limiter.limit == 3
        async with limiter.permit() as permit:
            assert isinstance(permit, Permit)

    async def test_exactly_as_many_as_the_limit_run_at_once(self, make: Make) -> None:
        limiter = await make(3)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(10, "t")
            assert await crowd.has_inside(3)
            await asyncio.sleep(self.settle_seconds)
            assert crowd.gauge.inside == 3
        assert (crowd.gauge.most, crowd.gauge.entered) == (3, 10)

    async def test_the_limit_holds_while_hundreds_of_two_thousand_are_cancelled(self, make: Make) -> None:
        limiter = await make(7)
        gauge, rng = Gauge(), random.Random(7)  # noqa: S311

        async def execution(tenant: str, ticks: int) -> None:
            async with limiter.permit(tenant):
                with gauge:
                    for _ in range(ticks):
                        await asyncio.sleep(0)

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            executions = [tasks.create_task(execution(f"t{n % 5}", rng.randrange(5))) for n in range(2000)]
            victims = rng.sample(executions, 700)
            while victims:
                await asyncio.sleep(0)
                victims.pop().cancel()
        assert 1 <= gauge.most <= 7
        assert gauge.entered >= sum(not execution.cancelled() for execution in executions) >= 1300
        assert await can_be_held(limiter) == 7

    async def test_a_limit_of_one_is_a_lock(self, make: Make) -> None:
        limiter = await make(1)
        total = 0

        async def increment() -> None:
            nonlocal total
            async with limiter.permit():
                before = total
                await asyncio.sleep(0)
                total = before + 1

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for _ in range(300):
                tasks.create_task(increment())
        assert total == 300

    async def test_no_permit_is_idle_while_someone_waits(self, make: Make) -> None:
        limiter = await make(3)
        rng = random.Random(3)  # noqa: S311
        present: list[str] = []
        async with crowd_at(limiter) as crowd:
            for step in range(80):
                if crowd.inside and rng.random() < 0.45:
                    gone = rng.choice(sorted(crowd.inside))
                    crowd.let_go(gone)
                    present.remove(gone)
                    assert await eventually(lambda gone=gone: gone not in crowd.inside)
                else:
                    present.append(f"step {step}")
                    crowd.add(present[-1], rng.choice("abc"), rng.choice([1.0, 5.0]))
                assert await crowd.has_inside(min(3, len(present)))
        assert crowd.gauge.most == 3

    @pytest.mark.parametrize("tenants", [4, 5000])
    async def test_thousands_can_wait_and_all_get_their_turn(self, make: Make, tenants: int) -> None:
        limiter = await make(50)
        gauge = Gauge()

        async def execution(tenant: str) -> None:
            for _ in range(2):
                async with limiter.permit(tenant):
                    with gauge:
                        await asyncio.sleep(0)

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for n in range(5000):
                tasks.create_task(execution(f"t{n % tenants}"))
        assert gauge.entered == 10_000
        assert gauge.most <= 50

    # ---------------------------------------------------------------------------------------------------- fairness
    async def test_within_a_tenant_first_come_is_first_served(self, make: Make) -> None:
        limiter = await make(1)
        async with crowd_at(limiter) as crowd:
            waiting = {n: crowd.add(str(n), "t") for n in range(60)}
            assert await crowd.has_started(1)
            for n in range(10, 60, 10):
                waiting[n].cancel()
            crowd.let_go()
        assert crowd.started == [str(n) for n in range(60) if n == 0 or n % 10]

    async def test_a_tenant_of_triple_weight_starts_three_times_as_often(self, make: Make) -> None:
        limiter = await make(1)
        async with crowd_at(limiter) as crowd:
            crowd.add("holder", "another")
            assert await crowd.has_started(1)
            crowd.add_many(40, "light", 1.0)
            crowd.add_many(120, "heavy", 3.0)
            await asyncio.sleep(self.settle_seconds)
            crowd.let_go()
        for n in range(1, 120):
            light = sum(label.startswith("light") for label in crowd.started[1 : n + 1])
            assert abs(light - n / 4) <= 1, crowd.started[: n + 1]

    @pytest.mark.parametrize("limit", [1, 8])
    async def test_weights_also_apply_to_workers_that_ask_for_one_permit_at_a_time(
        self, make: Make, limit: int
    ) -> None:
        limiter = await make(limit)
        starts: list[str] = []

        async def worker(tenant: str, weight: float) -> None:
            while len(starts) < 800:
                async with limiter.permit(tenant, weight=weight):
                    starts.append(tenant)
                    await asyncio.sleep(0.0001)

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for _ in range(3 * limit):
                tasks.create_task(worker("light", 1.0))
                tasks.create_task(worker("heavy", 3.0))
        assert Counter(starts[:800])["light"] == pytest.approx(200, abs=20)

    @pytest.mark.parametrize("limit", [1, 20])
    async def test_requests_made_one_by_one_start_as_often_as_those_made_all_at_once(
        self, make: Make, limit: int
    ) -> None:
        limiter = await make(limit)
        starts: list[str] = []

        async def execution(tenant: str) -> None:
            async with limiter.permit(tenant):
                starts.append(tenant)
                await asyncio.sleep(0.0001)

        async def worker() -> None:
            while len(starts) < 800:
                await execution("one by one")

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for _ in range(800):
                tasks.create_task(execution("all at once"))
            for _ in range(3 * limit):
                tasks.create_task(worker())
        assert Counter(starts[:800])["one by one"] == pytest.approx(400, abs=40)

    @pytest.mark.parametrize("limit", [1, 20])
    async def test_a_small_tenant_is_not_starved_by_a_flood_from_another(self, make: Make, limit: int) -> None:
        limiter = await make(limit)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(500, "flood")
            assert await crowd.has_inside(limit)
            await asyncio.sleep(self.settle_seconds)
            crowd.let_go(*[f"flood {n}" for n in range(100)])
            assert await crowd.has_started(100 + limit)
            crowd.add_many(4, "small")
            await asyncio.sleep(self.settle_seconds)
            crowd.let_go()
        after = crowd.started[100 + limit :]
        for n in range(4):
            flooded = after[: after.index(f"small {n}")]
            overtaken = sum(label.startswith("flood") for label in flooded)
            assert overtaken <= n + 2, after[:30]

    # ------------------------------------------------------------------------------------------------------- resize
    async def test_a_higher_limit_starts_waiters_at_once(self, make: Make) -> None:
        limiter = await make(1)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(10, "t")
            assert await crowd.has_inside(1)
            await limiter.resize(6)
            assert await crowd.has_inside(6)
            await asyncio.sleep(self.settle_seconds)
            assert crowd.gauge.most == 6
        assert limiter.limit == (await limiter.statistics()).limit == 6
        assert await can_be_held(limiter) == 6

    async def test_a_lower_limit_interrupts_nobody_and_starts_nobody_until_enough_have_left(self, make: Make) -> None:
        limiter = await make(5)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(20, "t")
            assert await crowd.has_inside(5)
            await limiter.resize(2)
            await asyncio.sleep(self.settle_seconds)
            assert crowd.gauge.inside == 5
            crowd.let_go("t 0", "t 1", "t 2")
            assert await crowd.has_inside(2)
            await asyncio.sleep(self.settle_seconds)
            assert (crowd.gauge.inside, len(crowd.started)) == (2, 5)
            crowd.let_go("t 3")
            assert await crowd.has_started(6)
            assert crowd.gauge.inside == 2
        assert await can_be_held(limiter) == 2

    async def test_a_lower_limit_also_applies_to_free_permits(self, make: Make) -> None:
        limiter = await make(8)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(8, "t")
            assert await crowd.has_inside(8)
            crowd.let_go(*[f"t {n}" for n in range(2, 8)])
            assert await crowd.has_inside(2)
            await limiter.resize(2)
            await asyncio.sleep(self.settle_seconds)
            crowd.add_many(6, "late")
            await asyncio.sleep(self.settle_seconds)
            assert crowd.gauge.inside == 2
