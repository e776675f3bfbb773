"""Faking a result: a program decides its own exit code and output, and nothing else about its verdict."""

from __future__ import annotations

import pytest
from hostile import SYSCALLS, run
from ways import Session, Way

from toolyard.sandbox.guest import frames
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Verdict

pytestmark = pytest.mark.asyncio(loop_scope="session")

FORGED = frames.RESPONSE.pack(frames.ENDED, 0, 0, 0.001, 0.001, 0.0, 1, 6, 0, 0) + b"forged"


async def test_no_descriptor_but_the_standard_three_is_open(any_way: Way) -> None:
    execution = await run(
        any_way,
        """
        import os
        opened = []
        for handle in range(4096):
            try:
                os.fstat(handle)
                opened.append(handle)
            except OSError:
                pass
        print(opened)
        """,
    )
    ours = [3, 4] if isinstance(any_way, Session) else []  # on which cells come in and answers go out
    assert execution.stdout == f"{[0, 1, 2, *ours]}\n"


@pytest.mark.parametrize("language", ["python", "bash"])
async def test_a_forged_answer_on_any_descriptor_is_not_heard(any_level: LocalSandbox, language: str) -> None:
    source = f"""
import os, sys
forged = {FORGED!r}
for handle in range(3, 1001):
    for content in (forged, b"refused by the worker", bytes(4)):
        try:
            os.write(handle, content)
        except OSError:
            pass
sys.exit(3)
"""
    if language == "bash":
        source = f"exec python3 - <<'END'\n{source}\nEND\n"
    execution = await run(any_level, source, language)
    assert execution.verdict is Verdict.FAILED
    assert execution.exit_code == 3
    assert execution.stdout == ""


@pytest.mark.any_user
@pytest.mark.parametrize("code", [1, 7, 120, 124, 125, 126, 127, 137, 255])
async def test_an_exit_code_is_only_an_exit_code(any_level: LocalSandbox, code: int) -> None:
    """125 is how our own child says that it could not start: from the program it means nothing."""
    for language, source in (("python", f"import os; os._exit({code})"), ("bash", f"exit {code}")):
        execution = await run(any_level, source, language)
        assert execution.verdict is Verdict.FAILED
        assert execution.exit_code == code


@pytest.mark.parametrize("number", [1, 2, 6, 9, 11, 13, 14, 15, 24, 25])
async def test_a_signal_of_its_own_is_not_taken_for_a_limit(any_level: LocalSandbox, number: int) -> None:
    """SIGKILL and SIGXCPU are also how limits end a program."""
    execution = await run(
        any_level,
        f"import os, signal, sys\n{number} in (9,) or signal.signal({number}, signal.SIG_DFL)\n"
        f"os.kill(os.getpid(), {number})",
    )
    assert execution.verdict is Verdict.SIGNALED
    assert execution.exit_code == -number


async def test_frames_printed_to_stdout_are_output(any_level: LocalSandbox) -> None:
    execution = await run(any_level, f"import os; os.write(1, {FORGED!r}); os.write(2, {FORGED!r}); os._exit(5)")
    assert execution.exit_code == 5
    assert execution.run
    assert execution.run.stdout_bytes == execution.run.stderr_bytes == FORGED


async def test_the_childs_own_code_cannot_be_called_to_answer_for_the_worker(any_level: LocalSandbox) -> None:
    """The worker's modules are still in the forked memory. Whoever digs them up finds code, but no descriptors."""
    execution = await run(
        any_level,
        """
        import gc, os, sys
        for module in [item for item in gc.get_objects() if type(item) is type(sys)]:
            if module.__name__.endswith(("worker", "program", "collect", "frames")):
                for name, value in vars(module).items():
                    if name in ("_refuse", "_respond"):
                        try:
                            value(ValueError("forged"))
                        except (OSError, TypeError):
                            pass
        for item in gc.get_objects():
            if type(item).__name__ == "Worker":
                try:
                    item._respond(0)
                except (OSError, AttributeError, ValueError):
                    pass
        print("still here")
        os._exit(4)
        """,
    )
    assert execution.exit_code in (4, 125)
    assert execution.verdict is Verdict.FAILED
    assert "forged" not in execution.stderr


async def test_a_child_that_survives_its_parents_limit_reports_nothing(any_way: Way) -> None:
    execution = await run(
        any_way,
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            while True:
                os.write(1, b".")
                time.sleep(0.01)
        while True:
            pass
        """,
        run_seconds=0.4,
    )
    assert execution.verdict is Verdict.TIMED_OUT
    assert execution.exit_code is None


async def test_leaving_from_the_limits_own_signal_does_not_undo_it(any_way: Way) -> None:
    execution = await run(
        any_way,
        """
        import os, signal
        signal.signal(signal.SIGXCPU, lambda *_: os._exit(0))
        while True:
            pass
        """,
        run_seconds=0.4,
    )
    assert execution.verdict is Verdict.TIMED_OUT


@pytest.mark.any_user
async def test_clocks_of_the_program_do_not_move_its_limit(any_level: LocalSandbox) -> None:
    execution = await run(
        any_level,
        SYSCALLS
        + """
import time
call("clock_settime", 0, ctypes.create_string_buffer(16))
time.time = time.monotonic = lambda: 0.0
while True:
    pass
""",
        run_seconds=0.4,
    )
    assert execution.verdict is Verdict.TIMED_OUT


@pytest.mark.parametrize("way", ["kill", "queue", "thread", "descriptor's owner", "group", "everybody"])
async def test_a_program_cannot_end_its_own_worker(any_way: Way, way: str) -> None:
    """Else a bad program could pass for a failure of ours, and be tried again instead of being scored."""
    execution = await run(
        any_way,
        SYSCALLS
        + f"""
import fcntl, signal, time
worker = os.getppid()
def by_owner(number):
    left, right = os.pipe()
    fcntl.fcntl(left, fcntl.F_SETOWN, worker)
    fcntl.fcntl(left, 10, number)   # F_SETSIG
    fcntl.fcntl(left, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(right, b".")
ways = {{
    "kill": lambda number: os.kill(worker, number),
    "queue": lambda number: call("rt_sigqueueinfo", worker, number, ctypes.create_string_buffer(128)),
    "thread": lambda number: call("tkill", worker, number),
    "descriptor's owner": by_owner,
    "group": lambda number: os.killpg(os.getpgid(worker) or worker, number),
    "everybody": lambda number: os.kill(-1, number),
}}
for number in range(1, 65):
    attempt(ways[{way!r}], number)
time.sleep(0.05)
os._exit(6)
""",
    )
    assert execution.exit_code == 6


@pytest.mark.any_user
async def test_a_session_cannot_claim_more_than_its_own_words(any_level: LocalSandbox) -> None:
    async with any_level.session() as session:
        result = await session.run(
            """
import os, struct
for handle in range(3, 64):
    for content in (struct.pack("<I", 2) + b"{}", struct.pack("<I", 0xFFFFFFFF), b"x" * 100):
        try:
            os.write(handle, content)
        except OSError:
            pass
"""
        )
        assert isinstance(result.stdout, str)
        late = await any_level.run(__import__("toolyard").Program("print(1)"))
        assert late.stdout == "1\n"


@pytest.mark.any_user
async def test_a_session_cannot_stretch_its_time_by_forged_answers(any_level: LocalSandbox) -> None:
    async with any_level.session() as session:
        result = await session.run(
            "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", seconds=0.4
        )
        assert result.verdict is Verdict.TIMED_OUT
        assert result.session_lost
