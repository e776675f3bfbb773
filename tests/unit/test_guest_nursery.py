"""New objects side by side: an allocator that must never be wrong. It is tried in processes of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from toolyard.sandbox.guest.kernel import MACHINE

pytestmark = pytest.mark.skipif(
    MACHINE != "x86_64" or sys.version_info[:2] > (3, 13),
    reason="there is no nursery on this architecture, or in this Python",
)

BEGIN = """
import ctypes, gc, random, sys
from toolyard.sandbox.guest import nursery

nursery.install()
start = nursery._nursery._end - nursery._SIZE

def inside(address):
    return start <= address < nursery._nursery._end
"""


def run(code: str, *options: str, **environment: str) -> str:
    program = BEGIN + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=100, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_whoever_asks_gets_memory_that_is_nobody_elses_and_keeps_its_bytes() -> None:
    """Random calls of the interpreter's allocation functions, all sizes about the borders, checked byte by byte."""
    found = run("""
        from ctypes import c_size_t as size_t, c_void_p as pointer, memmove, string_at
        sizes = (1, 8, 15, 16, 17, 31, 32, 33, 100, 511, 512, 513, 1008, 1023, 1024, 1025, 5000)
        api = ctypes.pythonapi
        for function in (api.PyMem_Malloc, api.PyMem_Calloc, api.PyMem_Realloc):
            function.restype = pointer
        dice, live, ours = random.Random(7), {}, 0

        def put(address, content):
            global ours
            assert address % 16 == 0 and address not in live
            memmove(address, content, len(content))
            live[address] = content
            ours += inside(address)

        nursery.open_up()
        for turn in range(60_000):
            if turn % 20_000 == 10_000:
                nursery._nursery.close()
            elif turn % 20_000 == 0:
                nursery.open_up()
            what, size = dice.random(), dice.choice(sizes)
            if what < 0.2 or not live:
                put(api.PyMem_Malloc(size_t(size)), dice.randbytes(size))
            elif what < 0.35:
                count = dice.choice((1, 2, 3))
                address = api.PyMem_Calloc(size_t(count), size_t(size))
                assert string_at(address, count * size) == bytes(count * size)
                put(address, dice.randbytes(count * size))
            else:
                address = dice.choice(list(live)[-40:])
                content = live.pop(address)
                assert string_at(address, len(content)) == content
                if what < 0.6:
                    kept = content[:size]
                    address = api.PyMem_Realloc(pointer(address), size_t(size))
                    assert string_at(address, len(kept)) == kept
                    put(address, dice.randbytes(size))
                else:
                    api.PyMem_Free(pointer(address))
        for address, content in live.items():
            assert string_at(address, len(content)) == content
        print(ours > 1000)
    """)
    assert found == "True\n"


def test_what_is_made_while_it_is_open_lies_side_by_side() -> None:
    found = run("""
        nursery.open_up()
        n = len(sys.argv)  # what the compiler can work out was made before
        made = [object(), n + 10**9, {n}, str(n) * 99, bytes(900 * n), lambda: n, range(n)]
        places = [id(one) for one in made]
        nursery._nursery.close()
        elsewhere = [object() for _ in range(1000)]
        print(all(map(inside, places)), max(places) - min(places) < 4096, inside(id(elsewhere[-1])))
    """)
    assert found == "True True False\n"


def test_when_it_is_full_the_interpreter_goes_on_as_ever() -> None:
    found = run("""
        nursery.open_up()
        kept = [str(number) * 3 for number in range(20_000)]
        print(sum(inside(id(one)) for one in kept) > 200, inside(id(kept[-1])))
        del kept[::2]
        gc.collect()
        print(kept == [str(number) * 3 for number in range(1, 20_000, 2)])
    """)
    assert found == "True False\nTrue\n"


def test_what_is_given_back_is_used_again() -> None:
    found = run("""
        nursery.open_up()
        for number in range(200_000):
            [number, number + 10**9, str(number)]
        print(inside(id(str(number))))
    """)
    assert found == "True\n"


def test_threads_and_forks_can_live_with_it() -> None:
    found = run("""
        import os, threading
        nursery.open_up()

        def work():
            for number in range(30_000):
                [{"a": number}, str(number), number * 10**9]

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        child = os.fork()
        if not child:
            work()
            os._exit(7)
        for thread in threads:
            thread.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """, "-Wignore")  # fmt: skip
    assert found == "7\n"


def test_a_function_and_the_built_in_ones_it_calls_are_copied_into_it() -> None:
    found = run("""
        import math
        sine, some = math.sin, frozenset({1, 2})

        def function(x):
            return sine(x), x in some, len("ab")

        with nursery.within():
            copy = nursery.copy_of(function)
        parts = copy, copy.__code__, copy.__globals__["sine"], copy.__globals__["some"]
        print(copy(0.0), [inside(id(part)) for part in parts])
        del copy, parts
        gc.collect()
        print(function(1))
    """)
    assert found == "(0.0, False, 2) [True, True, True, True]\n(0.8414709848078965, True, 2)\n"


@pytest.mark.parametrize(("options", "environment"), [((), {"PYTHONMALLOC": "debug"}), (("-Xtracemalloc",), {})])
def test_an_allocator_that_counts_or_checks_sees_everything(
    options: tuple[str, ...], environment: dict[str, str]
) -> None:
    program = "from toolyard.sandbox.guest import nursery; nursery.install(); print(nursery._nursery)"
    done = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "None\n", done.stderr
