"""The execution pool in a Ray job: an actor under the cluster's limit that survives whatever its functions do."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from left_behind import alive
from patience import patient
from toolyard.errors import ConfigError, ExecutionWorkerDiedError, LimitConflictError, LimiterError
from toolyard.limits.pool import (
    ExecutionPool,
    ExecutionWorker,
    PoolMode,
    TokenBucketWorker,
    init_execution_pool,
)
from toolyard.limits.pool.process import OutcomeLostError

both = pytest.mark.parametrize("mode", list(PoolMode), ids=lambda mode: mode.value)
pytestmark = [
    pytest.mark.usefixtures("ray_connection"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own processes and files
]


@pytest.fixture
def name() -> str:
    return f"pool-{uuid.uuid4().hex[:6]}"


@pytest.fixture(scope="module")
def shared(ray_connection: str) -> dict[PoolMode, Any]:
    """Pools that no test breaks, of one limit."""
    return {mode: init_execution_pool(1, rate_limit=2, mode=mode, name="shared") for mode in PoolMode}


def get(reference, seconds: float = 30):
    return ray.get(reference, timeout=patient(seconds))


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + patient(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def hang(file: Path) -> Callable[[], None]:
    def run() -> None:
        file.with_suffix(".part").write_text(str(os.getpid()))
        file.with_suffix(".part").rename(file)
        time.sleep(600)

    return run


def hung(file: Path) -> int:
    wait_until(file.exists)
    return int(file.read_text())


def counted(directory: Path) -> Callable[[], int]:
    """A function that knows how many of its kind run at this moment, in whichever process."""
    (directory / "lock").touch()

    def run() -> int:
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
        time.sleep(0.05)
        count(-1)
        return now

    return run


@both
async def test_the_pool_is_an_actor_and_both_forms_of_a_call_work(mode: PoolMode, shared: dict[PoolMode, Any]):
    pool = shared[mode]
    assert isinstance(pool, ray.actor.ActorHandle)
    assert await pool.execute.remote(lambda a, b: a + b, 40, b=2) == 42
    assert get(pool.execute.remote(lambda **named: named, fn=1)) == {"fn": 1}
    assert get(pool.execute.remote(os.getpid)) != os.getpid()


@both
def test_a_pool_answers_a_ping(mode: PoolMode, shared: dict[PoolMode, Any]):
    assert get(shared[mode].ping.remote()) is True


@both
def test_what_a_function_raises_reaches_the_caller_and_the_actor_lives_on(mode: PoolMode, shared: dict[PoolMode, Any]):
    def deep_inside() -> None:
        raise KeyError("the reason")

    pool = shared[mode]
    with pytest.raises(KeyError, match="the reason") as caught:
        get(pool.execute.remote(deep_inside))
    assert "in deep_inside" in str(caught.value)
    pid = get(pool.execute.remote(os.getpid))
    for error in (SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(OutcomeLostError, match=type(error).__name__):
            get(pool.execute.remote(exec, "raise error", {"error": error}))
    assert get(pool.execute.remote(os.getpid)) == pid


@pytest.mark.slow
def test_workers_bound_what_runs_in_a_pool_and_the_limit_what_runs_in_all(name: str, tmp_path: Path):
    run = counted(tmp_path)
    pools = [init_execution_pool(2, rate_limit=3, mode=mode, name=name) for mode in PoolMode]
    for pool in pools:
        get([pool.execute.remote(time.sleep, 0.3) for _ in range(4)])
    assert max(get([pools[0].execute.remote(run) for _ in range(10)])) == 2
    assert max(get([pool.execute.remote(run) for _ in range(20) for pool in pools])) == 3


def test_another_limit_for_a_name_that_exists_is_an_error_when_the_pool_is_made(shared: dict[PoolMode, Any]):
    assert get(shared[PoolMode.ThreadMode].execute.remote(len, "abc")) == 3
    with pytest.raises(LimitConflictError, match="shared"):
        init_execution_pool(1, rate_limit=3, name="shared")


@pytest.mark.slow
def test_a_pool_without_a_limit_works(name: str):
    pool = init_execution_pool(1, enable_global_rate_limit=False, name=name)
    assert get(pool.execute.remote(len, "abc")) == 3


@pytest.mark.slow
def test_a_killed_process_fails_one_call_and_gives_its_permit_back(name: str, tmp_path: Path):
    pool = init_execution_pool(1, rate_limit=1, mode=PoolMode.ProcessMode, name=name)
    victim = pool.execute.remote(hang(tmp_path / "pid"))
    os.kill(hung(tmp_path / "pid"), signal.SIGKILL)
    with pytest.raises(ExecutionWorkerDiedError):
        get(victim)
    assert get(pool.execute.remote(len, "abc")) == 3


@pytest.mark.slow
def test_when_the_actor_is_killed_its_processes_die_and_its_permits_come_back(name: str, tmp_path: Path):
    pool = init_execution_pool(1, rate_limit=1, mode=PoolMode.ProcessMode, name=name)
    other = init_execution_pool(1, rate_limit=1, name=name)
    pool.execute.remote(hang(tmp_path / "pid"))
    child = hung(tmp_path / "pid")
    following = other.execute.remote(len, "abc")
    assert ray.wait([following], timeout=0.5)[0] == []
    ray.kill(pool)
    wait_until(lambda: not alive(child))
    assert get(following) == 3


@pytest.mark.exhaustive
def test_a_function_that_exits_the_actor_itself_fails_its_call_and_ray_starts_the_actor_again(name: str):
    pool = init_execution_pool(1, rate_limit=1, name=name)
    before = get(pool.execute.remote(os.getpid))
    with pytest.raises(ray.exceptions.RayActorError):
        get(pool.execute.remote(os._exit, 1))

    def works_again() -> bool:
        try:
            return get(pool.execute.remote(os.getpid)) != before
        except ray.exceptions.RayActorError:
            return False

    wait_until(works_again)


@pytest.mark.exhaustive
def test_a_pool_ends_with_the_process_that_made_it(name: str, tmp_path: Path):
    @ray.remote(num_cpus=0)
    class Job:
        def __init__(self, function: Callable[[], None]) -> None:
            self.pool = init_execution_pool(1, rate_limit=1, mode=PoolMode.ProcessMode, name=name)
            self.running = self.pool.execute.remote(function)

    job = Job.remote(hang(tmp_path / "pid"))
    child = hung(tmp_path / "pid")
    ray.kill(job)
    wait_until(lambda: not alive(child))


@pytest.mark.exhaustive
def test_worker_and_bucket_share_the_clusters_limit_unless_told_otherwise(name: str):
    bucket = TokenBucketWorker(1, name)
    bucket.acquire()
    pool = init_execution_pool(1, rate_limit=1, name=name)
    following = pool.execute.remote(len, "abc")
    assert ray.wait([following], timeout=0.5)[0] == []
    assert bucket.get_current_count() == 1
    assert ExecutionWorker(rate_limit=1, name=name, cluster=False).execute(len, "abc") == 3
    with init_execution_pool(1, rate_limit=1, name=name, cluster=False) as here:
        assert isinstance(here, ExecutionPool)
        assert here.execute(len, "abc").result(20) == 3
    bucket.release()
    assert get(following) == 3
    worker = ExecutionWorker(rate_limit=1, name=name)
    assert worker.execute(os.getpid) == os.getpid()


@pytest.mark.exhaustive
async def test_a_tool_that_holds_its_pool_can_run_its_own_methods_there(name: str):
    class Tool:
        def __init__(self) -> None:
            self.execution_pool = init_execution_pool(2, rate_limit=2, mode=PoolMode.ProcessMode, name=name)

        async def execute(self, code: str) -> str:
            return await self.execution_pool.execute.remote(self.execute_code, code)

        def execute_code(self, code: str) -> str:
            with pytest.raises(LimiterError, match="not connected to Ray"):
                self.execution_pool.execute.remote(len, "abc")
            return code.upper()

    tool = Tool()
    assert await asyncio.gather(*(tool.execute(code) for code in "abc")) == ["A", "B", "C"]


def test_a_cluster_is_not_started_behind_the_callers_back():
    script = """
import ray
from toolyard.errors import ConfigError
from toolyard.limits.pool import *
with init_execution_pool(1) as pool:
    assert pool.execute(len, "abc").result(20) == 3
for limited in (True, False):
    try:
        init_execution_pool(1, limited, cluster=True)
    except ConfigError as error:
        assert "ray.init()" in str(error)
    else:
        raise SystemExit("no error")
assert not ray.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# The bucket as an actor -----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_buckets_and_pools_of_one_name_share_one_limit(name: str):
    pool = init_execution_pool(4, rate_limit=2, name=name)
    assert get(pool.ping.remote()) is True
    bucket = TokenBucketWorker.options(name=name, get_if_exists=True).remote(2)
    same = TokenBucketWorker.options(name=name, get_if_exists=True).remote()
    get(bucket.acquire.remote())
    get(same.acquire.remote())
    assert get(bucket.get_current_count.remote()) == 2
    third, waiting = bucket.acquire.remote(), pool.execute.remote(lambda: 42)
    assert ray.wait([third, waiting], num_returns=1, timeout=1)[0] == []
    get([same.release.remote(), bucket.release.remote()])
    get(third)
    assert get(waiting) == 42
    get(bucket.release.remote())
    wait_until(lambda: get(bucket.get_current_count.remote()) == 0)


@pytest.mark.slow
def test_a_bucket_with_another_limit_is_an_error_where_it_is_made(name: str):
    TokenBucketWorker.options(name=name, get_if_exists=True).remote(2)
    with pytest.raises(LimitConflictError):
        TokenBucketWorker.options(name=name, get_if_exists=True).remote(3)


def test_a_bucket_without_a_limit_needs_one_that_exists(name: str):
    with pytest.raises(ConfigError, match="pass a limit to create it"):
        TokenBucketWorker.options(name=name, get_if_exists=True).remote()


@pytest.mark.exhaustive
async def test_after_a_function_that_raised_nothing_is_held(name: str):
    def odd(number: int) -> int:
        if number == 5:
            raise ValueError("five")
        return number

    pool = init_execution_pool(10, rate_limit=3, name=name)
    results = await asyncio.gather(*[pool.execute.remote(odd, number) for number in range(10)], return_exceptions=True)
    assert [one for one in results if isinstance(one, int)] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert isinstance(results[5], ValueError)
    assert get(TokenBucketWorker.options(name=name, get_if_exists=True).remote().get_current_count.remote()) == 0
