"""Closing an execution pool, at every stage of its calls; copies of one; and the worker and the bucket around it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from left_behind import nothing_is_left_behind  # noqa: F401 - a fixture
from toolyard.errors import ConfigError, LimiterClosedError, LimiterError
from toolyard.limits.local import LocalLimiter
from toolyard.limits.pool import (
    ExecutionPool,
    ExecutionWorker,
    PoolMode,
    TokenBucketWorker,
    init_execution_pool,
)

both = pytest.mark.parametrize("mode", list(PoolMode), ids=lambda mode: mode.value)
pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Closing --------------------------------------------------------------------------------------------------------------


@both
def test_closing_can_be_done_twice_and_before_anything_ran(mode: PoolMode):
    pool = ExecutionPool(1, mode=mode)
    pool.close()
    pool.close()
    with pytest.raises(LimiterClosedError):
        pool.execute(len, "")
    used = ExecutionPool(1, mode=mode)
    used.execute(len, "").result(20)
    used.close()
    used.close()
    asyncio.run(used.aclose())


@both
def test_calls_that_wait_when_the_pool_closes_get_an_error_and_never_run(mode: PoolMode, tmp_path: Path):
    limiter = LocalLimiter(1)
    pool = ExecutionPool(1, limiter, mode=mode)
    with limiter.permit():
        calls = [pool.execute((tmp_path / "ran").touch) for _ in range(20)]
        wait_until(lambda: limiter._desk.waiting)
        pool.close()
    for call in calls:
        with pytest.raises(LimiterClosedError, match="touch"):
            call.result(20)
    assert not (tmp_path / "ran").exists()
    assert limiter._desk.waiting == limiter._desk.in_use == 0


@both
def test_calls_made_in_the_very_moment_of_closing_end_one_way_or_the_other(mode: PoolMode):
    for _ in range(5):
        pool = ExecutionPool(2, mode=mode)
        pool.execute(len, "").result(20)
        calls = [pool.execute(len, "abc") for _ in range(10)]
        pool.close()
        for call in calls:
            with contextlib.suppress(LimiterClosedError):
                assert call.result(20) == 3


def test_closing_waits_for_threads_that_run():
    started, ended = threading.Event(), threading.Event()
    limiter = LocalLimiter(1)
    pool = ExecutionPool(1, limiter)
    call = pool.execute(lambda: started.set() or time.sleep(0.2) or ended.set())
    assert started.wait(20)
    pool.close()
    assert ended.is_set()
    assert limiter._desk.in_use == 0
    with pytest.raises(LimiterClosedError):
        call.result(20)


def test_closing_kills_processes_that_run(tmp_path: Path):
    limiter = LocalLimiter(1)
    pool = ExecutionPool(1, limiter, mode=PoolMode.ProcessMode)
    call = pool.execute(lambda: (tmp_path / "started").touch() or time.sleep(600))
    wait_until((tmp_path / "started").exists)
    pool.close()
    assert limiter._desk.in_use == 0
    with pytest.raises(LimiterClosedError):
        call.result(20)


async def test_closing_goes_on_when_its_wait_is_cancelled():
    finish = threading.Event()
    pool = ExecutionPool(1)
    call = pool.execute(finish.wait, 20)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pool.aclose()
    with pytest.raises(LimiterClosedError):
        pool.execute(len, "")
    finish.set()
    await pool.aclose()
    assert call.done()


# Copies ---------------------------------------------------------------------------------------------------------------


class Tool:
    def __init__(self) -> None:
        self.execution_pool = init_execution_pool(1, mode=PoolMode.ProcessMode, name="tool")

    async def execute(self, code: str) -> str:
        return await self.execution_pool.execute.remote(self.execute_code, code)

    def execute_code(self, code: str) -> str:
        try:
            self.execution_pool.execute(len, "")
        except LimiterError as error:
            return f"{code}: {error}"
        return "the copy works"


async def test_a_tool_that_holds_its_pool_can_run_its_own_methods_in_a_process():
    tool = Tool()
    async with tool.execution_pool:
        assert "copy from another process" in await tool.execute("1 + 1")


def test_a_pool_that_was_forked_refuses_instead_of_hanging():
    script = """
import os
from toolyard.limits.pool import ExecutionPool
pool = ExecutionPool(1)
assert pool.execute(len, "abc").result(20) == 3
if not (child := os.fork()):
    pool.close()
    try:
        pool.execute(len, "")
    except Exception as error:
        os._exit(7 if "copy from another process" in str(error) else 8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
pool.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


# verl's other names ---------------------------------------------------------------------------------------------------


@both
def test_a_worker_runs_functions_for_many_threads_under_one_limit(mode: PoolMode):
    worker = ExecutionWorker(rate_limit=2, num_workers=2, mode=mode, name=f"worker-{mode}", tenant="job")
    held: list[int] = []
    limiter = LocalLimiter(2, name=f"worker-{mode}")

    def run() -> None:
        with pytest.raises(ZeroDivisionError):
            worker.execute(lambda: time.sleep(0.02) or 1 / 0)
        held.append(limiter._desk.in_use)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    worker.close()
    assert len(held) == 8
    assert limiter._desk.peak <= 2
    assert limiter._desk.in_use == 0
    assert asyncio.run(limiter.statistics()).tenants["job"].granted == 8


@both
def test_a_worker_without_a_limit_works(mode: PoolMode):
    worker = ExecutionWorker(enable_global_rate_limit=False, mode=mode)
    assert worker.execute(lambda **named: named, fn=1) == {"fn": 1}
    worker.close()


def test_a_bucket_counts_what_is_taken_and_given_in_different_threads():
    bucket, same = TokenBucketWorker(2, "bucket"), TokenBucketWorker(2, "bucket")
    for taker in (bucket, same):
        thread = threading.Thread(target=taker.acquire)
        thread.start()
        thread.join(20)
    assert bucket.get_current_count() == same.get_current_count() == 2
    third = threading.Thread(target=bucket.acquire)
    third.start()
    third.join(0.1)
    assert third.is_alive()
    same.release()
    third.join(20)
    assert bucket.get_current_count() == 2
    bucket.release()
    bucket.release()
    assert bucket.get_current_count() == 0


def test_giving_back_what_was_not_taken_is_an_error_and_invents_no_permit():
    bucket = TokenBucketWorker(1, "bucket-of-one")
    with pytest.raises(LimiterError, match=r"without acquire"):
        bucket.release()
    bucket.acquire()
    bucket.release()
    with pytest.raises(LimiterError, match=r"without acquire"):
        bucket.release()
    assert bucket.get_current_count() == 0


def test_a_pool_of_no_workers_is_a_config_error():
    with pytest.raises(ConfigError, match="num_workers=0"):
        init_execution_pool(0, name="no workers")


# Without Ray ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        "init_execution_pool(1, cluster=True)",
        "ExecutionWorker(cluster=True)",
        "TokenBucketWorker(1, cluster=True)",
        "TokenBucketWorker.remote(1)",
    ],
)
def test_a_cluster_without_ray_names_the_command_that_installs_it(made: str):
    script = f"""
import sys
sys.modules["ray"] = None
from toolyard.errors import MissingDependencyError
from toolyard.limits.pool import *
try:
    {made}
except MissingDependencyError as error:
    assert "toolyard[ray]" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_pool_without_ray_does_not_even_import_it():
    script = """
import sys
from toolyard.limits.pool import *
for mode in PoolMode:
    with init_execution_pool(1, mode=mode) as pool:
        assert pool.execute(len, "abc").result(20) == 3
assert "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
