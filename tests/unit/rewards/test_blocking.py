"""Async work for callers that cannot await: from anywhere, without deadlocks, and gone at the end of the process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from toolyard.errors import RewardError
from toolyard.rewards import blocking


async def where() -> tuple[int, int]:
    await asyncio.sleep(0)
    return os.getpid(), threading.get_ident()


def test_work_runs_in_one_other_thread_whoever_asks() -> None:
    with ThreadPoolExecutor(8) as threads:
        found = {blocking.run(where()), *threads.map(lambda _: blocking.run(where()), range(50))}
    assert len(found) == 1
    assert found != {(os.getpid(), threading.get_ident())}


async def test_it_may_be_called_in_the_thread_of_a_running_event_loop() -> None:
    assert blocking.run(where())[0] == os.getpid()


def test_what_the_work_raises_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        blocking.run(fail())


def test_called_in_its_own_loop_it_says_so_instead_of_waiting_for_ever() -> None:
    async def nested() -> None:
        blocking.run(where())

    with pytest.raises(RewardError, match=r"asyncio\.to_thread"):
        blocking.run(nested())


def test_a_thousand_at_once_share_the_loop() -> None:
    async def work(number: int) -> int:
        await asyncio.sleep(0.01)
        return number

    with ThreadPoolExecutor(1000) as threads:
        assert list(threads.map(lambda number: blocking.run(work(number)), range(1000))) == list(range(1000))


class Kept:
    def __init__(self) -> None:
        self.opened: list[str] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        await asyncio.sleep(0.01)
        self.opened.append("it")
        yield f"number {len(self.opened)}"


def test_what_is_kept_is_opened_once_for_all_who_ask_at_the_same_time() -> None:
    kept = Kept()

    async def ask() -> str:
        return await blocking.kept(kept, kept.open)

    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(lambda _: blocking.run(ask()), range(64))) == {"number 1"}
    assert kept.opened == ["it"]


def test_one_that_cannot_be_opened_is_tried_again_by_the_next() -> None:
    tries: list[int] = []

    @asynccontextmanager
    async def open_late() -> AsyncIterator[str]:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        yield "there"

    async def ask() -> str:
        return await blocking.kept(open_late, open_late)

    with pytest.raises(OSError, match="not yet"):
        blocking.run(ask())
    assert blocking.run(ask()) == "there"


def test_who_is_cancelled_while_it_opens_does_not_take_it_from_the_others() -> None:
    kept = Kept()

    async def ask() -> str:
        return await blocking.kept(kept, kept.open)

    async def two() -> str:
        async with asyncio.TaskGroup() as group:
            impatient = group.create_task(ask())
            patient = group.create_task(ask())
            await asyncio.sleep(0)
            impatient.cancel()
        return await patient

    assert blocking.run(two()) == "number 1"


async def test_nothing_is_kept_outside_of_the_work() -> None:
    kept = Kept()
    with pytest.raises(RewardError, match="can only be called in work run by"):
        await blocking.kept(kept, kept.open)


def _ask_in_fork(_: int) -> tuple[int, int]:
    return blocking.run(where())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_has_a_loop_of_its_own() -> None:
    ours, _ = blocking.run(where())
    with multiprocessing.get_context("fork").Pool(2) as pool:
        theirs = {pid for pid, _ in pool.map(_ask_in_fork, range(8), chunksize=1)}
    assert theirs
    assert ours not in theirs
    assert blocking.run(where())[0] == ours


SCRIPT = """
    import asyncio, contextlib, multiprocessing, os, sys, threading, time
    from toolyard.rewards import blocking

    @contextlib.asynccontextmanager
    async def resident():
        task = asyncio.current_task()
        yield
        assert asyncio.current_task() is task
        await asyncio.sleep(0.05)
        print("closed by", "child" if multiprocessing.parent_process() else "parent", flush=True)

    opened = threading.Event()

    async def work(seconds=0):
        await blocking.kept("it", resident)
        opened.set()
        await asyncio.sleep(seconds)

    def main():
        blocking.run(work())
"""


def script(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(body))
    return subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("main()", ["parent"]),
        ("main(); sys.exit(3)", ["parent"]),
        ("main(); raise RuntimeError('of the caller')", ["parent"]),
        ("threading.Thread(target=blocking.run, args=[work(60)], daemon=True).start(); opened.wait(30)", ["parent"]),
        (
            """
            main()
            child = multiprocessing.get_context("fork").Process(target=main)
            child.start(); child.join()
            """,
            ["child", "parent"],
        ),
        (
            """
            if __name__ == "__main__":
                child = multiprocessing.get_context("spawn").Process(target=main)
                child.start(); child.join()
            """,
            ["child"],
        ),
        (
            """
            main()
            if os.fork() == 0:
                sys.exit(0)   # has touched nothing, and closes nothing
            os.wait()
            """,
            ["parent"],
        ),
    ],
)
def test_what_is_kept_is_closed_at_the_end_of_the_process_that_opened_it(
    tmp_path: Path, body: str, said: list[str]
) -> None:
    done = script(tmp_path, body)
    assert done.stdout.splitlines() == [f"closed by {who}" for who in said], done.stderr
    assert "never awaited" not in done.stderr


def test_an_interrupt_cancels_the_work(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
        cancelled = threading.Event()
        async def wait():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                print("cancelled", flush=True)
                cancelled.set()
                raise

        try:
            blocking.run(wait())
        except KeyboardInterrupt:
            cancelled.wait(30)
            print("interrupted")
        """,
    )
    assert done.stdout.splitlines() == ["cancelled", "interrupted"], done.stderr
