"""The limiter's contract: whatever happens to a waiting or running execution, its permit comes back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from toolyard.errors import LimiterTimeoutError, PermitExpiredError
from toolyard.testing.limiter.crowd import (
    PATIENCE,
    Gauge,
    LimiterClaims,
    Make,
    can_be_held,
    crowd_at,
    eventually,
    gives_all_back,
    in_threads,
    statistics_once,
)


class LimiterPermits(LimiterClaims):
    """A part of `LimiterContract`."""

    # --------------------------------------------------------------------------------------- nothing loses a permit
    async def test_a_cancelled_waiter_loses_no_permit(self, make: Make) -> None:
        limiter = await make(2)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(2, "holder")
            assert await crowd.has_inside(2)
            waiting = [crowd.add(f"waiter {n}", f"t{n % 3}") for n in range(200)]
            await asyncio.sleep(self.settle_seconds)
            for waiter in waiting:
                waiter.cancel()
            await asyncio.wait(waiting)
        assert len(crowd.started) == 2
        assert (await statistics_once(limiter, lambda found: found.waiting == 0)).waiting == 0
        assert await can_be_held(limiter) == 2

    async def test_a_waiter_cancelled_in_the_tick_of_its_grant_loses_no_permit(self, make: Make) -> None:
        """Granted, then cancelled; and cancelled, then granted."""
        limiter = await make(1)

        async def wait() -> None:
            async with limiter.permit("waiter"):
                pass

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for n in range(400):
                async with limiter.permit("holder"):
                    waiter = tasks.create_task(wait())
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    if n % 2:
                        waiter.cancel()
                waiter.cancel()
                await asyncio.wait([waiter])
        assert await can_be_held(limiter) == 1

    async def test_a_cancelled_holder_gives_its_permit_back(self, make: Make) -> None:
        limiter = await make(2)
        async with crowd_at(limiter) as crowd:
            for n in range(200):
                running = crowd.add(str(n))
                assert await crowd.has_started(n + 1)
                running.cancel()
                await asyncio.wait([running])
        assert await can_be_held(limiter) == 2

    async def test_a_timeout_says_what_was_waited_for_and_loses_no_permit(self, make: Make) -> None:
        limiter = await make(1)
        async with limiter.permit("holder"):
            with pytest.raises(LimiterTimeoutError) as late:
                async with limiter.permit("late one", timeout=0.05):
                    pytest.fail("it got a permit of another")
            assert isinstance(late.value, TimeoutError)
            for part in ("late one", "0.05", "1 of 1"):
                assert part in str(late.value)
        assert await can_be_held(limiter) == 1

    async def test_a_timeout_of_zero_takes_what_is_free_and_never_waits(self, make: Make) -> None:
        limiter = await make(1)
        async with limiter.permit():  # from here on, a limiter that works through messages has a permit at hand
            with pytest.raises(LimiterTimeoutError):
                async with limiter.permit(timeout=0):
                    pytest.fail("it got a permit of another")
        async with limiter.permit(timeout=0):
            pass

    async def test_timeouts_at_the_moment_of_the_grant_lose_no_permit(self, make: Make) -> None:
        limiter = await make(1)
        in_time = 0

        async def wait(timeout: float) -> None:
            nonlocal in_time
            with contextlib.suppress(LimiterTimeoutError):
                async with limiter.permit(timeout=timeout):
                    in_time += 1

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for n in range(200):
                async with limiter.permit():
                    waiter = tasks.create_task(wait(0.002))
                    await asyncio.sleep(0.0015 + n * 0.000005)
                await asyncio.wait([waiter])
        assert await can_be_held(limiter) == 1

    async def test_the_callers_own_timeout_is_not_the_limiters(self, make: Make) -> None:
        limiter = await make(1)
        async with limiter.permit():
            with pytest.raises(TimeoutError) as late:
                async with asyncio.timeout(0.02), limiter.permit(timeout=60):
                    pytest.fail("it got a permit of another")
            assert not isinstance(late.value, LimiterTimeoutError)
        assert await can_be_held(limiter) == 1

    @pytest.mark.parametrize("max_hold_seconds", [None, 60.0])
    async def test_what_the_body_raises_passes_through_unchanged_and_gives_the_permit_back(
        self, make: Make, max_hold_seconds: float | None
    ) -> None:
        limiter = await make(1, max_hold_seconds=max_hold_seconds)
        for kind in (ValueError, TimeoutError, LimiterTimeoutError, asyncio.CancelledError, SystemExit):
            error = kind("of the body")
            with pytest.raises(kind) as raised:
                async with limiter.permit():
                    raise error
            assert raised.value is error
            with pytest.raises(kind) as raised, limiter.permit():
                raise error
            assert raised.value is error
        assert await can_be_held(limiter) == 1

    async def test_a_permit_is_entered_once(self, make: Make) -> None:
        limiter = await make(2)
        permit = limiter.permit()
        async with permit:
            with pytest.raises(RuntimeError, match="once"):
                await permit.__aenter__()
        with pytest.raises(RuntimeError, match="once"):
            await permit.__aenter__()
        with pytest.raises(RuntimeError, match="once"):
            permit.__enter__()
        assert await can_be_held(limiter) == 2

    # -------------------------------------------------------------------------------------------- threads and loops
    async def test_threads_and_tasks_share_one_limit(self, make: Make) -> None:
        limiter = await make(3)
        gauge = Gauge()

        def in_a_thread() -> None:
            for _ in range(25):
                with limiter.permit("thread", timeout=30), gauge:
                    time.sleep(0.0005)

        async def in_a_task() -> None:
            for _ in range(25):
                async with limiter.permit("task", timeout=30):
                    with gauge:
                        await asyncio.sleep(0.0005)

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(in_a_task())
            await in_threads(8, in_a_thread)
        assert gauge.entered == 16 * 25
        assert 1 < gauge.most <= 3
        assert await can_be_held(limiter) == 3

    async def test_event_loops_of_several_threads_share_one_limit(self, make: Make) -> None:
        limiter = await make(2)
        gauge = Gauge()

        async def executions() -> None:
            async def execution() -> None:
                for _ in range(10):
                    async with limiter.permit("t", timeout=30):
                        with gauge:
                            await asyncio.sleep(0.0005)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(8):
                    tasks.create_task(execution())

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(executions())
            await in_threads(2, lambda: asyncio.run(executions()))
        assert gauge.entered == 3 * 8 * 10
        assert 1 <= gauge.most <= 2
        assert await can_be_held(limiter) == 2

    async def test_a_thread_that_waits_too_long_gets_a_timeout_and_loses_no_permit(self, make: Make) -> None:
        limiter = await make(1)

        def wait() -> None:
            with (
                pytest.raises(LimiterTimeoutError, match=r"late one.*0\.05.*1 of 1"),
                limiter.permit("late one", timeout=0.05),
            ):
                pytest.fail("it got a permit of another")

        async with limiter.permit():
            await in_threads(3, wait)
        assert await can_be_held(limiter) == 1

    async def test_waiters_in_a_closed_event_loop_lose_no_permit(self, make: Make) -> None:
        limiter = await make(1)

        async def wait() -> None:
            async with limiter.permit("abandoned"):
                pytest.fail("nobody runs it any more")

        def ignore(loop: asyncio.AbstractEventLoop, complaint: dict[str, Any]) -> None:
            """Ignore asyncio's correct complaint that pending tasks were destroyed."""

        def abandon(count: int) -> None:
            loop = asyncio.new_event_loop()
            loop.set_exception_handler(ignore)
            waiting = [loop.create_task(wait()) for _ in range(count)]
            loop.run_until_complete(asyncio.sleep(0.01))
            assert not any(waiter.done() for waiter in waiting)
            loop.close()

        for count in (1, 2000):
            async with limiter.permit("holder"):
                await in_threads(1, lambda count=count: abandon(count))
            assert await can_be_held(limiter) == 1

    # --------------------------------------------------------------------------------------------- held for too long
    async def test_a_body_held_too_long_is_cancelled_and_its_permit_comes_back(self, make: Make) -> None:
        limiter = await make(1, max_hold_seconds=0.2)
        cancelled = False

        async def hang() -> None:
            nonlocal cancelled
            async with limiter.permit("slow one", label="a hung execution"):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled = True
                    raise

        with pytest.raises(PermitExpiredError) as expired:
            await hang()
        assert cancelled
        for part in ("slow one", "a hung execution", "0.2"):
            assert part in str(expired.value)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        assert await gives_all_back(limiter)
        assert (await statistics_once(limiter, lambda found: found.expired > 0)).expired == 1

    async def test_a_body_that_ignores_its_cancellation_still_loses_its_permit(self, make: Make) -> None:
        limiter = await make(1, max_hold_seconds=0.2)
        done = asyncio.Event()
        found: list[str] = []

        async def stubborn() -> None:
            try:
                async with limiter.permit(label="stubborn"):
                    while not done.is_set():
                        with contextlib.suppress(asyncio.CancelledError):
                            await done.wait()
            except PermitExpiredError:
                found.append("expired")

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(stubborn())
            await asyncio.sleep(0)
            async with limiter.permit(timeout=PATIENCE):
                found.append("its permit went on")
                done.set()
        assert found == ["its permit went on", "expired"]
        assert await gives_all_back(limiter)
        assert (await statistics_once(limiter, lambda found: found.expired > 0)).expired == 1

    async def test_a_thread_that_holds_too_long_loses_its_permit(self, make: Make) -> None:
        limiter = await make(1, max_hold_seconds=0.2)
        passed_on, entered = threading.Event(), threading.Event()

        def hang() -> None:
            with limiter.permit(label="a hung thread"):
                entered.set()
                assert passed_on.wait(PATIENCE)

        def hold() -> None:
            with pytest.raises(PermitExpiredError, match="a hung thread"):
                hang()

        async def take() -> None:
            assert await eventually(entered.is_set)
            async with limiter.permit(timeout=PATIENCE):
                passed_on.set()

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(take())
            await in_threads(1, hold)
        assert await gives_all_back(limiter)
        assert (await statistics_once(limiter, lambda found: found.expired > 0)).expired == 1

    async def test_a_body_that_blocks_its_event_loop_still_loses_its_permit(self, make: Make) -> None:
        limiter = await make(1, max_hold_seconds=0.2)
        passed_on = threading.Event()

        def take() -> None:
            with limiter.permit(timeout=PATIENCE):
                passed_on.set()

        async def block(thread: ThreadPoolExecutor) -> None:
            async with limiter.permit(label="blocking"):
                thread.submit(take)
                assert passed_on.wait(5)

        with ThreadPoolExecutor(1) as thread, pytest.raises(PermitExpiredError):
            await block(thread)
        assert await gives_all_back(limiter)

    async def test_a_holder_that_leaves_in_time_never_expires(self, make: Make) -> None:
        limiter = await make(2, max_hold_seconds=0.3)
        async with limiter.permit():
            pass
        with limiter.permit():
            pass
        await asyncio.sleep(0.5)
        assert (await limiter.statistics()).expired == 0
        assert await gives_all_back(limiter)
