"""One program on many inputs: each gives what it would have given alone, at every level."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from textwrap import dedent
from typing import Any, Self

import pytest
import pytest_asyncio

from patience import again_if_busy, patient
from toolyard import Execution, Limits, LocalSandbox, Program, Verdict
from toolyard.errors import ProgramError, SandboxBusyError, SandboxClosedError, SandboxError
from toolyard.sandbox.host.routing import LIGHT
from toolyard.sandbox.protocol import MIB, Session, StageResult
from toolyard.testing import PythonSemantics, SandboxContract

QUICK = Limits(run_seconds=5, memory_bytes=192 * MIB, disk_bytes=32 * MIB)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param("best", marks=pytest.mark.kernel("full")), "confined", "none"],
)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox(workers=1, isolation=request.param) as sandbox:
        yield sandbox


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def collect(
    sandbox: LocalSandbox, program: Program | str, stdins: Sequence[str | bytes | None], limits: Limits | None = None
) -> list[Execution]:
    program = Program(dedent(program)) if isinstance(program, str) else program
    return [execution async for execution in sandbox.run_each(program, stdins, limits or QUICK)]


def told(execution: Execution) -> Execution:
    """The execution without its measurements."""

    def stage(result: StageResult | None) -> StageResult | None:
        return result and replace(result, wall_seconds=0.0, cpu_seconds=0.0, max_memory_bytes=0, starved_seconds=0.0)

    return replace(execution, run=stage(execution.run), compile=stage(execution.compile), queue_seconds=0.0)


# ------------------------------------------------------------------------------------------------------------- equality
@dataclass(frozen=True)
class Kind:
    code: str
    stdins: Sequence[str | bytes | None] = ("1", "2", "3")
    limits: dict[str, Any] = field(default_factory=dict[str, Any])
    given: dict[str, Any] = field(default_factory=dict[str, Any])


KINDS = {
    "nothing": Kind(""),
    "an echo": Kind("print(input())", ["a", "b\nc", "", None, "ünïcödé\n", "\udc80"]),
    "no look at its input": Kind("print(1)", ["x", "y" * 300_000, None]),
    "a sum": Kind("import sys\nprint(sum(map(int, sys.stdin.read().split())))", ["1 2\n", "3\n4", "", "5 x"]),
    "inputs around what a pipe takes at once": Kind(
        "import sys\nprint(len(sys.stdin.read()))", ["x" * size for size in (0, 4095, 4096, 4097, 65536, 65537)]
    ),
    "outputs around what is kept of them": Kind(
        "import os\nsize = int(input())\nos.write(1, b'o' * size)\nos.write(2, b'e' * (size - 1))",
        ["99", "100", "101", "5000", "60000", "1"],
        {"output_bytes": 100, "flood_bytes": 1 << 20},
    ),
    "large inputs": Kind(
        "import hashlib, sys\ndata = sys.stdin.buffer.read()\nprint(len(data), hashlib.sha256(data).hexdigest())",
        [b"", b"x" * 4096, b"y" * 4097, bytes(range(256)) * 256, os.urandom(65536), os.urandom(3 << 20)],
    ),
    "input in pieces": Kind("import sys\nfor line in sys.stdin:\n    print(line, end='', flush=True)", ["1\n2\n", "3"]),
    "large outputs": Kind("print('x' * int(input()))", ["10", "65535", "65536", "70000", "1048575", "1048576", "5"]),
    "outputs that are cut": Kind("print('x' * int(input()))", ["10", "70000", "10"], {"output_bytes": 65536}),
    "a flood": Kind(
        "import sys\nwhile input() == 'flood':\n    while True: sys.stdout.write('x' * 65536)",
        ["-", "flood", "-"],
        {"output_bytes": 4096, "flood_bytes": 1 << 20},
    ),
    "a small flood": Kind(
        "import time\nprint('x' * int(input()), flush=True)\ntime.sleep(0.05)",
        ["900", "2000", "9"],
        {"output_bytes": 1000, "flood_bytes": 1000},
    ),
    "both streams": Kind("import sys\nprint(1)\nprint(2, file=sys.stderr)\nsys.stdout.write('3')"),
    "an exception": Kind("def f(x):\n    raise ValueError(x)  # here\nf(input())"),
    "an exit": Kind("import sys\nsys.exit(int(input()))", ["0", "3", "255", "256", "-1", "123456789123456789123"]),
    "an exit with words": Kind("import sys\nsys.exit('bye ' + input())"),
    "a quick exit": Kind("import os\nprint('lost')\nos._exit(int(input()))"),
    "signals": Kind("import os\nos.kill(os.getpid(), int(input()))", ["0", "2", "6", "9", "11", "15", "24", "10"]),
    "an abort": Kind("import os\ninput() == '2' and os.abort()"),
    "a syntax error": Kind("print(1)\nif x\n"),
    "a null byte": Kind("print('a\0b')"),
    "a warning of the compiler": Kind("x = 1\nprint(x is 1, '\\d')"),
    "a warning": Kind("import warnings\nwarnings.warn(input())"),
    "a program of latin-1": Kind("# -*- coding: latin-1 -*-\nprint('é')"),
    "a program that cannot be nested so deep": Kind("(" * 300 + ")" * 300),
    "who it is": Kind(
        "import os, sys\nprint(__name__, __file__ and os.path.basename(__file__), sys.argv, sorted(globals()))\n"
        "print(os.getppid())\n"
        "print(os.getpid() == os.getsid(0) == os.getpgid(0), os.getcwd() == os.path.dirname(__file__))\n"
        "print(os.sched_getaffinity(0), os.listdir('.'), open(__file__).read() and sorted(os.listdir('/proc/self/fd')))"
    ),
    "its limits": Kind(
        "import resource\nprint([resource.getrlimit(n) for n in range(16) if n != resource.RLIMIT_NPROC])",
        limits={"open_files": 77, "file_bytes": 1 << 20, "cpu_seconds": 3},
    ),
    "few open files": Kind("import os\nwhile True: print(os.open('/dev/null', 0))", limits={"open_files": 6}),
    "not quite so few": Kind("import os\nwhile True: print(os.open('/dev/null', 0))", limits={"open_files": 8}),
    "its signals": Kind(
        "import signal\nprint([signal.getsignal(n) for n in range(1, 30)], signal.pthread_sigmask(0, []))"
    ),
    "its own /proc": Kind("print(open('/dev/stdin').read(), len(open('/proc/self/environ').read()) > 10)"),
    "arguments and variables": Kind(
        "import os, sys\nprint(sys.argv, os.environ['A'], os.environ.get('B'))\nos.environ['B'] = '1'",
        given={"args": ["x", "y z"], "env": {"A": "ü"}},
    ),
    "files of its own": Kind(
        "import helper\nprint(helper.x, open('data').read())\nhelper.x = 5\nopen('data', 'a').write(input())",
        given={"files": {"helper.py": b"x = 3\n", "data": b"d", "a/b/c": b""}, "fetch_files": ["data", "none"]},
    ),
    "files beyond the limit for files": Kind(
        "import os\nprint(os.path.getsize('big'))", limits={"file_bytes": 1000}, given={"files": {"big": bytes(5000)}}
    ),
    "a module of its own that has a known name": Kind(
        "import heapq\nprint(heapq.x)", given={"files": {"heapq.py": b"x=1"}}
    ),
    "a module that it writes": Kind("open('later.py', 'w').write('x = ' + input())\nimport later\nprint(later.x)"),
    "files fetched": Kind("open('out', 'w').write(input() * 3)", given={"fetch_files": ["out"]}),
    "files left open": Kind("f = open('out', 'w')\nf.write(input())", given={"fetch_files": ["out"]}),
    "main.py deleted": Kind("import os\nos.unlink(__file__)\nraise ValueError"),
    "main.py written over": Kind("open(__file__, 'w').write('print(666)')\nprint(input())"),
    "main.py made a directory": Kind("import os\nos.unlink(__file__)\nos.makedirs(__file__ + '/x')\nprint(input())"),
    "tampering": Kind(
        """
        import builtins, os, sys, gc, resource
        print(os.environ.get("X"), sys.modules.get("evil"), hasattr(builtins, "evil"), os.getcwd(), gc.isenabled())
        print(sys.getrecursionlimit(), os.umask(0o77), sys.path[1:] == sys.path[1:], resource.getrlimit(2))
        os.environ["X"] = builtins.evil = "1"
        sys.modules["evil"] = os
        os.chdir("/")
        gc.disable()
        sys.setrecursionlimit(77)
        sys.path.clear()
        resource.setrlimit(2, (1000, 1000))
        """
    ),
    "exit handlers": Kind("import atexit\natexit.register(print, 'last', input())\nprint('first')"),
    "destructors": Kind("class A:\n    def __del__(self): print('gone')\na = A()\nb = A()\nb.b = b"),
    "counters": Kind("from collections import Counter\nprint(Counter(input()).most_common())", ["aab", "", "b"]),
    "counters with a destructor": Kind(
        "from collections import Counter\nif input() == '2': Counter.__del__ = lambda self: print('gone', self)\n"
        "c = Counter('a')"
    ),
    "threads": Kind(
        "import threading\nt = threading.Thread(target=lambda: print(input()))\nt.start()\nt.join()\n"
        "print(threading.active_count())"
    ),
    "a daemon thread": Kind(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    ),
    "forks": Kind("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint(bool(pid), flush=True)"),
    "a child that outlives it": Kind("import os, time\nif os.fork() == 0: time.sleep(60)\nprint(input())"),
    "a daemon": Kind(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork() and os._exit(0)\n    time.sleep(60)\n"
        "os.wait()\nprint(input())"
    ),
    "an orphan that is dead": Kind("import os, time\nif os.fork() == 0: os._exit(0)\ntime.sleep(0.01)\nprint(1)"),
    "other programs": Kind(
        "import subprocess\nprint(subprocess.run(['/bin/cat'], input=input(), text=True).returncode)"
    ),
    "closed streams": Kind("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(0.02 * int(input()))"),
    "a closed sys.stdout": Kind("import sys\nprint(1)\nsys.stdout.close()"),
    "no sys.stdout": Kind("import sys\nsys.stdout = None\nprint(1)"),
    "streams that do not wait": Kind(
        "import os\nprint([os.get_blocking(n) for n in range(3)])\nfor n in range(3): os.set_blocking(n, False)"
    ),
    "the time limit": Kind(
        "import time\nword = input()\nprint(word, flush=True)\nwhile word == 'loop': pass\n"
        "if word == 'sleep': time.sleep(9)",
        ["-", "loop", "-", "sleep", "-"],
        {"run_seconds": 0.6},
    ),
    "no reaction to the time limit": Kind(
        "import signal\nsignal.signal(24, signal.SIG_IGN)\nprint(1, flush=True)\nwhile True: pass",
        ["-", "-"],
        {"run_seconds": 0.4},
    ),
    "the memory limit": Kind(
        "print(len(bytearray(int(input()) << 20)))", ["1", "400", "2"], {"memory_bytes": 64 * MIB}
    ),
    "deep recursion": Kind("def f(n):\n    return n and f(n - 1)\nprint(f(int(input())))", ["10", "900", "5000"]),
    "much of the standard library": Kind(
        "import array, bisect, calendar, cmath, copy, dataclasses, datetime, decimal, fractions, hashlib, heapq, json\n"
        "import numbers, pprint, queue, random, statistics, string, textwrap, threading, traceback\n"
        "random.seed(5)\nprint(random.random(), decimal.Decimal(1) / 7, heapq.nsmallest(2, [3, 1, 2]), input())"
    ),
}


async def compare(sandbox: LocalSandbox, kind: Kind) -> None:
    program, limits = Program(dedent(kind.code), **kind.given), QUICK.model_copy(update=kind.limits)
    alone = [told(await sandbox.run(program.model_copy(update={"stdin": stdin}), limits)) for stdin in kind.stdins]
    together = [told(execution) for execution in await collect(sandbox, program, kind.stdins, limits)]
    assert together == alone


@pytest.mark.kernel("full")
@pytest.mark.parametrize("sandbox", ["best"], indirect=True)
@pytest.mark.parametrize("name", KINDS)
async def test_run_each_returns_what_run_returns(sandbox: LocalSandbox, name: str) -> None:
    await compare(sandbox, KINDS[name])


SOME = (
    "an echo", "large inputs", "large outputs", "an exception", "signals", "files of its own", "files fetched",
    "main.py made a directory", "tampering", "a daemon",
)  # fmt: skip


@pytest.mark.parametrize("sandbox", ["confined", "none"], indirect=True)
@pytest.mark.parametrize("name", SOME)
async def test_each_gives_what_run_gives_below_full(sandbox: LocalSandbox, name: str) -> None:
    """By ordinary runs, so that less can go wrong."""
    await compare(sandbox, KINDS[name])


class OneOfTwo:
    """A sandbox whose every run is the second of two on the same input."""

    def __init__(self, inner: LocalSandbox) -> None:
        self.inner = inner

    async def run(self, program: Program, limits: Limits | None = None) -> Execution:
        alike = program.model_copy(update={"stdin": None})

        async def twice() -> list[Execution]:
            return [execution async for execution in self.inner.run_each(alike, [program.stdin] * 2, limits)]

        return (await again_if_busy(twice))[1]

    def session(self, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]:
        return self.inner.session(limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        return None


@pytest.mark.slow
class TestContract(SandboxContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[OneOfTwo]:
        async with LocalSandbox(workers=2) as sandbox:
            yield OneOfTwo(sandbox)


@pytest.mark.slow
class TestPython(PythonSemantics):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def sandbox(cls) -> AsyncIterator[OneOfTwo]:
        async with LocalSandbox(workers=2) as sandbox:
            yield OneOfTwo(sandbox)


# ---------------------------------------------------------------------------------------------------- one after another
async def test_each_result_arrives_as_soon_as_it_is_ready(sandbox: LocalSandbox) -> None:
    """And not when the next is done, or all are."""
    program = Program("import time\nprint(time.sleep(float(input())))")
    seen = [time.monotonic() async for _ in sandbox.run_each(program, ["0", "0", "0.5", "1"])]
    assert seen[2] - seen[1] > 0.25
    assert seen[3] - seen[2] > 0.5


@pytest.mark.kernel("full")
@pytest.mark.parametrize("sandbox", ["best"], indirect=True)
async def test_python_is_forked_from_one_process_that_has_compiled_it(sandbox: LocalSandbox) -> None:
    """What makes it cheap. Else all the other tests here could pass by ordinary runs."""
    code = "import os\nprint(sorted({int(name) for name in os.listdir('/proc') if name.isdigit()} - {os.getpid()}))"
    seen = {execution.stdout for execution in await collect(sandbox, code, [""] * 8)}
    assert len(seen) == 1
    assert seen != {"[1]\n"}
    assert (await sandbox.run(Program(code))).stdout == "[1]\n"


@pytest.mark.kernel("full")
@pytest.mark.parametrize("sandbox", ["best"], indirect=True)
@pytest.mark.slow
async def test_what_takes_the_compiler_too_long_is_compiled_by_each_on_its_own_time(sandbox: LocalSandbox) -> None:
    found = await collect(sandbox, "x = 1\n" * 1_000_000, ["", ""], Limits(run_seconds=0.5))
    assert [execution.verdict for execution in found] == [Verdict.TIMED_OUT] * 2
    assert len(await collect(sandbox, "print(1)", ["", ""])) == 2


async def test_time_and_memory_are_each_ones_own(sandbox: LocalSandbox) -> None:
    code = """
    import time
    data = bytearray(int(input()) << 20)
    until = time.process_time() + len(data) / (1 << 26)
    while time.process_time() < until: pass
    """
    small, large, again = [
        execution.run for execution in await collect(sandbox, code, ["0", "64", "0"]) if execution.run
    ]
    assert large.cpu_seconds > 0.9 > max(small.cpu_seconds, again.cpu_seconds)
    assert large.wall_seconds > 0.9 > max(small.wall_seconds, again.wall_seconds)
    assert large.max_memory_bytes > 64 * MIB > again.max_memory_bytes > MIB


async def test_only_the_first_tells_how_long_it_waited(sandbox: LocalSandbox) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(sandbox.run(Program("import time; time.sleep(0.3)")))
        await asyncio.sleep(0.05)
        first, second = await collect(sandbox, "print(input())", ["1", "2"])
    assert first.queue_seconds > 0.1
    assert second.queue_seconds == 0.0


async def test_they_take_one_turn(sandbox: LocalSandbox) -> None:
    """So that a queue of programs and a queue of batches are served in the order in which they came."""
    async with aclosing(sandbox.run_each(Program("input()"), ["", ""])) as executions:
        await anext(executions)
        assert sandbox.statistics().busy == 1
        with pytest.raises(SandboxBusyError):
            await anext(sandbox.run_each(Program("input()"), [""], start_within=0.05))
    assert sandbox.statistics().busy == 0


async def test_every_one_is_counted(sandbox: LocalSandbox) -> None:
    before = dict(sandbox.statistics().executions)
    await collect(sandbox, "1 / int(input())", ["1", "0", "2"])
    after = sandbox.statistics().executions
    assert after["ok"] - before.get("ok", 0) == 2
    assert after["failed"] - before.get("failed", 0) == 1


async def test_no_input_at_all_is_no_run_at_all(sandbox: LocalSandbox) -> None:
    assert await collect(sandbox, "print(1)", []) == []


# ---------------------------------------------------------------------------------------------------------- refused
async def test_a_program_with_its_own_stdin_is_refused(sandbox: LocalSandbox) -> None:
    with pytest.raises(ProgramError, match="stdin of its own"):
        await collect(sandbox, Program("input()", stdin="x"), ["y"])


async def test_a_bad_file_name_is_refused_as_it_is_by_run(sandbox: LocalSandbox) -> None:
    program = Program("print(1)", files={"../x": b""})
    with pytest.raises(ProgramError) as alone:
        await sandbox.run(program)
    with pytest.raises(ProgramError) as together:
        await collect(sandbox, program, ["", "", ""])
    assert str(together.value) == str(alone.value)
    assert len(await collect(sandbox, "print(1)", ["", ""])) == 2


async def test_more_than_a_worker_takes_is_refused(sandbox: LocalSandbox) -> None:
    large = b"x" * (100 * MIB)
    with pytest.raises(ProgramError, match="the maximum is"):
        await collect(sandbox, "print(1)", [large, large, large])


async def test_an_unknown_language_is_refused(sandbox: LocalSandbox) -> None:
    with pytest.raises(ProgramError):
        await collect(sandbox, Program("1", "no such language"), [""])


async def test_a_closed_sandbox_says_so() -> None:
    sandbox = LocalSandbox(workers=1)
    with pytest.raises(SandboxClosedError):
        await anext(sandbox.run_each(Program("1"), [""]))
    async with sandbox:
        executions = sandbox.run_each(Program("import time; time.sleep(float(input()))"), ["0", "60"])
        await anext(executions)

        async def go_on() -> None:
            with pytest.raises(SandboxClosedError):
                await anext(executions)

        async with asyncio.TaskGroup() as group:
            group.create_task(go_on())
            await asyncio.sleep(0.1)
            group.create_task(sandbox.close())


# --------------------------------------------------------------------------------------------------- other languages
@pytest.mark.toolchain("c")
async def test_a_compiled_program_is_compiled_once(sandbox: LocalSandbox) -> None:
    code = f"""
    #include <stdio.h>
    #include <stdlib.h>
    int main(void) {{ int n; if (scanf("%d", &n) != 1) return 9; printf("%d\\n", n * n); exit(n); }}
    /* {os.urandom(8)} */
    """
    program = Program(dedent(code), "c")
    found = await collect(sandbox, program, ["2", "3", "x", "0"], Limits(compile_seconds=30))
    assert [execution.stdout for execution in found] == ["4\n", "9\n", "", "0\n"]
    assert [execution.exit_code for execution in found] == [2, 3, 9, 0]
    assert [execution.compile_cached for execution in found] == [False, True, True, True]
    assert {execution.compile for execution in found} == {found[0].compile}


@pytest.mark.toolchain("c")
async def test_what_does_not_compile_fails_for_every_input(sandbox: LocalSandbox) -> None:
    found = await collect(sandbox, Program("int main(", "c"), ["1", "2"], Limits(compile_seconds=30))
    assert [execution.verdict for execution in found] == [Verdict.COMPILE_FAILED] * 2
    assert all("error" in execution.stderr for execution in found)


@pytest.mark.toolchain("bash")
async def test_an_interpreted_program_runs_on_each(sandbox: LocalSandbox) -> None:
    program = Program("ls; read x; echo $x > out; sleep 60 & echo got $x", "bash", fetch_files=["out"])
    found = await collect(sandbox, program, ["1\n", "2\n", "3\n"])
    assert [execution.stdout for execution in found] == [f"main.sh\ngot {n}\n" for n in (1, 2, 3)]
    assert [execution.files for execution in found] == [{"out": f"{n}\n".encode()} for n in (1, 2, 3)]


@pytest.mark.parametrize("sandbox", ["best"], indirect=True)
async def test_numpy_programs_are_forked_from_a_process_that_has_it_and_draw_their_own_numbers(
    sandbox: LocalSandbox,
) -> None:
    code = "import sys\nbefore = 'numpy' in sys.modules\nimport numpy\nprint(before, numpy.random.random())"
    await sandbox.run(Program(code))
    async with asyncio.timeout(60):
        await sandbox._pool.zygote("numpy")
    found = [execution.stdout.split() for execution in await collect(sandbox, code, [""] * 4)]
    assert [before for before, _ in found] == ["True"] * 4
    assert len({number for _, number in found}) == 4


RANDOM = "import random, uuid\nprint(random.random(), random.Random().random(), random.gauss(0, 1), uuid.uuid4())"


async def test_random_numbers_differ_from_one_to_the_next(sandbox: LocalSandbox) -> None:
    found = await collect(sandbox, RANDOM, [""] * 4)
    for numbers in zip(*(execution.stdout.split() for execution in found), strict=True):
        assert len(set(numbers)) == 4


@pytest.mark.parametrize("kept", [["random"], ["random", "_pytest"]])
async def test_random_numbers_differ_where_their_module_is_kept_imported(kept: list[str]) -> None:
    """And beside a module of which it is not known whether it wants to hear of forks."""
    async with LocalSandbox(workers=1, profiles={LIGHT: kept}) as sandbox:
        found = [*await collect(sandbox, RANDOM, [""] * 4), *await collect(sandbox, RANDOM, [""] * 4)]
    for numbers in zip(*(execution.stdout.split() for execution in found), strict=True):
        assert len(set(numbers)) == 8


# ----------------------------------------------------------------------------------------------------- several at once
@pytest.mark.toolchain("bash")
async def test_cases_in_other_languages_share_the_idle_workers_and_keep_their_order() -> None:
    program = Program("read n; sleep 0.$n; echo $n; exit $n", "bash")
    stdins = ["9\n", "1\n", "2\n", "8\n", "x\n"]
    async with LocalSandbox(workers=2) as sandbox:
        alone = [told(await sandbox.run(program.model_copy(update={"stdin": stdin}), QUICK)) for stdin in stdins]
        began = time.monotonic()
        together = [told(execution) for execution in await collect(sandbox, program, stdins)]
        seconds = time.monotonic() - began
        assert sandbox.statistics().busy == 0
    assert together == alone
    assert [execution.exit_code for execution in together[:4]] == [9, 1, 2, 8]
    assert seconds < patient(1.8), "one after the other they take two seconds"


@pytest.mark.toolchain("bash")
async def test_leaving_early_stops_the_cases_of_every_worker() -> None:
    program = Program("read n; echo $n; [ $n = 0 ] || exec sleep 60", "bash")
    async with LocalSandbox(workers=3) as sandbox:
        async with aclosing(sandbox.run_each(program, ["0\n", "1\n", "1\n", "1\n", "1\n"])) as executions:
            assert (await anext(executions)).ok
            await asyncio.sleep(0.2)
            assert sandbox.statistics().busy == 3
        assert sandbox.statistics().busy == 0
        async with asyncio.timeout(5):
            assert (await sandbox.run(Program("print(1)"))).ok


@pytest.mark.toolchain("bash")
async def test_a_failure_comes_in_its_turn_after_the_cases_before_it() -> None:
    program = Program("read n; echo $n; [ $n = 1 ] && kill -9 $PPID; sleep 0.2", "bash")
    async with LocalSandbox(workers=2, isolation="none") as sandbox:
        found: list[Execution] = []
        with pytest.raises(SandboxError):  # noqa: PT012
            async for execution in sandbox.run_each(program, ["0\n", "0\n", "1\n", "0\n"], QUICK):
                found.append(execution)  # noqa: PERF401
        assert [execution.stdout for execution in found] == ["0\n", "0\n"]
        assert sandbox.statistics().busy == 0


@pytest.mark.toolchain("bash")
async def test_a_batch_takes_only_workers_that_nobody_waits_for() -> None:
    sleeper = Program("sleep 0.4", "bash")
    async with LocalSandbox(workers=2) as sandbox, asyncio.TaskGroup() as group:
        group.create_task(sandbox.run(sleeper))
        await asyncio.sleep(0.1)
        batch = group.create_task(collect(sandbox, sleeper, [None] * 4))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        await sandbox.run(Program("print(1)"))
        assert time.monotonic() - began < patient(0.3), "the worker that came free is not the batch's"
        assert not batch.done()
