"""The execution pool of one process: what it returns, how much runs at once, and what cancelling and closing leave."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from left_behind import nothing_is_left_behind  # noqa: F401 - a fixture
from toolyard.errors import LimitConflictError, LimiterClosedError, PermitExpiredError
from toolyard.limits.local import LocalLimiter
from toolyard.limits.pool import ExecutionPool, PoolMode, init_execution_pool

both = pytest.mark.parametrize("mode", list(PoolMode), ids=lambda mode: mode.value)
pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def counted(directory: Path, seconds: float) -> Callable[[], int]:
    """A function that counts how many calls of it run at the moment, in threads and processes."""
    (directory / "lock").touch()

    def run() -> int:
        import fcntl
        import time

        def count(change: int) -> int:
            with open(directory / "lock") as lock, open(directory / "count", "a+") as file:
                fcntl.flock(lock, fcntl.LOCK_EX)
                file.seek(0)
                now = int(file.read() or 0) + change
                file.truncate(0)
                file.write(str(now))
                file.flush()
                return now

        now = count(1)
        time.sleep(seconds)
        count(-1)
        return now

    return run


def in_flight(limiter: LocalLimiter) -> int:
    return asyncio.run(limiter.statistics()).in_flight


def warm_up(pool: ExecutionPool) -> None:
    """Start its processes, so that none of them comes too late to take part."""
    for call in [pool.execute(time.sleep, 0.1) for _ in range(8)]:
        call.result(20)


def wait_for(path: Path) -> None:
    """In a worker: be busy until stopped."""
    while not path.exists():
        time.sleep(0.005)


async def until(condition: Callable[[], object]) -> None:
    await asyncio.sleep(0)  # the pool has its own thread: it may be there before a task of ours took its first step
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nothing would set an event
            await asyncio.sleep(0.005)


# What comes back ------------------------------------------------------------------------------------------------------


@both
async def test_all_forms_of_a_call_give_what_the_function_returned(mode: PoolMode):
    offset = 40
    async with init_execution_pool(2, mode=mode, name=f"forms-{mode}") as pool:
        assert await pool.execute.remote(lambda a, b: a + b + offset, 1, b=1) == 42
        assert await pool.execute(lambda **named: named, fn=1, self=2) == {"fn": 1, "self": 2}
        assert await asyncio.to_thread(pool.execute(divmod, 7, 4).result, 20) == (1, 3)


@both
async def test_a_ping_needs_neither_a_worker_nor_a_permit(mode: PoolMode):
    async with init_execution_pool(1, mode=mode, rate_limit=1, name=f"ping-{mode}") as pool:
        busy = pool.execute.remote(time.sleep, 0.5)
        assert await pool.ping.remote() is True
        assert not busy.done()
        await busy
    with pytest.raises(LimiterClosedError):
        pool.ping.remote()


@both
def test_a_call_can_be_awaited_in_another_loop_than_it_was_made_in(mode: PoolMode):
    async def make():
        return pool.execute(lambda: time.sleep(0.05) or "late")

    async def wait(call):
        return await call

    with ExecutionPool(1, mode=mode) as pool:
        call = asyncio.run(make())
        assert asyncio.run(wait(call)) == "late"
        assert asyncio.run(wait(call)) == "late"


@both
async def test_an_exception_reaches_the_caller_with_its_type_and_its_traceback(mode: PoolMode):
    class OwnError(Exception):
        pass

    def deep_inside():
        raise OwnError("the reason", 7)

    async with ExecutionPool(1, mode=mode) as pool:
        with pytest.raises(OwnError) as caught:
            await pool.execute(deep_inside)
    assert caught.value.args == ("the reason", 7)
    assert "in deep_inside" in "".join(traceback.format_exception(caught.value))


@both
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()], ids=repr
)
def test_what_would_end_a_program_ends_only_the_call(mode: PoolMode, error: BaseException):
    def leave():
        raise error

    limiter = LocalLimiter(1)
    with ExecutionPool(1, limiter, mode=mode) as pool:
        with pytest.raises(type(error)):
            pool.execute(leave).result(20)
        assert pool.execute(len, "abc").result(20) == 3
        assert in_flight(limiter) == 0


@both
async def test_stop_iteration_is_an_error_like_any_other(mode: PoolMode):
    async with ExecutionPool(1, mode=mode) as pool:
        with pytest.raises(StopIteration):
            pool.execute(next, iter(())).result(20)
        with pytest.raises(RuntimeError):  # a coroutine cannot raise it
            await pool.execute(next, iter(()))


# How much runs at once ------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("num_workers", "rate_limit", "expected"), [(3, 10, 3), (4, 2, 2)])
def test_workers_and_permits_both_bound_what_runs_at_once(mode, num_workers, rate_limit, expected, tmp_path: Path):
    run = counted(tmp_path, 0.03)
    with ExecutionPool(num_workers, LocalLimiter(rate_limit), mode=mode) as pool:
        warm_up(pool)
        calls = [pool.execute(run) for _ in range(40)]
        assert max(call.result(60) for call in calls) == expected


@both
def test_pools_of_one_name_share_one_limit(mode: PoolMode, tmp_path: Path):
    run = counted(tmp_path, 0.03)
    with (
        init_execution_pool(2, rate_limit=3, mode=mode, name=f"shared-{mode}") as one,
        init_execution_pool(2, rate_limit=3, mode=mode, name=f"shared-{mode}") as other,
    ):
        warm_up(one)
        warm_up(other)
        calls = [pool.execute(run) for _ in range(15) for pool in (one, other)]
        assert max(call.result(60) for call in calls) == 3


def test_another_limit_for_a_name_that_exists_is_an_error_when_the_pool_is_made():
    with init_execution_pool(1, rate_limit=3, name="taken"), pytest.raises(LimitConflictError, match="taken"):
        init_execution_pool(1, rate_limit=4, name="taken")


def test_without_a_limiter_only_the_workers_count():
    barrier = threading.Barrier(12)
    with init_execution_pool(12, enable_global_rate_limit=False) as pool:
        for call in [pool.execute(barrier.wait, 20) for _ in range(12)]:
            call.result(20)


@both
async def test_a_thousand_calls_at_once_on_four_workers_all_run_once(mode: PoolMode):
    async with ExecutionPool(4, LocalLimiter(3), mode=mode) as pool:
        calls = [pool.execute(lambda number: (number, os.getpid()), number) for number in range(1000)]
        results = [await call for call in calls]
    assert [number for number, _ in results] == list(range(1000))
    assert len({pid for _, pid in results}) <= 4


def test_waiting_calls_start_in_the_order_they_were_made():
    order: list[int] = []
    with ExecutionPool(1, LocalLimiter(1)) as pool:
        for call in [pool.execute(order.append, number) for number in range(50)]:
            call.result(20)
    assert order == list(range(50))


# Cancelling -----------------------------------------------------------------------------------------------------------


@both
async def test_a_call_that_is_cancelled_while_it_waits_for_a_worker_never_runs(mode: PoolMode, tmp_path: Path):
    async with ExecutionPool(1, mode=mode) as pool:
        running = pool.execute(wait_for, tmp_path / "go on")
        waiting = asyncio.ensure_future(pool.execute((tmp_path / "ran").touch))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        never_begun = pool.execute((tmp_path / "ran").touch)
        assert never_begun.cancel()
        (tmp_path / "go on").touch()
        await running
        await pool.execute(len, "")
    assert not (tmp_path / "ran").exists()


@both
async def test_a_call_that_is_cancelled_while_it_waits_for_its_permit_never_runs(mode: PoolMode, tmp_path: Path):
    limiter = LocalLimiter(1)
    async with ExecutionPool(1, limiter, mode=mode) as pool:
        async with limiter.permit():
            waiting = asyncio.ensure_future(pool.execute((tmp_path / "ran").touch))
            await until(lambda: limiter._desk.waiting == 1)
            waiting.cancel()
            await until(lambda: limiter._desk.waiting == 0)
        assert await pool.execute(len, "abc") == 3
    assert not (tmp_path / "ran").exists()


@both
def test_a_call_that_is_cancelled_in_the_very_moment_it_gets_its_worker_never_runs(mode: PoolMode, tmp_path: Path):
    with ExecutionPool(1, mode=mode) as pool:
        running = pool.execute(wait_for, tmp_path / "go on")
        waiting = pool.execute((tmp_path / "ran").touch)
        # Called in the pool's own thread, between assigning the worker and starting the call that got it.
        running._future.add_done_callback(lambda _: waiting.cancel())
        (tmp_path / "go on").touch()
        running.result(20)
        assert pool.execute(len, "abc").result(20) == 3
    assert not (tmp_path / "ran").exists()


async def test_a_thread_that_runs_keeps_its_worker_and_its_permit_until_it_ends():
    limiter = LocalLimiter(1)
    started, finish = threading.Event(), threading.Event()
    async with ExecutionPool(1, limiter) as pool:
        running = asyncio.ensure_future(pool.execute(lambda: started.set() or finish.wait(20)))
        await until(started.is_set)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        following = pool.execute(len, "abc")
        await asyncio.sleep(0.1)
        assert not following.done()
        assert (await limiter.statistics()).in_flight == 1
        finish.set()
        assert await following == 3


def test_what_has_ended_cannot_be_cancelled_and_what_was_cancelled_says_so():
    with ExecutionPool(1) as pool:
        ended = pool.execute(len, "abc")
        assert ended.result(20) == 3
        assert not ended.cancel()
        assert ended.done()
        blocked = threading.Event()
        running = pool.execute(blocked.wait, 20)
        waiting = pool.execute(len, "abc")
        assert waiting.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.result(20)
        with pytest.raises(TimeoutError):
            running.result(0.01)
        blocked.set()
        assert running.result(20)


@both
async def test_a_function_that_outlives_its_permit_is_told(mode: PoolMode):
    async with ExecutionPool(1, LocalLimiter(1, max_hold_seconds=1.0), mode=mode) as pool:
        with pytest.raises(PermitExpiredError):
            await pool.execute(time.sleep, 2.0)
        assert await pool.execute(len, "abc") == 3
