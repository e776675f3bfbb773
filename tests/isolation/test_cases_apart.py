"""Cases of one program, forked from one parent: none sees another, and none can harm the parent they have in common."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from textwrap import dedent, indent

import pytest
import pytest_asyncio
from hostile import QUICK, SYSCALLS, until
from test_faults import alive, below
from test_leftovers import LOOK_AT_DIRECTORIES, MARKS, PLACES, TAMPERING
from test_secrets import SCAN, make_needle
from ways import THE_PARENT, WITHOUT_PARENT, cases

from patience import patient
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Program, Verdict

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.kernel("namespaces")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone() -> AsyncIterator[LocalSandbox]:
    """One worker: what one batch breaks, the next one finds."""
    async with LocalSandbox(workers=1, isolation="required") as sandbox:
        yield sandbox


async def each(sandbox: LocalSandbox, code: str, stdins: Sequence[str], **limits: float) -> list[Execution]:
    """Indented source is fine; `call`, `attempt`, `others` and `parent` are at hand."""
    return await cases(sandbox, Program(SYSCALLS + dedent(code)), stdins, QUICK.model_copy(update=limits))


# --------------------------------------------------------------------------------------------------------------- memory
SPEAK_OR_SCAN = f"""
import os, sys
mode, *words = sys.stdin.readline().split()
if mode == "speak":
    print(*words)
    print(*words, file=sys.stderr)
    open("said", "w").write(words[0])
    os.environ["SAID"] = words[0]
    kept = words * 1000
elif mode == "scan":
{indent(SCAN.replace("sys.stdin.read().split()", "words"), "    ")}
"""
"""The second line of a scanner's input is not read by it, but by the scan of its memory."""


async def test_no_byte_of_another_case_is_in_a_cases_memory(alone: LocalSandbox) -> None:
    """Neither of those before it, which are done with, nor of those after it, which are on the same machine already."""
    before, after = make_needle(), make_needle()
    scan = f"scan {before[1]} {after[1]}"
    spoken, *scans, last = await each(
        alone, SPEAK_OR_SCAN, [f"speak {before[0]}", scan, scan, scan, f"speak {after[0]}"], run_seconds=60
    )
    assert before[0] in spoken.stdout
    assert after[0] in last.stdout
    assert [execution.stdout for execution in scans] == ["False\n"] * 3
    _, found = await each(alone, SPEAK_OR_SCAN, ["-", f"scan {before[1]}\n{before[0]}"], run_seconds=60)
    assert found.stdout == "True\n", "and it would have been found"


async def test_no_byte_of_an_earlier_batch_is_in_a_cases_memory(alone: LocalSandbox) -> None:
    said, written = make_needle(), make_needle()
    await each(alone, SPEAK_OR_SCAN, [f"speak {said[0]}"] * 3)
    await each(alone, f"a = '{written[0]}'\nprint(a)\nraise ValueError(a)", [""] * 3)
    found = await each(alone, SPEAK_OR_SCAN, [f"scan {said[1]} {written[1]}"] * 2, run_seconds=60)
    assert [execution.stdout for execution in found] == ["False\n"] * 2
    execution = await alone.run(Program(SPEAK_OR_SCAN, stdin=f"scan {said[1]} {written[1]}"))
    assert execution.stdout == "False\n"


# ----------------------------------------------------------------------------------------------------------- leftovers
async def leaves_no_trace(sandbox: LocalSandbox, tampering: str, look: str) -> None:
    code = f"if input() == 'tamper':\n{indent(dedent(tampering), '    ')}\nelse:\n{indent(dedent(look), '    ')}\n"
    first, _, second, _, third = await each(sandbox, code, ["look", "tamper", "look", "tamper", "look"])
    assert first.ok, first
    assert second.stdout == third.stdout == first.stdout


@pytest.mark.parametrize("what", TAMPERING)
async def test_tampering_ends_with_its_case(alone: LocalSandbox, what: str) -> None:
    await leaves_no_trace(alone, *TAMPERING[what])


@pytest.mark.parametrize("what", MARKS)
async def test_directories_keep_no_marks_for_the_next_case(alone: LocalSandbox, what: str) -> None:
    await leaves_no_trace(alone, PLACES + dedent(MARKS[what]), PLACES + dedent(LOOK_AT_DIRECTORIES))


async def test_times_of_directories_tell_nothing_of_the_case_before(alone: LocalSandbox) -> None:
    """Neither which of them it has used, nor how long ago; whether it ends at once, takes its time or leaves files."""
    code = f"""
{PLACES}
import time
word = input()
if word == "look":
    found = [os.stat(place) for place in PLACES]
    made, changed = [it.st_mtime for it in found[1:]], [it.st_ctime for it in found]  # in the first is main.py
    print(max(made) - min(made) < 0.3, max(changed) - min(changed) < 0.3)
else:
    time.sleep(float(word))
    os.mkdir("/tmp/new")
    word == "0" and os.rmdir("/tmp/new")
"""
    await each(alone, code, ["0", "0.6"])
    found = await each(alone, code, ["0.6", "look", "0", "look", "0.6", "look"])
    assert [execution.stdout for execution in found] == ["", "True True\n"] * 3


# ----------------------------------------------------------------------------------------------------------- processes
STRAYS = {
    "a child": "os.fork() or live()",
    "a daemon": """
        if os.fork() == 0:
            os.setsid()
            os.fork() and os._exit(0)
            live()
        """,
    "a sibling": "libc.syscall(NUMBERS['clone'], 0x8000 | 17, 0, 0, 0, 0) or live()",
    "a sibling's child": """
        if libc.syscall(NUMBERS["clone"], 0x8000 | 17, 0, 0, 0, 0) == 0:
            os.fork() and os._exit(0)
            live()
        """,
    "a sibling that sends no signal": "libc.syscall(NUMBERS['clone'], 0x8000, 0, 0, 0, 0) or live()",
    "an adopter of orphans": """
        if os.fork() == 0:
            libc.prctl(36, 1, 0, 0, 0)
            os.fork() or live()
            live()
        """,
    "one that always leaves for another": """
        if os.fork() == 0:
            while os.getpid():
                os.fork() and os._exit(0)
        """,
    "one that is stopped": "os.fork() or (os.kill(os.getpid(), 19), live())",
    "another program": "os.fork() or os.execv('/bin/sleep', ['sleep', '987'])",
}


@pytest.mark.parametrize("way", STRAYS)
async def test_nothing_lives_on_into_the_next_case(alone: LocalSandbox, way: str) -> None:
    code = f"""
import time
def live():
    while True:
        open("/tmp/left", "w").close()
        open("left", "w").close()
        time.sleep(0.001)

if input() == "stray":
{indent(dedent(STRAYS[way]), "    ")}
    time.sleep(0.02)
else:
    print(others() == [parent], "left" in os.listdir("/tmp"), os.listdir())
    time.sleep(0.02)
    print(others() == [parent], "left" in os.listdir("/tmp"), os.listdir())
"""
    for _ in range(5):
        stray, look, stray_again, look_again = await each(alone, code, ["stray", "look", "stray", "look"])
        if WITHOUT_PARENT not in look.stderr + look_again.stderr:
            break  # otherwise, the machine was too busy for another parent
    assert stray.ok, stray
    assert stray_again.ok, stray_again
    assert look.stdout == look_again.stdout == "True False ['main.py']\n" * 2


async def test_a_case_sees_nobody_but_the_worker_and_its_parent(alone: LocalSandbox) -> None:
    found = await each(
        alone,
        """
        print(others(), os.getppid())
        """,
        ["", "", ""],
    )
    assert len({execution.stdout for execution in found}) == 1
    others, worker = found[0].stdout.rsplit(maxsplit=1)
    assert (len(others.split()), int(worker)) == (1, 1)


async def test_a_fork_bomb_does_not_reach_the_next_case(alone: LocalSandbox) -> None:
    code = """
    while input() == "bomb":
        while True:
            try:
                os.fork()
            except OSError:
                pass
    print("fine")
    """
    bomb, fine = await each(alone, code, ["bomb", "-"], run_seconds=1, memory_bytes=2 << 30)
    assert bomb.verdict is Verdict.TIMED_OUT
    assert fine.stdout == "fine\n"


async def test_the_number_of_processes_is_that_of_a_run(alone: LocalSandbox) -> None:
    code = """
    import time
    count = 0
    try:
        while os.fork(): count += 1
        time.sleep(60)
    except BlockingIOError:
        print(count)
    """
    ordinary = await alone.run(Program(SYSCALLS + dedent(code)), QUICK.model_copy(update={"processes": 16}))
    found = await each(alone, code, ["", ""], processes=16)
    assert [execution.stdout for execution in found] == [ordinary.stdout] * 2


# ---------------------------------------------------------------------------------------------------------- the parent
async def test_the_parents_memory_and_descriptors_are_closed(alone: LocalSandbox) -> None:
    code = """
    for name in ("mem", "maps", "environ", "fd", "root", "cwd", "exe", "auxv", "stack", "pagemap", "smaps", "fdinfo"):
        place = f"/proc/{parent}/{name}"
        print(attempt(os.open, place, os.O_RDONLY), attempt(os.listdir, place), attempt(os.readlink, place))
    for name in ("mem", "comm", "oom_score_adj", "clear_refs", "timerslack_ns", "sched", "coredump_filter"):
        print(attempt(lambda: os.write(os.open(f"/proc/{parent}/{name}", os.O_RDWR), b"1")))
    class Span(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    buffer = ctypes.create_string_buffer(8)
    span = Span(ctypes.addressof(buffer), 8)
    print(call("ptrace", 16, parent, 0, 0), call("ptrace", 0x4206, parent, 0, 0))
    print(call("process_vm_readv", parent, ctypes.byref(span), 1, ctypes.byref(span), 1, 0))
    print(call("process_vm_writev", parent, ctypes.byref(span), 1, ctypes.byref(span), 1, 0))
    for number in range(64):
        print(call("pidfd_getfd", os.pidfd_open(parent), number, 0))
    """
    for execution in await each(alone, code, ["", ""]):
        assert execution.ok, execution
        assert set(execution.stdout.split()) <= {"EACCES", "EPERM", "ENOENT", "ENOTDIR", "EINVAL"}, execution.stdout


async def test_a_case_has_no_descriptor_but_its_streams(alone: LocalSandbox) -> None:
    code = """
    found = []
    for number in range(3, 4096):
        for action in (os.fstat, lambda handle: os.write(handle, b"e" * 32), lambda handle: os.read(handle, 1)):
            if attempt(action, number) != "EBADF":
                found.append(number)
    print(found)
    """
    assert [execution.stdout for execution in await each(alone, code, ["", ""])] == ["[]\n"] * 2


LOOK_OR_HARM = """
import resource
if input() == "look":
    print(os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), os.getpgid(0) == os.getpid())
    print([resource.getrlimit(number) for number in range(16)], call("ioprio_get", 1, 0), os.sched_getscheduler(0))
else:
    for number in range(16):
        attempt(resource.prlimit, parent, number, (0, 0))
    attempt(os.sched_setaffinity, parent, {0})
    attempt(os.sched_setscheduler, parent, os.SCHED_IDLE, os.sched_param(0))
    attempt(os.setpriority, os.PRIO_PROCESS, parent, 19)
    attempt(os.setpriority, os.PRIO_PGRP, os.getpgid(parent), 19)
    attempt(os.setpriority, os.PRIO_USER, 0, 19)
    attempt(os.setpgid, parent, 0)
    call("ioprio_set", 1, parent, 3 << 13)
"""


async def test_the_parents_limits_and_place_cannot_be_changed(alone: LocalSandbox) -> None:
    first, _, second = await each(alone, LOOK_OR_HARM, ["look", "harm", "look"])
    assert first.ok
    assert first.stdout == second.stdout


SIGNALS = ["SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGXCPU", "SIGSEGV", "SIGTSTP", "SIGCHLD", "SIGUSR1"]


@pytest.mark.parametrize("name", SIGNALS)
async def test_signals_to_the_parent_change_nothing(alone: LocalSandbox, name: str) -> None:
    """Neither for the case that sends them nor for the next one, whether it ends at once or takes its time."""
    code = f"""
    import signal, sys, time
    word, seconds = input().split()
    if word == "harm":
        for _ in range(3):
            print(attempt(os.kill, parent, signal.{name}), file=sys.stderr)
    time.sleep(float(seconds))
    print(word)
    sys.exit(3 if word == "harm" else 0)
    """
    began = time.monotonic()
    words = ["harm 0", "fine 0", "harm 0.05", "fine 0.05", "harm 0", "fine 0", "fine 0"]
    found = await each(alone, code, words)
    assert [execution.stdout for execution in found] == [
        "harm\n", "fine\n", "harm\n", "fine\n", "harm\n", "fine\n", "fine\n",
    ]  # fmt: skip
    assert [execution.exit_code for execution in found] == [3, 0, 3, 0, 3, 0, 0]
    assert found[0].stderr.startswith("None\n"), "it was sent"
    assert time.monotonic() - began < patient(8)


async def test_a_signal_to_everybody_changes_nothing(alone: LocalSandbox) -> None:
    code = """
    import signal, time
    word = input()
    if word == "harm":
        for number in range(1, 65):
            if number not in (32, 33):
                signal.signal(number, signal.SIG_IGN) if number not in (9, 19) else None
        attempt(os.kill, -1, signal.SIGSTOP)
        attempt(os.kill, -1, signal.SIGKILL)
        time.sleep(0.02)
    print(word)
    """
    found = await each(alone, code, ["fine", "harm", "fine", "harm", "fine"])
    assert [execution.stdout for execution in found] == ["fine\n", "harm\n", "fine\n", "harm\n", "fine\n"]


async def test_a_case_that_has_killed_its_parent_is_still_stopped_on_time(alone: LocalSandbox) -> None:
    code = """
    import time
    if input() == "harm":
        os.kill(parent, 9)
        print("begun", flush=True)
        while True: pass
    print("fine")
    """
    began = time.monotonic()
    harm, fine = await each(alone, code, ["harm", "-"], run_seconds=1)
    assert (harm.verdict, harm.stdout) == (Verdict.TIMED_OUT, "begun\n")
    assert harm.run
    assert 0.05 < harm.run.cpu_seconds < 3
    assert fine.stdout == "fine\n"
    assert time.monotonic() - began < patient(10)


@pytest.mark.parametrize("signal", [9, 19])
async def test_the_way_a_case_ended_cannot_be_kept_from_us(alone: LocalSandbox, signal: int) -> None:
    """A process that outlives its case attacks the parent at the moment it reports."""
    code = f"""
    import time
    first = os.getpid()
    if os.fork() == 0:
        while os.getppid() == first:
            pass
        while attempt(os.kill, parent, {signal}) is None:
            pass
        while True:
            time.sleep(1)
    time.sleep(0.01)
    print("said")
    raise SystemExit(7)
    """
    found = await each(alone, code, [""] * 6)
    assert [(execution.exit_code, execution.stdout) for execution in found] == [(7, "said\n")] * 6


async def test_the_number_of_a_parent_that_was_killed_stays_taken(alone: LocalSandbox) -> None:
    """Or a process that a case leaves behind could get it, pass for the parent, and outlive its case."""
    code = """
    import time
    if input() == "harm":
        os.kill(parent, 9)
        for _ in range(10):
            if os.fork() == 0:
                os.fork()  # and an orphan, for the worker to wait for
                os._exit(0)
            os.wait()
            time.sleep(0.01)
        print(attempt(os.kill, parent, 0), open(f"/proc/{parent}/stat").read().split()[2])
    else:
        print("fine")
    """
    found = await each(alone, code, ["-", "harm", "-", "harm", "-"])
    assert [execution.stdout for execution in found] == ["fine\n", "None Z\n", "fine\n", "None Z\n", "fine\n"]


async def test_an_ordinary_run_is_alone_also_after_a_batch(alone: LocalSandbox) -> None:
    await each(alone, "print(others())", ["", ""])
    execution = await alone.run(Program(SYSCALLS + THE_PARENT + "print(others())"))
    assert execution.stdout == "[]\n"


async def test_batches_leave_no_process_behind(alone: LocalSandbox) -> None:
    marker = f"case-{time.monotonic_ns() % 10**9}"
    code = f"""
    os.symlink("/bin/sleep", "{marker}")
    os.fork() or os.execv("{marker}", ["{marker}", "600"])
    """
    await each(alone, "pass", ["", ""])
    zygote = alone.process_ids["light"]
    before = below(zygote)
    await each(alone, code, ["", "", ""])
    assert alive(marker) == []
    await until(lambda: below(zygote) <= before)
