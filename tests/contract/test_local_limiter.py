"""The limiter of one process keeps the contract, and survives what only happens inside one process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from toolyard.limits.local import LocalLimiter
from toolyard.limits.protocol import Limiter
from toolyard.testing import LimiterContract
from toolyard.testing.limiter.contract import Make


class TestLocal(LimiterContract):
    @pytest_asyncio.fixture
    async def make(self) -> AsyncIterator[Make]:
        made: list[Limiter] = []

        async def make(limit: int, *, name: str | None = None, **options: Any) -> Limiter:
            made.append(LocalLimiter(limit, name=name, **options))
            return made[-1]

        yield make
        for limiter in made:
            await limiter.close()


async def test_starting_takes_about_as_long_with_eight_thousand_tenants_as_with_four():
    async def seconds(tenants: int) -> float:
        limiter = LocalLimiter(50)

        async def execution(tenant: str) -> None:
            for _ in range(2):
                async with limiter.permit(tenant):
                    await asyncio.sleep(0)

        began = time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for n in range(8000):
                tasks.create_task(execution(f"t{n % tenants}"))
        return time.process_time() - began

    assert await seconds(8000) < 4 * await seconds(4) + 1.0


def test_collecting_an_abandoned_execution_while_the_limiter_is_at_work_does_not_block_it():
    """Python may collect a task of a closed loop at any allocation, and so within any call of the limiter."""
    program = """
        import asyncio, gc, logging, random
        from toolyard.limits.local import LocalLimiter

        logging.disable(logging.CRITICAL)  # asyncio complains about the tasks, rightly
        limiter = LocalLimiter(1000)

        async def hold():
            async with limiter.permit("abandoned"):
                await asyncio.sleep(100)

        def abandon():
            loop = asyncio.new_event_loop()
            loop.create_task(hold())
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

        for n in range(500):
            gc.disable()
            abandon()
            gc.set_threshold(random.randint(1, 60), 1, 1)
            gc.enable()
            try:
                limiter.statistics().send(None)
            except StopIteration as answer:
                statistics = answer.value
            with limiter.permit("thread", timeout=5):
                pass
        gc.collect()
        print("at work")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.stdout == "at work\n", done.stderr


def test_a_fork_starts_with_all_permits_of_its_own():
    """Permits held at the fork are the parent's: the child would never give them back."""
    program = """
        import os
        from toolyard.limits.local import LocalLimiter

        limiter = LocalLimiter(1, name="shared")
        with limiter.permit():
            child = os.fork()
            if child == 0:
                with LocalLimiter(1, name="shared").permit(timeout=5):
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)
