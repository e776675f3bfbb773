"""The sandbox's own processes die or stop at any moment: runs report it, nothing is left, the next one works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hostile import run, until

from toolyard.errors import SandboxClosedError, SandboxError, SessionLostError
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Limits, Program, Verdict

LEVELS = ["best", pytest.param("confined", marks=pytest.mark.slow)]
KINDS = ["python", "command", "session"]
PROFILE = {"python": "light", "command": "light", "session": "session"}

IN_PYTHON = """
import os, subprocess, time
os.symlink("/bin/sleep", "{marker}")
subprocess.Popen(["./{marker}", "600"], start_new_session=True)
time.sleep(600)
"""
IN_BASH = "ln -s /bin/sleep {marker}; setsid ./{marker} 600 & sleep 600"
"""A program that starts another one, which shows the marker as its name and is in nobody's process group."""


# ------------------------------------------------------------------------------------------------- looking at processes
def process_table() -> dict[int, tuple[str, str, int]]:
    """Name, state and parent of every process. From `stat` alone, which can be read of a process in any state."""
    table: dict[int, tuple[str, str, int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:
                continue
            head, _, tail = text.rpartition(")")
            state, parent, *_ = tail.split()
            table[int(entry)] = (head.partition("(")[2], state, int(parent))
    return table


def alive(marker: str) -> list[int]:
    return [pid for pid, (name, state, _) in process_table().items() if name == marker and state != "Z"]


def zombies_of_ours() -> list[int]:
    return [pid for pid, (_, state, parent) in process_table().items() if parent == os.getpid() and state == "Z"]


def children_of_ours() -> set[int]:
    return {pid for pid, (_, _, parent) in process_table().items() if parent == os.getpid()}


def is_alive(pid: int) -> bool:
    return process_table().get(pid, ("", "Z", 0))[1] != "Z"


def ancestors(pid: int) -> list[int]:
    table, line = process_table(), [pid]
    while line[-1] in table:
        line.append(table[line[-1]][2])
    return line


def worker_of(marker: str, zygote: int) -> tuple[int, int]:
    """The launcher and the worker between a zygote and the marked program."""
    line = ancestors(alive(marker)[0])
    at = line.index(zygote)
    return line[at - 1], line[at - 2]


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    """`until`, without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


def groups_of(bases: Iterable[str], *zygotes: int) -> list[str]:
    """Control groups that bear the name of one of these zygotes."""
    return [path for base in bases for pid in zygotes if os.path.isdir(path := f"{base}/toolyard-{pid}")]


def bases_of(sandbox: LocalSandbox) -> tuple[str, ...]:
    return sandbox.grants.cgroup[1] if sandbox.grants.cgroup else ()


# ----------------------------------------------------------------------------------------------------- running programs
async def run_kind(sandbox: LocalSandbox, kind: str, marker: str, limits: Limits | None = None) -> object:
    limits = limits or Limits(run_seconds=60)
    if kind == "session":
        async with sandbox.session(limits) as session:
            return await session.run(IN_PYTHON.format(marker=marker))
    source = IN_BASH if kind == "command" else IN_PYTHON
    return await sandbox.run(Program(source.format(marker=marker), "bash" if kind == "command" else "python"), limits)


async def outcome(sandbox: LocalSandbox, kind: str, marker: str, limits: Limits | None = None) -> object:
    """What the run returned or raised, as a value: a task group would end the test."""
    try:
        return await run_kind(sandbox, kind, marker, limits)
    except SandboxError as error:
        return error


async def works(sandbox: LocalSandbox, kind: str) -> None:
    if kind == "session":
        async with sandbox.session() as session:
            assert (await session.run("6 * 7")).display[0]["text/plain"] == "42"
    else:
        code, language = ("echo 42", "bash") if kind == "command" else ("print(42)", "python")
        assert (await run(sandbox, code, language)).stdout == "42\n"


@pytest.fixture
def marker() -> str:
    return f"ty{uuid.uuid4().hex[:12]}"


@pytest_asyncio.fixture(params=LEVELS)
async def fresh(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    """A sandbox that may be maltreated. Whatever was done to it, it leaves nothing when it is closed."""
    handles = len(os.listdir("/proc/self/fd"))
    async with LocalSandbox(workers=2, isolation=request.param) as sandbox:
        zygotes = set(sandbox.process_ids.values())
        yield sandbox
        zygotes |= set(sandbox.process_ids.values())
    assert groups_of(bases_of(sandbox), *zygotes) == []
    assert zombies_of_ours() == []
    assert [pid for pid in zygotes if is_alive(pid)] == []
    assert len(os.listdir("/proc/self/fd")) == handles


# -------------------------------------------------------------------------------------------------------------- kill -9
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
@pytest.mark.parametrize("victim", ["zygote", "launcher", "worker"])
async def test_a_run_whose_process_tree_is_killed_is_our_failure_and_leaves_nothing(
    fresh: LocalSandbox, kind: str, victim: str, marker: str
) -> None:
    await works(fresh, kind)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outcome(fresh, kind, marker))
        await until(lambda: alive(marker))
        zygote = fresh.process_ids[PROFILE[kind]]
        launcher, worker = worker_of(marker, zygote)
        directory = Path(os.readlink(f"/proc/{alive(marker)[0]}/cwd"))
        os.kill({"zygote": zygote, "launcher": launcher, "worker": worker}[victim], signal.SIGKILL)
        async with asyncio.timeout(10):
            error = await running
    assert isinstance(error, SandboxError)
    assert error.retryable
    async with asyncio.timeout(20):
        await works(fresh, kind)
    await until(lambda: not alive(marker) and not is_alive(worker) and not is_alive(launcher))
    await until(lambda: not directory.exists())
    assert fresh.statistics().busy == 0
    if victim == "zygote":
        await until(lambda: groups_of(bases_of(fresh), zygote) == [] and zombies_of_ours() == [])


@pytest.mark.any_user
async def test_the_cells_after_a_killed_one_say_that_the_session_is_lost(fresh: LocalSandbox, marker: str) -> None:
    async with fresh.session(Limits(run_seconds=60)) as session:
        async with asyncio.TaskGroup() as group:

            async def cell() -> None:
                with pytest.raises(SandboxError):
                    await session.run(IN_PYTHON.format(marker=marker))

            group.create_task(cell())
            await until(lambda: alive(marker))
            os.kill(worker_of(marker, fresh.process_ids["session"])[1], signal.SIGKILL)
        with pytest.raises(SessionLostError):
            await session.run("1")


@pytest.mark.any_user
async def test_an_idle_worker_that_was_killed_is_replaced(fresh: LocalSandbox) -> None:
    table = process_table()
    launchers = [pid for pid, (_, _, parent) in table.items() if parent == fresh.process_ids["light"]]
    workers = [pid for pid, (_, _, parent) in table.items() if parent in launchers]
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    await until(lambda: not any(map(is_alive, workers)))
    await until(lambda: not any(worker.alive for worker in fresh._pool._idle["light"]))
    for _ in range(3):
        await works(fresh, "python")


HOST = """
import asyncio, os, sys
from toolyard.sandbox.local import LocalSandbox
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
from test_faults import run_kind

async def main():
    async with LocalSandbox(workers=2, isolation=sys.argv[2]) as sandbox:
        print(*sandbox.grants.cgroup[1] if sandbox.grants.cgroup else (), flush=True)
        await run_kind(sandbox, sys.argv[3], sys.argv[4])

asyncio.run(main())
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """For temporary files of a host process; programs with a user id of their own can reach into it."""
    directory = Path(tempfile.mkdtemp(prefix="host-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_killed_host_takes_everything_with_it(level: str, kind: str, marker: str, open_directory: Path) -> None:
    command = [sys.executable, "-c", HOST, os.path.dirname(__file__), level, kind, marker]
    environment = {**os.environ, "TMPDIR": str(open_directory)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout
            bases = host.stdout.readline().split()
            wait_until(lambda: alive(marker))
            line = ancestors(alive(marker)[0])
            tree = line[: line.index(host.pid)]
            assert len(groups_of(bases, tree[-1])) == len(bases)
        finally:
            host.kill()
    wait_until(lambda: not alive(marker))
    wait_until(lambda: not any(map(is_alive, tree)))
    wait_until(lambda: groups_of(bases, tree[-1]) == [])
    wait_until(lambda: os.listdir(open_directory) == [])


# ----------------------------------------------------------------------------------------------------------------- stop
@pytest.mark.any_user
async def test_a_stopped_worker_is_our_failure_soon_after_the_limit_and_is_replaced(
    fresh: LocalSandbox, marker: str
) -> None:
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(outcome(fresh, "python", marker, Limits(run_seconds=3)))
        await until(lambda: alive(marker))
        launcher, worker = worker_of(marker, fresh.process_ids["light"])
        os.kill(worker, signal.SIGSTOP)
        error = await running
    assert isinstance(error, SandboxError)
    assert error.retryable
    assert time.monotonic() - began < 60
    await until(lambda: not alive(marker) and not is_alive(worker) and not is_alive(launcher))
    await works(fresh, "python")
    assert fresh.statistics().busy == 0


# --------------------------------------------------------------------------------------------------------- cancellation
async def cancelled_after(sandbox: LocalSandbox, seconds: float, code: str, language: str) -> Execution | None:
    """None when the cancellation came first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await run(sandbox, code, language)
    return None


@pytest.mark.any_user
async def test_cancelling_at_any_moment_loses_no_slot_and_leaves_no_worker_busy(
    fresh: LocalSandbox, marker: str
) -> None:
    dice = random.Random(7)
    choices = [
        ("print(1)", "python"),
        (IN_PYTHON.format(marker=marker), "python"),
        (IN_BASH.format(marker=marker), "bash"),
        (f"#{'x' * 2_000_000}\nprint(1)", "python"),
    ]
    for _ in range(25):
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                code, language = dice.choice(choices)
                group.create_task(cancelled_after(fresh, dice.uniform(0, 0.04), code, language))
    assert alive(marker) == []
    now = fresh.statistics()
    assert (now.busy, now.waiting) == (0, 0)
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(run_kind(fresh, "python", marker)) for _ in range(2)]
        await until(lambda: len(alive(marker)) == 2)  # at the same time
        for task in both:
            task.cancel()
    await until(lambda: below(fresh.process_ids["light"]) <= 6)


def below(root: int) -> int:
    """How many processes a zygote has under it: launcher, worker and a child prepared ahead for each worker."""
    table = process_table()
    level, count = [root], 0
    while level := [pid for pid, (_, _, parent) in table.items() if parent in level]:
        count += len(level)
    return count


@pytest.mark.any_user
async def test_cancelling_while_a_session_opens_or_runs_leaves_nothing_open(fresh: LocalSandbox, marker: str) -> None:
    await works(fresh, "session")
    dice = random.Random(8)
    for _ in range(25):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(dice.uniform(0, 0.08)):
                await run_kind(fresh, "session", marker)
    assert fresh.statistics().sessions == 0
    assert fresh.statistics().busy == 0
    await until(lambda: not alive(marker) and below(fresh.process_ids["session"]) == 0)
    await works(fresh, "session")


async def test_a_cancelled_program_is_dead_when_the_cancellation_returns(fresh: LocalSandbox, marker: str) -> None:
    for kind in ("python", "command"):
        running = asyncio.ensure_future(run_kind(fresh, kind, marker))
        await until(lambda: alive(marker))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert alive(marker) == []


# ---------------------------------------------------------------------------------------------------------------- close
@pytest.mark.parametrize("level", LEVELS)
async def test_closing_ends_what_runs_and_what_waits(level: str, marker: str) -> None:
    sandbox = LocalSandbox(workers=2, isolation=level)
    async with asyncio.TaskGroup() as group:
        async with sandbox:
            running = [group.create_task(outcome(sandbox, kind, marker)) for kind in ("python", "command")]
            await until(lambda: len(alive(marker)) == 2)
            directories = [Path(os.readlink(f"/proc/{pid}/cwd")) for pid in alive(marker)]
            waiting = group.create_task(outcome(sandbox, "python", marker))
            await until(lambda: sandbox.statistics().waiting == 1)
        assert alive(marker) == []
        assert not any(directory.exists() for directory in directories)
    for task in (*running, waiting):
        assert isinstance(task.result(), SandboxClosedError)


@pytest.mark.parametrize("level", LEVELS)
async def test_closing_ends_sessions(level: str, marker: str) -> None:
    sandbox = LocalSandbox(workers=2, isolation=level)
    async with asyncio.TaskGroup() as group:
        async with sandbox:
            running = group.create_task(outcome(sandbox, "session", marker))
            await until(lambda: alive(marker))
        assert alive(marker) == []
    assert isinstance(running.result(), SandboxError)


@pytest.mark.any_user
@pytest.mark.parametrize("level", LEVELS)
async def test_closing_at_any_moment_is_told_as_such_and_leaves_no_process(level: str) -> None:
    """Also while a zygote or worker starts: those waiting for it were not cancelled and must not get a
    CancelledError."""
    dice = random.Random(9)
    for _ in range(5):
        before = children_of_ours()
        async with asyncio.TaskGroup() as group, LocalSandbox(workers=4, isolation=level) as sandbox:
            tasks = [group.create_task(outcome(sandbox, kind, "unseen")) for kind in [*KINDS, *KINDS, "python"]]
            await asyncio.sleep(dice.choice([0, dice.uniform(0, 0.15)]))
        assert [task.result() for task in tasks if not isinstance(task.result(), SandboxError)] == []
        assert not any(task.cancelled() for task in tasks)
        assert children_of_ours() == before


# ----------------------------------------------------------------------------------------------------------------- load
@pytest.mark.any_user
@pytest.mark.slow
async def test_a_thousand_runs_at_once_all_end_right(fresh: LocalSandbox) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(fresh.run(Program(f"print({number} ** 2)"))) for number in range(1000)]
    assert [task.result().stdout for task in tasks] == [f"{number**2}\n" for number in range(1000)]
    assert {task.result().verdict for task in tasks} == {Verdict.OK}
    assert fresh.statistics().busy == 0


@pytest.mark.parametrize("level", LEVELS)
async def test_a_worker_that_is_killed_before_it_is_ready_may_be_tried_again(level: str) -> None:
    """Nothing was denied: this must not look like a machine without isolation."""
    async with LocalSandbox(workers=1, isolation=level) as sandbox:
        zygote = sandbox.process_ids["light"]
        told: SandboxError | None = None
        for _ in range(100):
            before = {pid for pid, (_, _, parent) in process_table().items() if parent == zygote}
            spawning = asyncio.ensure_future(sandbox._pool.spawn("light"))
            while not spawning.done():
                for pid in {pid for pid, (_, _, parent) in process_table().items() if parent == zygote} - before:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0)
            try:
                sandbox._pool.discard("light", spawning.result())
            except SandboxError as error:
                told = error
                break
        assert told is not None
        assert told.retryable, told
        assert "the launcher died" in str(told)
        assert (await run(sandbox, "print(1)")).ok
