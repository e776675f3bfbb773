"""What any `Limiter` promises, seen from outside only: by the executions that run under its permits.

One that works through messages hears of a change a little later. So what must happen is waited for, and what must not
happen is looked for after `settle_seconds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import pytest

from toolyard.errors import (
    ConfigError,
    LimitConflictError,
    LimiterClosedError,
    LimiterTimeoutError,
    PermitExpiredError,
    SandboxBusyError,
)
from toolyard.limits.protocol import Limiter, LimiterStatistics, Permit

_PATIENCE = 10.0
"""Seconds after which something that should have happened is taken not to happen at all."""


class Make(Protocol):
    """Makes a limiter, open. Two of one `name` are two handles of the same."""

    async def __call__(self, limit: int, *, name: str | None = None, **options: Any) -> Limiter: ...


class Gauge:
    """Counts who is inside, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = self.most = self.entered = 0

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.entered += 1
            self.most = max(self.most, self.inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self.inside -= 1


class Crowd:
    """Executions at a limiter. Each runs until it is let go."""

    def __init__(self, limiter: Limiter, tasks: asyncio.TaskGroup) -> None:
        self.gauge = Gauge()
        self.started: list[str] = []
        """Labels, in order."""
        self.inside: set[str] = set()
        self._limiter = limiter
        self._tasks = tasks
        self._ends: dict[str, asyncio.Event] = {}

    def add(self, label: str, tenant: str = "", weight: float = 1.0) -> asyncio.Task[None]:
        self._ends[label] = asyncio.Event()
        return self._tasks.create_task(self._run(label, tenant, weight), name=label)

    def add_many(self, count: int, tenant: str, weight: float = 1.0) -> None:
        for n in range(count):
            self.add(f"{tenant} {n}", tenant, weight)

    def let_go(self, *labels: str) -> None:
        for label in labels or self._ends:
            self._ends[label].set()

    async def has_inside(self, count: int) -> bool:
        return await eventually(lambda: self.gauge.inside == count)

    async def has_started(self, count: int) -> bool:
        return await eventually(lambda: len(self.started) == count)

    async def _run(self, label: str, tenant: str, weight: float) -> None:
        async with self._limiter.permit(tenant, weight=weight, label=label):
            self.started.append(label)
            self.inside.add(label)
            try:
                with self.gauge:
                    await self._ends[label].wait()
            finally:
                self.inside.remove(label)


@contextlib.asynccontextmanager
async def crowd_at(limiter: Limiter) -> AsyncGenerator[Crowd]:
    """All of them are let go at the end, and must then come to theirs."""
    async with asyncio.timeout(3 * _PATIENCE), asyncio.TaskGroup() as tasks:
        crowd = Crowd(limiter, tasks)
        yield crowd
        crowd.let_go()


async def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.001)
    return True


async def statistics_once(limiter: Limiter, holds: Callable[[LimiterStatistics], bool]) -> LimiterStatistics:
    """The first ones of which this holds; the last ones seen if it never does, for the assertions to show."""
    deadline = time.monotonic() + _PATIENCE
    while not holds(found := await limiter.statistics()) and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)
    return found


async def can_be_held(limiter: Limiter) -> int:
    """How many permits can be held at once: neither more nor fewer than the limit, unless some were lost or made up."""
    async with contextlib.AsyncExitStack() as stack:
        for count in range(limiter.limit + 1):
            timeout = _PATIENCE if count < limiter.limit else 0.05
            try:
                await stack.enter_async_context(limiter.permit("counting", timeout=timeout))
            except LimiterTimeoutError:
                return count
    return limiter.limit + 1


async def in_threads(count: int, work: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(count) as threads:
        for done in [loop.run_in_executor(threads, work) for _ in range(count)]:
            await done


class LimiterContract:
    """Inherit, and provide the fixture `make`: a `Make` whose limiters are closed at the end of the test.

    It passes these options on: `adaptive`, `starts_per_second`, `burst` and `max_hold_seconds`.
    """

    pytestmark = pytest.mark.asyncio

    settle_seconds: float = 0.05
    """By then, a change has reached everybody, and what it leads to has happened. More, if it goes by messages."""
    extra_starts: int = 0
    """How many more may start than `starts_per_second` and `burst` say. More, if processes share a rate."""

    # ---------------------------------------------------------------------------------------------------- the limit
    async def test_it_is_a_limiter(self, make: Make) -> None:
        limiter = await make(3)
        assert isinstance(limiter, Limiter)
        assert isinstance(limiter.permit(), Permit)
        assert limiter.limit == 3
        async with limiter.permit() as permit:
            assert isinstance(permit, Permit)

    async def test_as_many_as_the_limit_run_and_no_more(self, make: Make) -> None:
        limiter = await make(3)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(10, "t")
            assert await crowd.has_inside(3)
            await asyncio.sleep(self.settle_seconds)
            assert crowd.gauge.inside == 3
        assert (crowd.gauge.most, crowd.gauge.entered) == (3, 10)

    async def test_never_more_than_the_limit_run_whoever_of_two_thousand_is_cancelled(self, make: Make) -> None:
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

    async def test_idle_capacity_is_never_unused_while_someone_waits(self, make: Make) -> None:
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
    async def test_within_a_tenant_the_first_to_come_is_the_first_to_start(self, make: Make) -> None:
        limiter = await make(1)
        async with crowd_at(limiter) as crowd:
            waiting = {n: crowd.add(str(n), "t") for n in range(60)}
            assert await crowd.has_started(1)
            for n in range(10, 60, 10):
                waiting[n].cancel()
            crowd.let_go()
        assert crowd.started == [str(n) for n in range(60) if n == 0 or n % 10]

    async def test_of_two_tenants_that_wait_one_of_three_times_the_weight_starts_three_times_as_often(
        self, make: Make
    ) -> None:
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
    async def test_weights_count_just_as_well_for_those_who_come_again_and_again(self, make: Make, limit: int) -> None:
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
    async def test_who_comes_one_by_one_starts_as_often_as_who_came_all_at_once(self, make: Make, limit: int) -> None:
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
    async def test_a_small_tenant_is_not_starved_by_a_flood_of_another(self, make: Make, limit: int) -> None:
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

    # --------------------------------------------------------------------------------------- nothing loses a permit
    async def test_cancelling_who_waits_loses_no_permit(self, make: Make) -> None:
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

    @pytest.mark.parametrize("order", ["granted, then cancelled", "cancelled, then granted"])
    async def test_cancelling_in_the_very_tick_of_the_grant_loses_no_permit(self, make: Make, order: str) -> None:
        limiter = await make(1)

        async def wait() -> None:
            async with limiter.permit("waiter"):
                pass

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for _ in range(200):
                async with limiter.permit("holder"):
                    waiter = tasks.create_task(wait())
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    if order == "cancelled, then granted":
                        waiter.cancel()
                waiter.cancel()
                await asyncio.wait([waiter])
        assert await can_be_held(limiter) == 1

    async def test_cancelling_who_runs_gives_the_permit_back(self, make: Make) -> None:
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
        async with limiter.permit():  # and one that works through messages has a permit at hand from here on
            with pytest.raises(LimiterTimeoutError):
                async with limiter.permit(timeout=0):
                    pytest.fail("it got a permit of another")
        async with limiter.permit(timeout=0):
            pass

    async def test_timeouts_in_the_moment_of_the_grant_lose_no_permit(self, make: Make) -> None:
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

    async def test_a_timeout_of_the_callers_own_is_not_the_limiters(self, make: Make) -> None:
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

    async def test_a_lower_limit_interrupts_nobody_and_starts_nobody_until_few_enough_are_left(
        self, make: Make
    ) -> None:
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

    async def test_a_lower_limit_counts_also_for_permits_that_are_free(self, make: Make) -> None:
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

    async def test_a_thread_that_waits_too_long_is_told_so_and_loses_no_permit(self, make: Make) -> None:
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

    @pytest.mark.parametrize("abandoned", [1, 2000])
    async def test_who_waited_in_a_loop_that_was_closed_swallows_no_permit(self, make: Make, abandoned: int) -> None:
        limiter = await make(1)

        async def wait() -> None:
            async with limiter.permit("abandoned"):
                pytest.fail("nobody runs it any more")

        def ignore(loop: asyncio.AbstractEventLoop, complaint: dict[str, Any]) -> None:
            """It says that tasks were destroyed while they were pending, rightly."""

        def abandon() -> None:
            loop = asyncio.new_event_loop()
            loop.set_exception_handler(ignore)
            waiting = [loop.create_task(wait()) for _ in range(abandoned)]
            loop.run_until_complete(asyncio.sleep(0.01))
            assert not any(waiter.done() for waiter in waiting)
            loop.close()

        async with limiter.permit("holder"):
            await in_threads(1, abandon)
        assert await can_be_held(limiter) == 1

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

    async def test_two_of_one_name_and_limit_share_their_permits(self, make: Make) -> None:
        one, two = await make(2, name="shared"), await make(2, name="shared")
        async with one.permit(), two.permit():
            for limiter in (one, two):
                with pytest.raises(LimiterTimeoutError):
                    async with limiter.permit(timeout=0.02):
                        pytest.fail("it got a third one")
        assert await can_be_held(one) == 2
        assert await can_be_held(two) == 2

    async def test_a_second_of_the_same_name_and_another_limit_is_an_error_that_shows_both(self, make: Make) -> None:
        limiter = await make(41, name="shared")
        with pytest.raises(LimitConflictError) as conflict:
            await make(17, name="shared")
        assert isinstance(conflict.value, ConfigError)
        for part in ("shared", "41", "17"):
            assert part in str(conflict.value)
        assert limiter.limit == 41
        await make(41, name="shared")

    async def test_a_second_of_the_same_name_takes_the_limit_as_it_was_resized(self, make: Make) -> None:
        one = await make(1, name="shared")
        await one.resize(3)
        assert await eventually(lambda: one.limit == 3)
        two = await make(3, name="shared")
        assert two.limit == 3
        assert await can_be_held(two) == 3

    # --------------------------------------------------------------------------------------------------- statistics
    async def test_statistics_tell_who_runs_and_who_waits(self, make: Make) -> None:
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
                assert before.seconds + 0.05 <= after.seconds < before.seconds + _PATIENCE
        found = await statistics_once(limiter, lambda found: found.in_flight == 0)
        assert (found.in_flight, found.waiting, found.holders) == (0, 0, ())
        assert (found.tenants["a"].granted, found.tenants["b"].granted) == (3, 2)
        assert found.wait.count == 5

    async def test_statistics_tell_how_long_permits_were_waited_for(self, make: Make) -> None:
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
        assert 0.0 <= wait.p50 <= wait.p90 <= wait.p99 <= wait.max < _PATIENCE
        assert wait.p50 < 0.25
        assert wait.max >= 0.25
        assert wait.p99 >= 0.25 / 1.19

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
        assert await can_be_held(limiter) == 1
        assert (await statistics_once(limiter, lambda found: found.expired > 0)).expired == 1

    async def test_a_body_that_ignores_its_cancellation_loses_its_permit_all_the_same(self, make: Make) -> None:
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
            async with limiter.permit(timeout=_PATIENCE):
                found.append("its permit went on")
                done.set()
        assert found == ["its permit went on", "expired"]
        assert await can_be_held(limiter) == 1
        assert (await statistics_once(limiter, lambda found: found.expired > 0)).expired == 1

    async def test_a_thread_that_holds_too_long_loses_its_permit(self, make: Make) -> None:
        limiter = await make(1, max_hold_seconds=0.2)
        passed_on, entered = threading.Event(), threading.Event()

        def hang() -> None:
            with limiter.permit(label="a hung thread"):
                entered.set()
                assert passed_on.wait(_PATIENCE)

        def hold() -> None:
            with pytest.raises(PermitExpiredError, match="a hung thread"):
                hang()

        async def take() -> None:
            assert await eventually(entered.is_set)
            async with limiter.permit(timeout=_PATIENCE):
                passed_on.set()

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(take())
            await in_threads(1, hold)
        assert await can_be_held(limiter) == 1
        assert (await statistics_once(limiter, lambda found: found.expired > 0)).expired == 1

    async def test_a_body_that_blocks_its_event_loop_loses_its_permit_all_the_same(self, make: Make) -> None:
        limiter = await make(1, max_hold_seconds=0.2)
        passed_on = threading.Event()

        def take() -> None:
            with limiter.permit(timeout=_PATIENCE):
                passed_on.set()

        async def block(thread: ThreadPoolExecutor) -> None:
            async with limiter.permit(label="blocking"):
                thread.submit(take)
                assert passed_on.wait(5)

        with ThreadPoolExecutor(1) as thread, pytest.raises(PermitExpiredError):
            await block(thread)
        assert await can_be_held(limiter) == 1

    async def test_who_leaves_in_time_is_never_bothered(self, make: Make) -> None:
        limiter = await make(2, max_hold_seconds=0.3)
        async with limiter.permit():
            pass
        with limiter.permit():
            pass
        await asyncio.sleep(0.5)
        assert (await limiter.statistics()).expired == 0
        assert await can_be_held(limiter) == 2

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

    async def test_after_a_refusal_nobody_starts_until_few_enough_run(self, make: Make) -> None:
        limiter = await make(16, adaptive=True)
        async with crowd_at(limiter) as crowd:
            crowd.add_many(15, "t")
            assert await crowd.has_inside(15)
            async with limiter.permit() as permit:
                for _ in range(16):
                    permit.refused()
                found = await statistics_once(limiter, lambda found: found.refused == 16)
            assert found.effective_limit <= 15
            await asyncio.sleep(self.settle_seconds)
            crowd.add("late")
            await asyncio.sleep(self.settle_seconds)
            assert "late" not in crowd.started
            crowd.let_go(*[f"t {n}" for n in range(15)])
            assert await crowd.has_started(16)

    async def test_a_service_that_asks_for_a_pause_gets_it(self, make: Make) -> None:
        limiter = await make(4, adaptive=True)
        async with limiter.permit() as permit:
            asked = time.monotonic()
            permit.refused(retry_after=self._pause)
            permit.refused()  # says nothing about pauses, so it does not end one
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

    @property
    def _pause(self) -> float:
        return 0.4 + self.settle_seconds

    async def _nobody_starts_before(self, limiter: Limiter, moment: float) -> None:
        """In a task and in a thread; and then both start by themselves."""
        starts: list[float] = []
        await asyncio.sleep(self.settle_seconds)

        def in_a_thread() -> None:
            with limiter.permit(timeout=_PATIENCE):
                starts.append(time.monotonic())

        async def in_a_task() -> None:
            async with limiter.permit(timeout=_PATIENCE):
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
    async def test_no_more_start_in_any_time_than_the_rate_allows_and_waiters_wake_by_themselves(
        self, make: Make
    ) -> None:
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
    async def test_closing_tells_those_who_wait_and_those_who_come_later_and_lets_the_others_finish(
        self, make: Make
    ) -> None:
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

    async def test_after_all_of_a_name_were_closed_it_can_be_made_anew(self, make: Make) -> None:
        one, two = await make(2, name="shared"), await make(2, name="shared")
        await one.close()
        await two.close()
        assert await can_be_held(await make(2, name="shared")) == 2
