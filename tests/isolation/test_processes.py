"""A program's processes: how many there can be, and that none of them outlives its result."""

from __future__ import annotations

import asyncio
import os
import time
import uuid

import pytest
from hostile import host_processes, run, words
from ways import Way

from patience import patient
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import MIB, Limits, Program, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_fork_bomb_ends_with_its_time_and_leaves_a_working_sandbox(any_level: LocalSandbox) -> None:
    began = time.monotonic()
    execution = await run(
        any_level,
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        run_seconds=0.5,
        memory_bytes=2048 * MIB,  # or the processes may reach that limit first
    )
    assert execution.verdict is Verdict.TIMED_OUT
    assert time.monotonic() - began < patient(10)
    assert (await run(any_level, "print(1)")).stdout == "1\n"


async def test_a_bomb_whose_every_process_leaves_at_once_ends_too(any_level: LocalSandbox) -> None:
    """No process lives long enough to be listed and killed: only all at once will do."""
    marker = uuid.uuid4().hex
    execution = await run(
        any_level,
        f"""
        import os
        marker = "{marker}"
        for _ in range(8):
            try:
                first = os.fork() == 0
            except OSError:  # those before it have filled the house
                break
            while first:
                try:
                    if os.fork():
                        os._exit(0)
                except OSError:
                    pass
        while True:
            pass
        """,
        run_seconds=0.5,
    )
    assert execution.verdict is Verdict.TIMED_OUT
    told = await run(any_level, "import time\nbefore = time.process_time()\ntime.sleep(0.3)\nprint('ok')")
    assert told.stdout == "ok\n"


async def test_a_bomb_of_commands_is_held_to_the_same_number(any_level: LocalSandbox) -> None:
    execution = await run(any_level, "bomb() { bomb | bomb & }; bomb; sleep 9", "bash", run_seconds=1, processes=32)
    assert execution.verdict in (Verdict.TIMED_OUT, Verdict.FAILED)
    assert (await run(any_level, "print(1)")).stdout == "1\n"


async def test_past_the_limit_fork_fails_inside_the_program(any_way: Way) -> None:
    execution = await run(
        any_way,
        """
        import os, time
        count = 0
        try:
            while count < 200:
                if os.fork() == 0:
                    time.sleep(60)
                count += 1
        except BlockingIOError:
            print(count)
        """,
        processes=16,
    )
    assert execution.ok
    assert 14 <= int(execution.stdout) <= most(any_way.sandbox)


def most(sandbox: LocalSandbox) -> int:
    """Without namespaces and without a user id of its own, the kernel counts other processes of the user too.

    So a program is given room for four, and has up to all of it, and a little more if others have left meanwhile.
    Root's processes are counted by the cgroup alone, which leaves some room for the worker's own.
    """
    shared = sandbox.level == "confined" and not (sandbox.grants.root and sandbox.grants.has("own user id"))
    return 17 if not shared else 20 if sandbox.grants.root else 5 * 16


async def test_past_the_limit_threads_fail_inside_the_program(any_level: LocalSandbox) -> None:
    execution = await run(
        any_level,
        """
        import threading, time
        count = 0
        try:
            while count < 200:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                count += 1
        except RuntimeError:
            print(count)
        """,
        processes=16,
    )
    assert execution.ok
    assert 13 <= int(execution.stdout) <= most(any_level)


ESCAPES = {
    "a background child": "os.fork() or endless()",
    "a daemon of two forks and an own session": """
if os.fork() == 0:
    os.setsid()
    os.fork() and os._exit(0)
    endless()
""",
    "a child that ignores every signal": """
if os.fork() == 0:
    import signal
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            pass
    endless()
""",
    "an adopter of orphans": """
if os.fork() == 0:
    import ctypes
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    if os.fork() == 0:
        os.fork() and os._exit(0)
        endless()
    endless()
""",
    "a stopped child": """
if os.fork() == 0:
    import signal
    begin()
    os.kill(os.getpid(), signal.SIGSTOP)
    endless()
""",
    "a child whose first thread has ended": """
if os.fork() == 0:
    import ctypes, threading
    threading.Thread(target=lambda: os.fork() and time.sleep(600) or endless()).start()
    ctypes.CDLL(None).syscall(93 if os.uname().machine == "aarch64" else 60, 0)
""",
    "another executable": """
import subprocess
subprocess.Popen(["/bin/sh", "-c", f": > begun; exec sleep 987 # {marker}"], start_new_session=True)
""",
}


@pytest.mark.parametrize("keeps_pipes", [False, True], ids=["pipes closed", "pipes kept"])
@pytest.mark.parametrize("way", ESCAPES)
@pytest.mark.parametrize("any_way", ["best", "confined", "batch"], indirect=True)  # sessions last longer
async def test_nothing_outlives_its_result(any_way: Way, way: str, keeps_pipes: bool) -> None:
    """Neither to run on, nor to hold back the result by keeping stdout and stderr open."""
    marker = uuid.uuid4().hex
    began = time.monotonic()
    execution = await run(
        any_way,
        f"""
import os, time
marker = "{marker}"
def begin():
    open("begun", "w").close()
def endless():
    begin()
    if not {keeps_pipes}:
        os.closerange(0, 3)
    os.execv("/bin/sleep", ["sleep", "987." + str(int(marker, 16))[:30]])
{ESCAPES[way]}
while not os.path.exists("begun"):
    time.sleep(0.01)
time.sleep(0.1)
print("parent leaves", flush=True)
""",
    )
    assert execution.stdout == "parent leaves\n"
    assert time.monotonic() - began < patient(10)
    assert host_processes("987." + str(int(marker, 16))[:30]) == host_processes(f"sleep 987 # {marker}") == []


async def test_a_program_that_ignores_every_signal_is_stopped_on_time(any_way: Way) -> None:
    began = time.monotonic()
    execution = await run(
        any_way,
        """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_BLOCK, [number])
            except OSError:
                pass
        print("deaf", flush=True)
        while True:
            pass
        """,
        run_seconds=0.5,
    )
    assert execution.verdict is Verdict.TIMED_OUT
    assert execution.stdout == "deaf\n"
    assert time.monotonic() - began < patient(10)


async def test_a_program_stopped_by_itself_is_stopped_on_time(any_level: LocalSandbox) -> None:
    execution = await run(any_level, "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", run_seconds=0.4)
    assert execution.verdict is Verdict.TIMED_OUT


@pytest.mark.kernel("namespaces")
async def test_processor_time_is_counted_over_all_processes(full_way: Way) -> None:
    began = time.monotonic()
    execution = await run(
        full_way,
        """
        import os
        for _ in range(3):
            os.fork()
        while True:
            pass
        """,
        cpu_seconds=0.5,
        run_seconds=60,
    )
    assert execution.verdict is Verdict.CPU_EXCEEDED
    assert time.monotonic() - began < patient(20)


@pytest.mark.kernel("namespaces")
async def test_processor_time_cannot_be_hidden_in_short_lived_children(sandbox: LocalSandbox) -> None:
    execution = await run(
        sandbox,
        """
        import os, time
        while True:
            if os.fork() == 0:
                until = time.process_time() + 0.1
                while time.process_time() < until:
                    pass
                os._exit(0)
            os.wait()
        """,
        cpu_seconds=1,
        run_seconds=60,
    )
    assert execution.verdict is Verdict.CPU_EXCEEDED


async def test_processor_time_of_a_single_process_is_limited_at_every_level(any_level: LocalSandbox) -> None:
    execution = await run(any_level, "print('begun', flush=True)\nwhile True: pass", cpu_seconds=1, run_seconds=60)
    assert execution.verdict is Verdict.CPU_EXCEEDED
    assert execution.stdout == "begun\n"


async def test_a_flood_from_many_processes_is_one_flood(any_way: Way) -> None:
    execution = await run(
        any_way,
        "import os\nfor _ in range(4): os.fork()\nwhile True: os.write(1, b'x' * 4096)",
        output_bytes=1000,
        flood_bytes=4 * MIB,
    )
    assert execution.verdict is Verdict.OUTPUT_EXCEEDED


async def test_the_host_is_not_signalled_by_kill_to_all(any_way: Way) -> None:
    """The host, its zygotes, other workers and programs of other workers live on."""
    neighbour = asyncio.ensure_future(run(any_way, "import time; time.sleep(0.6); print('alive')"))
    before = dict(any_way.sandbox.process_ids)
    execution = await run(
        any_way,
        """
        import os, signal, time
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP, signal.SIGUSR1):
            for target in (-1, 1, os.getppid()):
                try:
                    os.kill(target, number)
                except OSError:
                    pass
            time.sleep(0.02)
        print("sent")
        """,
    )
    assert execution.stdout == "sent\n"
    assert (await neighbour).stdout == "alive\n"
    assert before.items() <= any_way.sandbox.process_ids.items()


async def test_every_number_can_be_killed_without_hitting_anybody(any_way: Way) -> None:
    neighbour = asyncio.ensure_future(run(any_way, "import time; time.sleep(0.8); print('alive')"))
    execution = await run(
        any_way,
        """
        import os, signal
        hit = []
        for target in range(2, 40000):
            if target != os.getpid():
                try:
                    os.kill(target, signal.SIGKILL)
                    hit.append(target)
                except OSError:
                    pass
        print(set(hit) - {globals().get("parent")})  # a case can signal the process it was forked from
        """,
    )
    assert execution.stdout == "set()\n"
    assert (await neighbour).stdout == "alive\n"


@pytest.mark.kernel("namespaces")
async def test_a_program_sees_only_its_own_processes(full_way: Way) -> None:
    told = await words(
        full_way,
        """
        seen = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        print(seen == {1, os.getpid(), *([parent] if "parent" in globals() else [])})
        """,
    )
    assert told == ["True"]


async def test_other_users_and_their_processes_are_invisible(any_way: Way) -> None:
    execution = await run(
        any_way,
        f"""
        for number in {{*range(1, 40000), {os.getpid()}}}:
            try:
                with open(f"/proc/{{number}}/cmdline") as file:
                    print(number, file.read())
            except OSError:
                pass
        """,
    )
    assert execution.ok
    assert "pytest" not in execution.stdout


async def test_orphans_that_are_dead_do_not_count_as_processes(any_level: LocalSandbox) -> None:
    """Only the worker can reap them, and a program may have many more than its limit, one after another."""
    code = "for number in $(seq 400); do (sleep 0 &); done; echo done"
    execution = await any_level.run(Program(code, "bash"), Limits(processes=64, run_seconds=20))
    assert (execution.verdict, execution.stdout) == (Verdict.OK, "done\n")
