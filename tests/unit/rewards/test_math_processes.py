"""Checker processes really stop: at the deadline, at the memory limit, with their parent. And they serve every
caller."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from left_behind import alive
from patience import patient
from toolyard.errors import RewardError
from toolyard.rewards.math import scorer as math
from toolyard.rewards.math.scorer import MathChecker
from toolyard.rewards.protocol import GroundTruthError

HANGS = r"\boxed{10^{10^{10}}}"
HALF, TRUTH = r"\boxed{\frac{2}{4}}", "0.5"
DEADLINE = 0.4


@pytest.fixture(scope="module")
def checker():
    with MathChecker(children=1) as checker:
        yield checker


def only_child(checker: MathChecker) -> int:
    checker.check(HALF, TRUTH)
    (pid,) = checker.pids()
    return pid


@pytest.mark.slow
def test_a_large_parent_does_not_wear_its_children_out():
    """What a process held before it became another program still counts in `ru_maxrss`."""
    program = """
        from toolyard.rewards.math import MathChecker

        held = bytearray(700 << 20)
        held[::4096] = bytes(len(held[::4096]))
        with MathChecker(children=1) as checker:
            checker.check(r"\\boxed{\\frac{2}{4}}", "0.5")
            first = checker.pids()
            checker.check(r"\\boxed{\\frac{2}{4}}", "0.5")
            assert first and checker.pids() == first, (first, checker.pids())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


def until(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def processor_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=60
    )


# Deadlines ------------------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_is_killed_at_the_deadline_and_the_next_one_works(checker):
    pid = only_child(checker)
    with ThreadPoolExecutor(1) as threads:
        start = time.monotonic()
        hanging = threads.submit(checker.check, HANGS, TRUTH, deadline_seconds=DEADLINE)
        until(lambda: not alive(pid))
        assert DEADLINE <= time.monotonic() - start < 4 * DEADLINE + 1  # near it, or later on a busy machine
        found = hanging.result(60)
    assert (found.value, found.timed_out, found.extracted) == (0.0, True, "10^{10^{10}}")
    assert checker.check(HALF, TRUTH).value == 1.0


@pytest.mark.slow
def test_deep_nesting_ends_at_the_deadline_at_the_latest(checker):
    answer = r"\sqrt{" * 1000 + "2" + "}" * 1000
    assert checker.check(f"\\boxed{{{answer}}}", TRUTH, deadline_seconds=DEADLINE).value == 0.0


@pytest.mark.parametrize(
    ("truth", "why"),
    [("(" * 3000 + "1" + ")" * 3000, "could not be parsed within"), ("10^{10^{10}}", "could not be compared")],
)
def test_a_ground_truth_that_takes_too_long_is_the_tasks_mistake(checker, truth, why):
    with pytest.raises(GroundTruthError, match=why):
        checker.check(HALF, truth, deadline_seconds=DEADLINE)
    assert checker.check(HALF, TRUTH).value == 1.0


def test_a_process_that_gets_no_processor_is_our_failure_and_the_check_is_made_in_another(checker):
    pid = only_child(checker)
    os.kill(pid, signal.SIGSTOP)
    assert checker.check(HALF, TRUTH, deadline_seconds=DEADLINE).value == 1.0
    assert not alive(pid)


@pytest.mark.slow
def test_a_starved_process_is_given_more_time_and_then_given_up(checker):
    pid = only_child(checker)
    with ThreadPoolExecutor(1) as threads:
        before = processor_seconds(pid)
        hanging = threads.submit(checker.check, HANGS, TRUTH, deadline_seconds=0.6)
        until(lambda: processor_seconds(pid) > before + 0.05)
        os.kill(pid, signal.SIGSTOP)  # it has started, and has used less than half of its time
        time.sleep(0.8)
        assert not hanging.done()
        os.kill(pid, signal.SIGCONT)
        assert hanging.result(20).timed_out
    assert not alive(pid)


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_memory_bomb_is_a_wrong_answer_and_takes_no_more_than_it_may():
    done = run_script(r"""
        import resource
        from toolyard.rewards.math import MathChecker
        with MathChecker(children=1, memory_limit_mb=256) as checker:
            assert checker.check(r"\boxed{2^{3500000000}}", "0.5", deadline_seconds=5).value == 0.0
            assert checker.check(r"\boxed{\frac{2}{4}}", "0.5").value == 1.0
            with open(f"/proc/{checker.pids()[0]}/limits") as limits:
                print(*(line.split()[3:5] for line in limits if line.startswith(("Max file size", "Max address"))))
        print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    """)
    limits, most = done.stdout.splitlines()
    assert limits == f"['0', '0'] ['{256 << 20}', '{256 << 20}']"
    assert int(most) * 1024 <= 256 << 20


# Death ----------------------------------------------------------------------------------------------------------------


def test_a_process_that_is_killed_during_a_check_is_replaced_and_the_check_made_again(checker):
    pid = only_child(checker)
    os.kill(pid, signal.SIGSTOP)  # so that it is killed before it has answered
    with ThreadPoolExecutor(1) as threads:
        checking = threads.submit(checker.check, HALF, TRUTH)
        time.sleep(0.2)
        assert not checking.done()
        os.kill(pid, signal.SIGKILL)
        assert checking.result(20).value == 1.0
    assert checker.pids() != [pid]


def test_a_process_that_died_while_idle_is_replaced(checker):
    pid = only_child(checker)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    assert checker.check(HALF, TRUTH).value == 1.0


@contextlib.contextmanager
def killing(checker: MathChecker, signum: signal.Signals, most: int):
    """Wait until this many of its processes are dead."""
    over, killed = threading.Event(), set[int]()

    def kill() -> None:
        while len(killed) < most and not over.wait(0.01):
            for pid in set(checker.pids()) - killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
                    killed.add(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


@pytest.mark.slow
def test_processes_that_are_always_killed_are_our_failure_and_no_score(checker):
    with (
        killing(checker, signal.SIGKILL, most=100),
        pytest.raises(RewardError, match="in 2 tries: its process died: killed by Killed"),
    ):
        checker.check(HANGS, TRUTH)
    assert checker.check(HALF, TRUTH).value == 1.0


@pytest.mark.slow
def test_an_answer_that_crashes_every_process_is_wrong_unless_the_ground_truth_does(checker):
    with killing(checker, signal.SIGABRT, most=2):  # as libraries do that are refused memory
        assert checker.check(HANGS, TRUTH).value == 0.0
    checker.close()  # or one of those that are killed could be idle, and take no part
    with killing(checker, signal.SIGABRT, most=3), pytest.raises(RewardError, match="killed by Aborted"):
        checker.check(HANGS, TRUTH)
    checker.close()
    with (
        killing(checker, signal.SIGABRT, most=2),
        pytest.raises(GroundTruthError, match="cannot be parsed as an expression"),
    ):
        checker.check(HANGS, r"\frac")


PARENT = """
import os, threading, time
from toolyard.rewards.math import MathChecker
checker = MathChecker(children=1)
checker.check(r"\\frac{{2}}{{4}}", "0.5")
fork = os.fork()
if fork == 0:  # it holds copies of everything the parent had
    time.sleep(300)
threading.Thread(target=checker.check, args=({answer!r}, "0.5"), kwargs={{"deadline_seconds": 300}}).start()
time.sleep(0.5)
print(fork, *checker.pids(), flush=True)
time.sleep(300)
"""


@pytest.mark.slow
def test_when_the_parent_is_killed_a_hanging_process_dies_as_well_whatever_forks_live_on():
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PARENT.format(answer=HANGS)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    fork, pid = map(int, parent.stdout.readline().split())
    try:
        assert alive(pid)
        parent.kill()
        until(lambda: not alive(pid))
        assert alive(fork)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        os.kill(fork, signal.SIGKILL)


@pytest.mark.slow
def test_the_interpreters_end_waits_for_nothing_and_leaves_nothing_and_the_main_module_is_run_once():
    start = time.monotonic()
    done = run_script(rf"""
        print("main")
        import threading, time
        from toolyard.errors import RewardError
        from toolyard.rewards import math
        print(math.compute_score(r"{HALF}", "0.5"))
        def late():
            try:
                math.check(r"{HANGS}", "0.5", deadline_seconds=300)
            except RewardError:
                pass
        threading.Thread(target=late, daemon=True).start()
        time.sleep(0.3)
        print(*math.scorer._shared.pids())
    """)
    assert time.monotonic() - start < patient(30)
    assert done.stderr == ""
    main, score, pids = done.stdout.splitlines()
    assert (main, score) == ("main", "1.0")
    assert pids
    assert not any(alive(int(pid)) for pid in pids.split())


@pytest.mark.slow
def test_a_fork_has_processes_of_its_own():
    done = run_script(rf"""
        import os, warnings
        warnings.simplefilter("ignore")
        from toolyard.rewards.math import MathChecker
        checker = MathChecker(children=1)
        checker.check(r"{HALF}", "0.5")
        before = checker.pids()
        fork = os.fork()
        if fork == 0:
            assert checker.pids() == []
            assert checker.check(r"{HALF}", "0.5").value == 1.0
            assert checker.pids() and checker.pids() != before
            checker.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
        assert checker.check(r"{HALF}", "0.5").value == 1.0
        assert checker.pids() == before
        print("done")
    """)
    assert (done.stdout, done.stderr) == ("done\n", "")


# Everybody ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_hundred_checks_at_once_share_two_processes():
    seen: set[int] = set()
    with MathChecker() as checker:

        async def one(number: int) -> float:
            found = await checker.score(f"\\boxed{{{number}x + {number}x}}", f"{2 * (number - number % 2)}x")
            seen.update(checker.pids())
            return found.value

        async with asyncio.TaskGroup() as group:
            checks = [group.create_task(one(number)) for number in range(100)]
        assert [check.result() for check in checks] == [1.0, 0.0] * 50
        assert len(checker.pids()) == len(seen) == 2


@pytest.mark.slow
def test_many_threads_and_event_loops_use_it_at_the_same_time(checker):
    async def some() -> list[float]:
        async with asyncio.TaskGroup() as group:
            checks = [group.create_task(checker.score(HALF, TRUTH)) for _ in range(10)]
        return [check.result().value for check in checks]

    with ThreadPoolExecutor(20) as threads:
        loops = [threads.submit(asyncio.run, some()) for _ in range(10)]
        plain = [threads.submit(checker.check, HALF, TRUTH) for _ in range(50)]
        assert {value for loop in loops for value in loop.result(60)} == {1.0}
        assert {check.result(60).value for check in plain} == {1.0}
    assert len(checker.pids()) == 1


@pytest.mark.slow
async def test_the_event_loop_goes_on_while_a_check_hangs_and_cancelled_it_makes_room(checker):
    await checker.score(HALF, TRUTH)
    (pid,) = checker.pids()
    hanging = asyncio.ensure_future(checker.score(HANGS, TRUTH, deadline_seconds=300))
    used = processor_seconds(pid)
    async with asyncio.timeout(20):
        while processor_seconds(pid) < used + 0.1:  # noqa: ASYNC110 - nothing would set an event
            await asyncio.sleep(0.01)
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert (await checker.score(HALF, TRUTH)).value == 1.0
    assert not alive(pid)


async def test_one_that_is_cancelled_in_line_disturbs_nobody(checker):
    pid = await asyncio.to_thread(only_child, checker)
    os.kill(pid, signal.SIGSTOP)
    first = asyncio.ensure_future(checker.score(HALF, TRUTH))
    await asyncio.sleep(0.05)
    waiting = [asyncio.ensure_future(checker.score(HANGS, TRUTH)) for _ in range(100)]
    await asyncio.sleep(0.05)
    for check in waiting:
        check.cancel()
    await asyncio.wait(waiting)
    os.kill(pid, signal.SIGCONT)
    assert (await first).value == 1.0
    assert checker.pids() == [pid]


@pytest.mark.slow
def test_closing_ends_the_processes_and_fails_what_waits_and_a_later_check_starts_anew(checker):
    pid = only_child(checker)
    with ThreadPoolExecutor(5) as threads:
        checks = [threads.submit(checker.check, HANGS, TRUTH, deadline_seconds=300) for _ in range(5)]
        until(lambda: len(checker._pool.waiting) == 4)
        checker.close()
        for check in checks:
            with pytest.raises(RewardError, match="closed"):
                check.result(20)
    assert not alive(pid)
    assert checker.pids() == []
    assert checker.check(HALF, TRUTH).value == 1.0


@pytest.mark.slow
def test_a_process_is_replaced_after_its_number_of_checks_and_nothing_is_left_behind():
    before = len(os.listdir("/proc/self/fd"))
    with MathChecker(children=1, checks_per_child=2) as checker:
        first = only_child(checker)
        assert checker.check(HALF, TRUTH).value == 1.0
        assert not alive(first)
        second = only_child(checker)
        assert second != first
        workers = [thread for thread in threading.enumerate() if thread.name == "toolyard-math"]
    assert not alive(second)
    assert workers
    assert sum(thread.is_alive() for thread in workers) <= 1  # that of the module's checker
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_functions_of_the_module_share_one_checker():
    try:
        assert await asyncio.to_thread(math.compute_score, HALF, TRUTH) == 1.0
        assert (await math.score(HALF, TRUTH, deadline_seconds=5)).value == 1.0
    finally:
        math.close()
