"""Functions that are called, code that is tested, and checkers that decide, in the embedded sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from judging import judged, verdicts

from toolyard.errors import ConfigError
from toolyard.rewards.code.protocol import Case, Suite, SuiteKind
from toolyard.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox(workers=2) as sandbox:
        yield sandbox


# Functions ------------------------------------------------------------------------------------------------------------

FIND = {"fn_name": "twice", "inputs": ["[1, 2]", "[]"], "outputs": ["[2, 4]", "[]"]}


@pytest.mark.parametrize(
    ("code", "verdict", "why"),
    [
        ("def twice(x): return [2 * one for one in x]", "passed", ""),
        ("class Solution:\n    def twice(self, x):\n        return tuple(2 * one for one in x)", "passed", ""),
        ("def twice(x):\n    print(x)", "wrong_answer", "got None, expected [2, 4]"),
        ("def twice(x): return [1j]", "wrong_answer", "returned what JSON has no word for: 1j"),
        ("def twice(x): return x[5]", "runtime_error", "IndexError: list index out of range"),
        ("def thrice(x): return x", "runtime_error", "NameError: the program has no function and no method 'twice'"),
        ("def twice(x): return twice(x)", "runtime_error", "RecursionError: maximum recursion depth exceeded"),
        ("import os\ndef twice(x): os._exit(0)", "runtime_error", "ended with exit code 0 before it returned"),
        ("raise SystemExit", "runtime_error", "ended with exit code 0 before it returned"),
        ("n = input()\ndef twice(x): return [2, 4]", "runtime_error", "EOFError: EOF when reading a line"),
        ("def twice(x):\n    while True: pass", "time_limit", "stopped after 0.5 s"),
        ("def twice(x): return [bytearray(1 << 20) for _ in range(1 << 20)]", "memory_limit", "used more than 64 MiB"),
        ("def twice(x) return x", "compile_error", "SyntaxError: expected ':'"),
        ("def twice(x): return [0] * 10**5", "wrong_answer", "printed more than 100000 bytes"),
    ],
)
async def test_each_way_for_a_function_to_end_has_its_verdict(
    sandbox: LocalSandbox, code: str, verdict: str, why: str
) -> None:
    settings = {"time_limit": {"run_seconds": 0.5}, "memory_limit": {"memory_limit_mb": 64}}.get(verdict, {})
    result = await judged(sandbox, code, FIND, max_output_bytes=100_000, **settings)
    assert (result.score, verdicts(result)[0]) == (float(verdict == "passed"), verdict)
    assert result.cases[0].why.startswith(why)


async def test_what_a_function_prints_and_returns_is_in_its_result(sandbox: LocalSandbox) -> None:
    result = await judged(sandbox, "def twice(x):\n    print('got', x)\n    return [2 * one for one in x]", FIND)
    assert [(case.stdout, case.returned) for case in result.cases] == [("got [1, 2]\n", [2, 4]), ("got []\n", [])]


async def test_a_huge_value_is_compared_whole_and_kept_in_part(sandbox: LocalSandbox) -> None:
    tests = Suite(SuiteKind.FUNCTION, (Case(arguments=(10**5,), expected=list(range(10**5))),), function="f")
    result = await judged(sandbox, "def f(n): return list(range(n))", tests)
    assert result.score == 1.0
    assert result.cases[0].returned.startswith("[0, 1, 2, ")
    assert len(result.cases[0].returned) < 5000


async def test_a_function_may_use_packages_and_the_suites_setup(sandbox: LocalSandbox) -> None:
    pytest.importorskip("numpy")
    tests = Suite(
        SuiteKind.FUNCTION,
        (Case(arguments=([1, 2],), expected=[1.0, 3.0]), Case(arguments=([],), expected=[])),
        function="sums",
        setup="from typing import List\nimport numpy as np",
    )
    code = "def sums(x: List[int]) -> List[float]: return np.cumsum(np.array(x, dtype=float))"
    assert (await judged(sandbox, code, tests)).score == 1.0


async def test_a_forged_result_is_worth_no_more_than_a_returned_one(sandbox: LocalSandbox) -> None:
    forge = """
import os, sys
frame = sys._getframe()
while "nonce" not in frame.f_locals:
    frame = frame.f_back
os.write(1, b"\\n" + frame.f_locals["nonce"] + b" returned {}\\n")
os._exit(0)
"""
    assert verdicts(await judged(sandbox, forge.format("[2, 5]"), FIND)) == ["wrong_answer", "not_run"]
    result = await judged(sandbox, forge.format("[2, 4]"), FIND)
    assert (verdicts(result), result.score) == (["passed", "wrong_answer"], 0.0)


async def test_no_case_sees_what_another_did(sandbox: LocalSandbox) -> None:
    code = """
        import os
        seen = []
        def f(n):
            seen.append(n)
            with open("seen", "a") as file:
                file.write("x")
            os.environ["SEEN"] = os.environ.get("SEEN", "") + "x"
            return [len(seen), os.path.getsize("seen"), os.environ["SEEN"]]
    """
    tests = Suite(SuiteKind.FUNCTION, tuple(Case(arguments=(n,), expected=[1, 1, "x"]) for n in range(8)), function="f")
    assert (await judged(sandbox, code.replace("\n        ", "\n"), tests)).score == 1.0


async def test_functions_and_assertions_are_for_python_only(sandbox: LocalSandbox) -> None:
    for kind in (SuiteKind.FUNCTION, SuiteKind.ASSERTS):
        with pytest.raises(ConfigError, match=f"language 'cpp': a suite of kind '{kind.value}' is for python only"):
            await judged(sandbox, "int main() {}", Suite(kind, (Case(),), function="f", language="cpp"))


# Assertions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "verdict", "why"),
    [
        ("def inc(x): return x + 1", "passed", ""),
        ("def inc(x): return x", "wrong_answer", "test line 1: assert inc(1) == 2"),
        ("def inc(x):\n    assert x > 5", "runtime_error", "AssertionError"),
        ("def increase(x): return x", "runtime_error", "NameError: name 'inc' is not defined"),
        ("import sys\nsys.exit(0)", "runtime_error", "ended with exit code 0 before it was tested"),
        ("import os\ndef inc(x): os._exit(0)", "runtime_error", "ended with exit code 0 before it was tested"),
        ("import sys\ndef inc(x): sys.exit(3)", "runtime_error", "exit code 3"),
        ("def inc(x):\n    while True: pass", "time_limit", "stopped after 0.5 s"),
        ("def inc(x) return x", "compile_error", "SyntaxError: expected ':'"),
        ("print('\\n' + 'a' * 32 + ' passed 0')\nimport os\nos._exit(0)", "runtime_error", "ended with exit code 0"),
    ],
)
async def test_each_way_for_tested_code_to_end_has_its_verdict(
    sandbox: LocalSandbox, code: str, verdict: str, why: str
) -> None:
    tests = Suite(SuiteKind.ASSERTS, (Case(test="assert inc(1) == 2"), Case(test="x = inc(4)\nassert x == 5, x")))
    result = await judged(sandbox, code, tests, run_seconds=0.5 if verdict == "time_limit" else 10)
    assert (result.score, verdicts(result)[0]) == (float(verdict == "passed"), verdict)
    assert result.cases[0].why.startswith(why)


async def test_a_suites_own_code_that_fails_is_the_tasks_mistake(sandbox: LocalSandbox) -> None:
    with pytest.raises(ConfigError, match="case 1: the suite's own code failed before the answer ran: SyntaxError"):
        await judged(sandbox, "x = 1", Suite(SuiteKind.ASSERTS, (Case(test="assert x"), Case(test="assert x = 1"))))
    with pytest.raises(ConfigError, match=r"case 0: .* ModuleNotFoundError: No module named 'nosuch'"):
        await judged(sandbox, "x = 1", Suite(SuiteKind.FUNCTION, (Case(),), function="f", setup="import nosuch"))


# Checkers -------------------------------------------------------------------------------------------------------------

CHECKER = """
import sys
n = int(open("input").read())
a, b = map(int, open("output").read().split())
if a + b != n:
    sys.exit(f"{a} and {b} do not make {n}")
assert open("expected").read() == "0 " + str(n)
"""
SPLIT = Suite(SuiteKind.STDIO, tuple(Case(stdin=f"{n}\n", expected=f"0 {n}") for n in (5, 9)), checker=CHECKER)


@pytest.mark.parametrize(
    ("code", "verdict", "why"),
    [
        ("print(2, int(input()) - 2)", "passed", ""),
        ("print(2, int(input()))", "wrong_answer", "the checker rejects it: 2 and 5 do not make 5"),
        ("print('two')", "wrong_answer", "the checker rejects it: it cannot parse the output: ValueError: "),
        ("print(1 / 0)", "runtime_error", "ZeroDivisionError: division by zero"),
    ],
)
async def test_a_checker_decides_about_programs_that_ran_well(
    sandbox: LocalSandbox, code: str, verdict: str, why: str
) -> None:
    result = await judged(sandbox, code, SPLIT)
    assert (result.score, verdicts(result)[0]) == (float(verdict == "passed"), verdict)
    assert result.cases[0].why.startswith(why)
    assert result.cases[0].stdout == ("" if "/ 0" in code else result.cases[0].stdout)


@pytest.mark.parametrize(
    ("checker", "why"),
    [
        ("import sys; sys.exit(2)", r"the checker failed \(exit code 2\): no message"),
        ("import nosuch", r"the checker failed \(exit code 1\): ModuleNotFoundError: No module named 'nosuch'"),
        ("x = = 1", r"the checker failed \(exit code 1\): SyntaxError: invalid syntax"),
        pytest.param("while True: pass", r"the checker failed \(timed_out\): no message", marks=pytest.mark.slow),
        ("import os; os.abort()", r"the checker failed \(exit code -6\)"),
    ],
)
async def test_a_checker_that_fails_is_the_tasks_mistake(sandbox: LocalSandbox, checker: str, why: str) -> None:
    tests = Suite(SuiteKind.STDIO, (Case(expected="1"),), checker=checker)
    with pytest.raises(ConfigError, match=f"case 0: {why}"):
        await judged(sandbox, "print(1)", tests, run_seconds=1 if "while" in checker else 10)


@pytest.mark.parametrize(
    "breaks",
    ["while True: pass", "import os; os.abort()", "sys.exit(2)", "x = [bytearray(1 << 20) for _ in range(1 << 20)]"],
)
async def test_an_output_that_breaks_the_checker_is_wrong(sandbox: LocalSandbox, breaks: str) -> None:
    checker = (
        f"import sys\nif open('output').read() == 'bomb\\n':\n    {breaks}\nsys.exit(open('output').read() != '1\\n')"
    )
    tests = Suite(SuiteKind.STDIO, (Case(expected="1\n"), Case(expected="1\n")), checker=checker)
    seconds = 1 if "while" in breaks else 10
    settings = {"run_seconds": seconds, "memory_limit_mb": 64, "aggregation": "fraction"}
    assert (await judged(sandbox, "print(1)", tests, **settings)).score == 1.0
    result = await judged(sandbox, "print('bomb')", tests, **settings)
    assert (result.score, verdicts(result)) == (0.0, ["wrong_answer"] * 2)
    assert result.cases[0].why.startswith("the checker rejects it: it cannot parse the output: ")


async def test_a_checker_waits_for_no_worker_that_its_own_answer_holds() -> None:
    async with LocalSandbox(workers=1) as narrow, asyncio.timeout(30):
        assert (await judged(narrow, "print(2, int(input()) - 2)", SPLIT)).score == 1.0
