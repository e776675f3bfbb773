"""Child processes of an execution pool: they may crash, print, be killed or lose their parent without affecting
others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from left_behind import alive, children, nothing_is_left_behind  # noqa: F401 - a fixture
from toolyard.errors import ExecutionWorkerDiedError
from toolyard.limits.local import LocalLimiter
from toolyard.limits.pool import ExecutionPool, PoolMode
from toolyard.limits.pool.process import OutcomeLostError

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def processes(num_workers: int, limiter: LocalLimiter | None = None) -> ExecutionPool:
    return ExecutionPool(num_workers, limiter, mode=PoolMode.ProcessMode)


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def hang(file: Path) -> Callable[[], None]:
    """A function that reports its process and its children, and then never ends."""

    def run() -> None:
        grandchild = subprocess.Popen(["sleep", "600"])
        file.with_suffix(".part").write_text(f"{os.getpid()} {grandchild.pid}")
        file.with_suffix(".part").rename(file)
        time.sleep(600)

    return run


def hung(file: Path) -> list[int]:
    wait_until(file.exists)
    return [int(pid) for pid in file.read_text().split()]


# Outcomes -------------------------------------------------------------------------------------------------------------


class TwoArgumentsError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


@pytest.mark.parametrize("make", [lambda: TwoArgumentsError(1, 2), LockedError])
def test_an_exception_that_cannot_be_pickled_is_replaced_by_one_that_tells_all(make: Callable[[], Exception]):
    def fail() -> None:
        raise make()

    with processes(1) as pool:
        with pytest.raises(OutcomeLostError, match=type(make()).__name__) as caught:
            pool.execute(fail).result(20)
        assert "in fail" in caught.value.__notes__[0]
        assert pool.execute(len, "abc").result(20) == 3


def test_a_result_that_cannot_be_pickled_is_an_error():
    with processes(1) as pool:
        with pytest.raises(OutcomeLostError, match=r"_thread\.lock"):
            pool.execute(threading.Lock).result(20)
        assert pool.execute(len, "abc").result(20) == 3


def test_a_result_that_cannot_be_unpickled_is_an_error():
    def fragile() -> object:
        class Fragile:
            def __reduce__(self):
                return int, ("not a number",)

        return Fragile()

    with processes(1) as pool:
        with pytest.raises(OutcomeLostError, match="not a number"):
            pool.execute(fragile).result(20)
        assert pool.execute(len, "abc").result(20) == 3


def test_an_argument_that_cannot_be_pickled_is_an_error_of_the_call_itself():
    with processes(1) as pool, pytest.raises(TypeError, match="pickle"):
        pool.execute(print, threading.Lock())


def test_arguments_and_results_of_tens_of_megabytes_come_through():
    data = os.urandom(40 << 20)
    with processes(1) as pool:
        assert pool.execute(lambda data: data[::-1], data).result(60) == data[::-1]


def test_what_functions_print_comes_out_and_does_not_disturb(capfd: pytest.CaptureFixture[str]):
    def chatter() -> str:
        print("to stdout")
        os.write(1, b"raw\n" * 1000)
        os.write(2, b"to stderr\n")
        assert sys.stdin.read() == ""
        return "done"

    with processes(1) as pool:
        assert pool.execute(chatter).result(20) == "done"
        printed = capfd.readouterr()
        pool.execute(lambda: sys.stdout.close()).result(20)
        assert pool.execute(len, "abc").result(20) == 3
    assert "to stdout" in printed.out
    assert printed.out.count("raw") == 1000
    assert "to stderr" in printed.err


# Death of a child -----------------------------------------------------------------------------------------------------


def test_a_killed_process_fails_one_call_and_is_replaced(tmp_path: Path):
    limiter = LocalLimiter(2)
    with processes(2, limiter) as pool:
        victim = pool.execute(hang(tmp_path / "pids"))
        child, grandchild = hung(tmp_path / "pids")
        others = [pool.execute(lambda: time.sleep(0.01) or os.getpid()) for _ in range(20)]
        os.kill(child, signal.SIGKILL)
        with pytest.raises(ExecutionWorkerDiedError, match="signal 9") as caught:
            victim.result(20)
        assert caught.value.retryable
        assert child not in {call.result(20) for call in others}
        wait_until(lambda: not alive(grandchild))
        wait_until(lambda: limiter._desk.in_use == 0)
        together = [pool.execute(lambda: time.sleep(0.1) or os.getpid()) for _ in range(2)]
        assert len({call.result(20) for call in together}) == 2


def test_a_function_that_exits_the_process_fails_its_own_call_only():
    with processes(1) as pool:
        for _ in range(3):
            with pytest.raises(ExecutionWorkerDiedError, match="exit status 5"):
                pool.execute(os._exit, 5).result(20)
        assert pool.execute(len, "abc").result(20) == 3


def test_a_process_that_is_killed_while_idle_fails_no_call():
    with processes(1) as pool:
        for _ in range(10):
            os.kill(pool.execute(os.getpid).result(20), signal.SIGKILL)
            assert pool.execute(len, "abc").result(20) == 3


def test_a_process_that_dies_is_noticed_though_a_fork_of_it_holds_its_channel():
    def fork_and_die() -> None:
        if not os.fork():
            os.setsid()  # out of reach
            time.sleep(4)
            os._exit(0)
        time.sleep(0.3)
        os._exit(6)

    with processes(1) as pool:
        pool.execute(len, "").result(20)
        start = time.monotonic()
        with pytest.raises(ExecutionWorkerDiedError, match="exit status 6"):
            pool.execute(fork_and_die).result(20)
        assert time.monotonic() - start < 3


def test_a_process_that_cannot_be_started_is_an_error_and_takes_no_permit(monkeypatch: pytest.MonkeyPatch):
    limiter = LocalLimiter(1)
    with processes(1, limiter) as pool:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(ExecutionWorkerDiedError, match="cannot start"):
            pool.execute(len, "abc").result(20)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ExecutionWorkerDiedError, match="did not start: exit status 1"):
            pool.execute(len, "abc").result(20)
        assert not limiter._desk.granted
        monkeypatch.undo()
        assert pool.execute(len, "abc").result(20) == 3


async def test_cancelling_kills_what_runs_with_all_it_started_and_frees_its_permit(tmp_path: Path):
    limiter = LocalLimiter(1)
    async with processes(1, limiter) as pool:
        running = asyncio.ensure_future(pool.execute(hang(tmp_path / "pids")))
        child, grandchild = await asyncio.to_thread(hung, tmp_path / "pids")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await pool.execute(os.getpid) != child
        assert not alive(child)
        await asyncio.to_thread(wait_until, lambda: not alive(grandchild))


def test_processes_are_started_when_needed_and_used_again():
    before = children()
    with processes(4) as pool:
        assert children() == before
        assert len({pool.execute(os.getpid).result(20) for _ in range(20)}) == 1


# Death of the parent --------------------------------------------------------------------------------------------------

PARENT = """
import os, re, subprocess, sys, time
from toolyard.limits.pool import PoolMode, init_execution_pool

class Answer:
    pass

def busy(directory, hold_the_lock):
    grandchild = subprocess.Popen(["sleep", "600"])
    with open(f"{directory}/{os.getpid()}.part", "w") as file:
        file.write(f"{os.getpid()} {grandchild.pid}")
    os.rename(file.name, file.name.removesuffix(".part"))
    re.match("(a*)*b", "a" * 60) if hold_the_lock else time.sleep(600)

directory, case = sys.argv[-2:]
pool = init_execution_pool(3, mode=PoolMode.ProcessMode)
assert type(pool.execute(Answer).result(20)) is Answer
calls = [pool.execute(busy, directory, case == "locked") for number in range(2)]
while len([name for name in os.listdir(directory) if name.isdigit()]) < 2: time.sleep(0.01)

if case == "forked" and not os.fork(): time.sleep(30)

open(f"{directory}/ready", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "case", "within"),
    [
        (["-"], "asleep", 1.0),
        (["-"], "locked", 1.0),  # in C code that never lets another thread run
        (["-i", "-q", "-"], "asleep", 1.0),  # a REPL
        (["-W", "ignore", "-"], "forked", 4.0),  # a data loader, say, which holds all the parent's files open
    ],
    ids=["asleep", "locked", "repl", "forked"],
)
def test_when_the_parent_is_killed_its_processes_die_in_the_middle_of_their_functions(how, case, within, tmp_path):
    """From a main program that is read from stdin, whose functions and classes no child could import."""
    parent = subprocess.Popen([sys.executable, *how, tmp_path, case], stdin=subprocess.PIPE, start_new_session=True)
    pids: list[int] = []
    try:
        parent.stdin.write(PARENT.encode())
        parent.stdin.flush()
        if "-i" not in how:
            parent.stdin.close()
        wait_until((tmp_path / "ready").exists)
        pids = [int(pid) for file in tmp_path.glob("*[0-9]") for pid in file.read_text().split()]
        assert len(pids) == 4
        assert all(alive(pid) for pid in pids)
        os.kill(parent.pid, signal.SIGKILL)  # and it alone, not its group
        wait_until(lambda: not any(alive(pid) for pid in pids), within)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        parent.wait()
        parent.stdin.close()
