"""Nothing of one run is there for the next: no state of the interpreter, no files, no marks on directories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from textwrap import dedent

import pytest
import pytest_asyncio
from hostile import SYSCALLS, run
from ways import Session, Way

from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Execution, Program

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["best", "confined"])
async def one_worker(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    """So that the next run is the tampered worker's for certain."""
    async with LocalSandbox(workers=1, isolation=request.param) as sandbox:
        yield sandbox


async def leaves_no_trace(sandbox: LocalSandbox | Way, tampering: str, look: str) -> None:
    """`look` prints the same before and after `tampering`."""
    before = await run(sandbox, SYSCALLS + dedent(look))
    assert before.ok, before
    await run(sandbox, SYSCALLS + dedent(tampering), run_seconds=1)  # a cell may hang in the loop it has broken
    after = await run(sandbox, SYSCALLS + dedent(look))
    assert after.ok, after
    assert after.stdout == before.stdout


TAMPERING = {
    "builtins": ("import builtins; builtins.print = None; builtins.len = lambda x: 42", "print(len('ab'))"),
    "sys.modules": (
        "import sys, types\nsys.modules['json'] = types.ModuleType('json')\nsys.modules['math'].pi = 3",
        "import json, math; print(json.dumps([math.pi]))",
    ),
    "sys.path": ("import sys; sys.path.insert(0, '/tmp')", "import sys; print(len(sys.path))"),
    "the environment": (
        "import os; os.environ['LD_PRELOAD'] = '/tmp/x.so'; os.putenv('A', 'b')",
        "print(dict(os.environ))",
    ),
    "standard streams": ("import sys; sys.stdout = sys.stderr = None", "import sys; print(sys.stdout.name)"),
    "import hooks": ("import sys; sys.meta_path.clear(); sys.path_hooks.clear()", "import colorsys; print(1)"),
    "the recursion limit": ("import sys; sys.setrecursionlimit(50)", "import sys; print(sys.getrecursionlimit())"),
    "trace and profile": (
        "import sys, threading; sys.settrace(lambda *a: 1 / 0); threading.setprofile(lambda *a: 1 / 0)",
        "import sys; print(sys.gettrace(), sys.getprofile())",
    ),
    "the collector": (
        "import gc; gc.disable(); gc.set_threshold(1)",
        "import gc; print(gc.isenabled(), gc.get_threshold())",
    ),
    "signal handlers": (
        "import signal\nfor n in (1, 2, 10, 12, 13, 15, 17): signal.signal(n, signal.SIG_IGN)",
        "import signal; print([signal.getsignal(n) for n in (1, 10, 12, 13, 15, 17)])",
    ),
    "the signal mask": (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
        "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    ),
    "the file mask": ("os.umask(0o777)", "a = os.umask(0); print(a)"),
    "the working directory": ("os.chdir('/')", "print(os.path.basename(os.getcwd()), os.listdir('.'))"),
    "exit handlers": ("import atexit; atexit.register(print, 'boo')", "print(1)"),
    "limits": (
        "import resource\nfor n in range(16): attempt(resource.setrlimit, n, (0, 0))",
        "import resource; print([resource.getrlimit(n) for n in (0, 1, 4, 6, 7, 8, 9)])",
    ),
    "the worker's limits": (
        "import resource\nfor n in range(16): attempt(resource.prlimit, os.getppid(), n, (0, 0))",
        "import resource; print([resource.getrlimit(n) for n in (0, 1, 4, 6, 7, 8, 9)])",
    ),
    "the worker's processors": (
        "attempt(os.sched_setaffinity, os.getppid(), {0}); attempt(os.sched_setaffinity, 0, {0})",
        "print(os.sched_getaffinity(0))",
    ),
    "the worker's priority": (
        """
        attempt(os.setpriority, os.PRIO_PROCESS, os.getppid(), 19)
        for kind, target in ((os.PRIO_PGRP, 0), (os.PRIO_USER, 0), (os.PRIO_USER, os.getuid())):
            attempt(os.setpriority, kind, target, 19)
        os.nice(5)
        """,
        "print(os.getpriority(os.PRIO_PROCESS, 0))",
    ),
    "the worker's io priority": (
        "call('ioprio_set', 1, os.getppid(), 0x6000); call('ioprio_set', 2, 0, 0x6000)",
        "print(libc.syscall(NUMBERS['ioprio_get'], 1, 0))",
    ),
    "the worker's process group": (
        "attempt(os.setpgid, os.getppid(), os.getpid()); attempt(os.setpgid, 1, 0)",
        "print(os.getpgid(0) == os.getpid())",
    ),
    "dumpability": ("libc.prctl(4, 0, 0, 0, 0)", "print(libc.prctl(3, 0, 0, 0, 0))"),
    "the timer slack": ("libc.prctl(29, 1, 0, 0, 0)", "print(libc.prctl(30, 0, 0, 0, 0))"),
    "the process's name": (
        "libc.prctl(15, b'evil', 0, 0, 0)",
        "a = ctypes.create_string_buffer(16); libc.prctl(16, a); print(a.value)",
    ),
    "a timer": ("import signal; signal.setitimer(signal.ITIMER_REAL, 0.05)", "import time; time.sleep(0.2); print(1)"),
    "the warnings filter": (
        "import warnings; warnings.simplefilter('error')",
        "import warnings; print(len(warnings.filters))",
    ),
    "the decimal context": (
        "import decimal; decimal.getcontext().prec = 2",
        "import decimal; print(decimal.getcontext().prec)",
    ),
    "caches": (
        "import linecache, re; linecache.cache['main.py'] = (1, None, ['evil'], 'main.py')",
        "import linecache; print('main.py' in linecache.cache)",
    ),
    "System V and POSIX objects": (
        """
        call("shmget", 0x1234, 4096, 0o1666), call("msgget", 0x1234, 0o1666), call("semget", 0x1234, 1, 0o1666)
        call("mq_open", b'queue', 0o102, 0o666, 0)
        """,
        """
        print(call("shmget", 0x1234, 4096, 0), call("msgget", 0x1234, 0), call("semget", 0x1234, 1, 0))
        print(call("mq_open", b'queue', 0, 0, 0))
        """,
    ),
    "an abstract socket": (
        """
        import socket, time
        listener = attempt(socket.socket, socket.AF_UNIX)
        attempt(lambda: (listener.bind("\\0kept"), listener.listen()))
        os.fork() or time.sleep(60)
        """,
        "import socket; print(attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0kept')))",
    ),
}


@pytest.mark.parametrize("what", TAMPERING)
async def test_tampering_ends_with_its_run(one_worker: LocalSandbox, what: str) -> None:
    await leaves_no_trace(one_worker, *TAMPERING[what])


@pytest.mark.kernel("namespaces")
@pytest.mark.parametrize("one_worker", ["best"], indirect=True)
@pytest.mark.parametrize("what", TAMPERING)
async def test_tampering_ends_with_its_session(one_worker: LocalSandbox, what: str) -> None:
    await leaves_no_trace(Session(one_worker), *TAMPERING[what])


LOOK_AT_DIRECTORIES = """
import fcntl, tempfile
for place in sorted({os.getcwd(), tempfile.gettempdir()} | {p for p in PLACES if os.access(p, os.W_OK)}):
    status = os.stat(place)
    print(os.path.basename(place), oct(status.st_mode), status.st_nlink, status.st_uid, status.st_gid)
    print(sorted(name for name in os.listdir(place) if name != "main.py"), attempt(os.listxattr, place))
    flags = ctypes.c_long(0)
    handle = os.open(place, os.O_RDONLY)
    print(call("ioctl", handle, 0x80086601, ctypes.byref(flags)), flags.value & 0xFF)
    print(attempt(fcntl.flock, handle, fcntl.LOCK_EX | fcntl.LOCK_NB))
"""
PLACES = 'PLACES = ("/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/mnt", "/data")\n'

MARKS = {
    "modes": "for place in PLACES: attempt(os.chmod, place, 0o700); attempt(os.chmod, place, 0)",
    "owners": "for place in PLACES: attempt(os.chown, place, -1, os.getgid())",
    "attributes": "for place in PLACES: attempt(os.setxattr, place, 'user.mark', b'1')",
    "access lists": """
        import struct
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, perm, 0xFFFFFFFF)
            for tag, perm in ((1, 7), (4, 0), (16, 0), (32, 0)))
        for place in PLACES:
            attempt(os.setxattr, place, "system.posix_acl_default", acl)
            attempt(os.setxattr, place, "system.posix_acl_access", acl)
        """,
    "flags": """
        for place in PLACES:
            attempt(lambda: call("ioctl", os.open(place, os.O_RDONLY), 0x40086602, ctypes.byref(ctypes.c_long(0x40))))
        """,
    "files": """
        for place in PLACES:
            for name in ("a", ".hidden", "sem.x", "with space"):
                attempt(lambda: open(f"{place}/{name}", "w").close())
            attempt(os.makedirs, f"{place}/x/y/z")
        """,
    "shared memory": """
        from multiprocessing import shared_memory, Semaphore
        try:
            kept = shared_memory.SharedMemory("kept", create=True, size=4096)
            semaphore = Semaphore()
        except OSError:
            pass
        os._exit(0)
        """,
    "locks": """
        import fcntl
        for place in PLACES:
            attempt(lambda: fcntl.flock(os.open(place, os.O_RDONLY), fcntl.LOCK_EX))
        os.fork() or __import__("time").sleep(60)
        """,
}


def places_of(sandbox: LocalSandbox) -> str:
    if sandbox.level == "confined":
        return "import tempfile\nPLACES = (os.getcwd(), tempfile.gettempdir())\n"  # the others are the host's
    return PLACES


@pytest.mark.parametrize("what", MARKS)
async def test_directories_keep_no_marks(one_worker: LocalSandbox, what: str) -> None:
    places = places_of(one_worker)
    await leaves_no_trace(one_worker, places + dedent(MARKS[what]), places + dedent(LOOK_AT_DIRECTORIES))


@pytest.mark.kernel("namespaces")
@pytest.mark.parametrize("one_worker", ["best"], indirect=True)
@pytest.mark.parametrize("what", MARKS)
async def test_directories_keep_no_marks_for_the_next_session(one_worker: LocalSandbox, what: str) -> None:
    await leaves_no_trace(Session(one_worker), PLACES + dedent(MARKS[what]), PLACES + dedent(LOOK_AT_DIRECTORIES))


async def test_times_of_directories_tell_nothing_of_an_earlier_program(one_worker: LocalSandbox) -> None:
    """Not when it last made a file there, nor when it last looked."""
    places = places_of(one_worker)
    use = dedent("""
        for place in PLACES:
            os.mkdir(f"{place}/made-here")
            os.rmdir(f"{place}/made-here")
            os.listdir(place)
        """)
    look = "for place in PLACES:\n  it = os.stat(place); print(it.st_mtime_ns, it.st_ctime_ns, it.st_atime_ns)\n"
    for run_it in (run, last_of_each):
        before = await run_it(one_worker, f"import os, time\n{places}{use}{look}time.sleep(0.02)")
        after = await run(one_worker, f"import os\n{places}{look}")
        assert before.ok, before
        assert after.ok, after
        assert not set(before.stdout.split()) & set(after.stdout.split())


async def last_of_each(sandbox: LocalSandbox, code: str) -> Execution:
    found = [execution async for execution in sandbox.run_each(Program(code), [None] * 3)]
    return found[-1]


@pytest.mark.kernel("namespaces")
@pytest.mark.parametrize("one_worker", ["best"], indirect=True)
async def test_times_set_on_directories_are_gone(one_worker: LocalSandbox) -> None:
    await run(
        one_worker,
        f"import os\n{PLACES}for place in PLACES:\n  try: os.utime(place, (12345, 67890))\n  except OSError: pass",
    )
    execution = await run(one_worker, f"import os\n{PLACES}print(*[int(os.stat(place).st_mtime) for place in PLACES])")
    assert "67890" not in execution.stdout


async def test_neighbours_at_the_same_time_do_not_meet(any_way: Way) -> None:
    """Same names, same directories, at the same moment."""
    code = """
import os, tempfile, time
for place in (os.getcwd(), tempfile.gettempdir()):
    with open(os.path.join(place, "same"), "x") as file:
        file.write(token)
time.sleep(0.3)
print(*[open(os.path.join(place, "same")).read() == token for place in (os.getcwd(), tempfile.gettempdir())])
print(len(os.listdir(".")))
"""
    async with asyncio.TaskGroup() as group:
        both = [group.create_task(run(any_way, f"token = '{number}'\n{code}")) for number in range(2)]
    assert [task.result().stdout for task in both] == ["True True\n2\n"] * 2


async def test_a_run_after_a_killed_one_is_as_clean(one_worker: LocalSandbox) -> None:
    await run(one_worker, "open('left', 'w').write('x')\nwhile True: pass", run_seconds=0.3)
    execution = await run(one_worker, "import os; print(os.listdir('.'))")
    assert execution.stdout == "['main.py']\n"


async def test_sessions_do_not_see_each_other_or_what_was(one_worker: LocalSandbox) -> None:
    async with one_worker.session() as first:
        await first.run("secret = 1; open('mine', 'w').write('x'); import builtins; builtins.mark = 1")
        async with one_worker.session() as second:
            told = await second.run(
                "import os; print('secret' in globals(), 'mark' in dir(__builtins__), os.listdir('.'))"
            )
            assert told.stdout == "False False []\n"
    async with one_worker.session() as third:
        told = await third.run("import os; print('secret' in globals(), os.listdir('.'))")
        assert told.stdout == "False []\n"
    execution = await run(one_worker, "import os, builtins; print(hasattr(builtins, 'mark'), os.listdir('.'))")
    assert execution.stdout == "False ['main.py']\n"
