"""Programs over stdin and stdout, scored in the embedded sandbox: every verdict, every aggregation, many at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import pytest_asyncio
from judging import copies, fenced, judge_of, judged, verdicts

from toolyard.errors import ConfigError
from toolyard.limits.local import LocalLimiter
from toolyard.rewards.code.judge import CodeJudge
from toolyard.rewards.code.protocol import Case, CaseResult, CodeResult, Comparison, Submission, Suite, SuiteKind
from toolyard.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
SUM = "print(sum(map(int, input().split())))"
CPP_SUM = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox(workers=2) as sandbox:
        yield sandbox


# Programs that read stdin ---------------------------------------------------------------------------------------------


async def test_a_right_program_passes_every_case_and_says_what_it_took(sandbox: LocalSandbox) -> None:
    result = await judged(sandbox, SUM, ADD)
    assert (result.score, result.why, verdicts(result)) == (1.0, "", ["passed"] * 3)
    assert (result.extracted.code, result.extracted.blocks) == (f"{SUM}\n", 1)
    for case, expected in zip(result.cases, ADD["outputs"], strict=True):
        assert (case.stdout, case.stderr, case.exit_code, case.why, case.tries) == (expected, "", 0, "", 1)
        assert case.wall_seconds > 0
    assert result.wall_seconds >= sum(case.wall_seconds for case in result.cases) / 2


@pytest.mark.parametrize(
    ("code", "verdict", "why"),
    [
        ("print(3)", "wrong_answer", "line 1: got '3', expected '7'"),
        ("print(1 / 0)", "runtime_error", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "runtime_error", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "runtime_error", "died of SIGSEGV"),
        ("while True: pass", "time_limit", "stopped after 0.5 s"),
        ("import time; time.sleep(9)", "time_limit", "stopped after 0.5 s"),
        ("x = [bytearray(1 << 20) for _ in range(1 << 20)]", "memory_limit", "used more than 64 MiB"),
        ("x = bytearray(1 << 60)", "memory_limit", "MemoryError"),
        ("print(x", "compile_error", "SyntaxError: '(' was never closed"),
        ("if True:\nprint(1)", "compile_error", "IndentationError: expected an indented block"),
        ("exec('x = = 1')", "runtime_error", "SyntaxError: invalid syntax"),
        ("raise SyntaxError('mine')", "runtime_error", "SyntaxError: mine"),
        ("import sys; sys.exit('SyntaxError: in the input')", "runtime_error", "SyntaxError: in the input"),
        ("x = '\0'", "compile_error", "SyntaxError: source code string cannot contain null bytes"),
        ("x = " + "+".join("1" * 90_000), "compile_error", "RecursionError: "),
        ("# coding: klingon", "compile_error", "SyntaxError: unknown encoding: klingon"),
        ("while True: print('x' * 10000)", "runtime_error", "wrote more than"),
        ("open('big', 'wb').truncate(1 << 40)", "runtime_error", "OSError: [Errno 27] File too large"),
        ("", "not_run", ""),
    ],
)
async def test_each_way_for_a_python_program_to_end_has_its_verdict(
    sandbox: LocalSandbox, code: str, verdict: str, why: str
) -> None:
    seconds = 0.5 if verdict == "time_limit" else 10
    limits = {"run_seconds": seconds, "memory_limit_mb": 64, "max_output_bytes": 100_000}
    result = await judged(sandbox, code, ADD, **limits, aggregation="fraction")
    assert result.score == (1 / 3 if verdict == "wrong_answer" else 0.0)
    assert verdicts(result)[1] == verdict
    assert result.cases[1].why.startswith(why)


@pytest.mark.toolchain("cpp")
@pytest.mark.parametrize(
    ("code", "verdict", "why"),
    [
        (CPP_SUM, "passed", ""),
        (CPP_SUM.replace("+", "-"), "wrong_answer", "line 1: got '-1', expected '3'"),
        ("int main() { return 5; }", "runtime_error", "exit code 5"),
        ("#include <cstdlib>\nint main() { abort(); }", "runtime_error", "died of SIGABRT"),
        ("int main() { for (volatile int i = 0;; i++); }", "time_limit", "stopped after 0.5 s"),
        (
            "#include <cstdlib>\n#include <cstring>\nint main() { for (;;) memset(malloc(1 << 20), 1, 1 << 20); }",
            "memory_limit",
            "used more than 64 MiB",
        ),
        (
            "#include <cstdio>\n#include <vector>\nint main() { std::vector<char> x(1ll << 60); puts(x.data()); }",
            "memory_limit",
            "what(): std::bad_",
        ),
        ("int main() { return x; }", "compile_error", "main.cpp:1:21: error: ‘x’ was not declared"),
    ],
)
async def test_each_way_for_a_cpp_program_to_end_has_its_verdict(
    sandbox: LocalSandbox, code: str, verdict: str, why: str
) -> None:
    seconds = 0.5 if verdict == "time_limit" else 10
    result = await judged(sandbox, code, ADD, "cpp", run_seconds=seconds, memory_limit_mb=64)
    assert (result.score, verdicts(result)[0]) == (float(verdict == "passed"), verdict)
    assert result.cases[0].why.startswith(why)


@pytest.mark.toolchain("cpp")
async def test_a_compiler_that_takes_too_long_is_a_compile_error(sandbox: LocalSandbox) -> None:
    endless = "template <int N> struct A { A<N + 1> a; int b = N + A<N + 2>().b; };\n" + CPP_SUM
    slow = "#include <bits/stdc++.h>\n#include <regex>\n" + CPP_SUM.replace("main", "main /* slow */")
    for code in (endless, slow):
        result = await judged(sandbox, code, ADD, "cpp", compile_seconds=0.01)
        assert (result.score, set(verdicts(result))) == (0.0, {"compile_error"})
        assert result.why == "compile_error: the compiler was stopped after 0.01 s"


async def test_what_does_not_compile_is_tried_once_and_told_for_every_case(sandbox: LocalSandbox) -> None:
    before = sandbox.statistics().executions
    result = await judged(sandbox, "x = = 1", copies(50), aggregation="fraction", cases_per_run=5)
    after = sandbox.statistics().executions
    assert verdicts(result) == ["compile_error"] * 50
    assert len({case.stderr for case in result.cases}) == 1
    assert sum(after.values()) - sum(before.values()) == 1


async def test_a_program_that_pretends_not_to_compile_is_told_by_what_it_did_before(sandbox: LocalSandbox) -> None:
    code = """
import sys
n = int(input())
print(n)
if n == 2:
    sys.exit('  File "main.py", line 1\\nSyntaxError: pretended')
"""
    result = await judged(sandbox, code, copies(4), aggregation="fraction")
    assert (result.score, verdicts(result)[2]) == (0.75, "runtime_error")


async def test_output_beyond_what_is_kept_cannot_be_right(sandbox: LocalSandbox) -> None:
    tests = Suite(SuiteKind.STDIO, (Case(expected="x" * 1000),))
    assert (await judged(sandbox, "print('x' * 1000)", tests, max_output_bytes=2000)).score == 1.0
    result = await judged(sandbox, "print('x' * 1000 + '\\n' * 5000)", tests, max_output_bytes=2000)
    assert (result.score, result.why) == (0.0, "case 0: wrong_answer: printed more than 2000 bytes")


async def test_large_outputs_are_compared_whole_and_kept_in_part(sandbox: LocalSandbox) -> None:
    expected = "\n".join(map(str, range(300_000)))
    tests = Suite(SuiteKind.STDIO, (Case(stdin="0", expected=expected), Case(stdin="1", expected=expected)))
    code = "n = int(input())\nprint(*range(299_999), 299_999 + n, sep='\\n')"
    result = await judged(sandbox, code, tests)
    assert verdicts(result) == ["passed", "wrong_answer"]
    assert result.cases[1].why == "line 300000: got '300000', expected '299999'"
    assert len(result.cases[0].stdout) < 70_000
    assert "characters omitted" in result.cases[0].stdout
    assert result.cases[0].stdout.endswith("\n299999\n")


async def test_large_inputs_are_sent_in_portions(sandbox: LocalSandbox) -> None:
    sizes = [7, 10, 1, 17]
    text = "x" * (max(sizes) << 20)
    cases = tuple(Case(stdin=text[: size << 20], expected=str(size << 20)) for size in sizes)
    result = await judged(sandbox, "import sys\nprint(len(sys.stdin.read()))", Suite(SuiteKind.STDIO, cases))
    assert verdicts(result) == ["passed"] * 4


async def test_a_suites_own_comparison_goes_before_the_settings(sandbox: LocalSandbox) -> None:
    tests = Suite(SuiteKind.STDIO, (Case(expected="0.333"),), comparison=Comparison(absolute_tolerance=0.01))
    assert (await judged(sandbox, "print(1 / 3)", tests)).score == 1.0
    loose = Suite(SuiteKind.STDIO, (Case(expected="0.333"),))
    assert (await judged(sandbox, "print(1 / 3)", loose)).score == 0.0
    assert (await judged(sandbox, "print(1 / 3)", loose, comparison=Comparison(absolute_tolerance=0.01))).score == 1.0


# The program in the answer --------------------------------------------------------------------------------------------


async def test_an_answer_without_a_program_is_worth_nothing_and_runs_nothing(sandbox: LocalSandbox) -> None:
    before = sandbox.statistics().executions
    async with judge_of(sandbox) as judge:
        told: list[CaseResult] = []
        result = await judge.judge("It is three.", ADD, on_case=told.append)
        assert (result.score, result.why) == (0.0, "no program in the answer: no fenced block")
        assert verdicts(result) == ["not_run"] * 3
        assert told == list(result.cases)
        result = await judge.judge("```python\n```", ADD)
        assert (result.score, result.why) == (0.0, "no program in the answer: its fenced blocks are empty")
    assert sandbox.statistics().executions == before


async def test_without_fences_the_whole_answer_may_be_the_program(sandbox: LocalSandbox) -> None:
    async with judge_of(sandbox, without_fences="whole") as judge:
        assert (await judge.judge(SUM, ADD)).score == 1.0


@pytest.mark.toolchain("cpp")
async def test_the_language_is_the_suites_then_the_answers_then_the_settings(sandbox: LocalSandbox) -> None:
    async with judge_of(sandbox, language="c++") as judge:
        assert (await judge.judge(fenced(CPP_SUM, ""), ADD)).score == 1.0
        assert (await judge.judge(fenced(SUM, "py"), ADD)).score == 1.0
        assert (await judge.judge(fenced(SUM, "haskell"), ADD)).why.startswith("compile_error: main.cpp")
        suite = Suite(SuiteKind.STDIO, (Case(stdin="1 2", expected="3"),), language="python3")
        assert (await judge.judge(fenced(SUM, ""), suite)).score == 1.0


async def test_a_model_that_names_a_language_we_do_not_have_gets_no_score(sandbox: LocalSandbox) -> None:
    async with judge_of(sandbox) as judge:
        result = await judge.judge(fenced("println(1)", "julia"), ADD)
        assert (result.score, set(verdicts(result))) == (None, {"infrastructure"})
        assert "ToolchainMissingError: Julia needs 'julia'" in result.why
        with pytest.raises(ConfigError, match="Julia needs 'julia'"):
            await judge.judge(fenced(SUM), Suite(SuiteKind.STDIO, (Case(expected=""),), language="julia"))
        with pytest.raises(ConfigError, match="unknown language 'klingon'"):
            await judge.judge(fenced(SUM), Suite(SuiteKind.STDIO, (Case(expected=""),), language="klingon"))


# Aggregations ---------------------------------------------------------------------------------------------------------

HALF = "n = int(input())\nprint(n if n % 2 == 0 else -n)"
LATE = "n = int(input())\nprint(n if n < 7 else -n)"


@pytest.mark.parametrize(
    ("settings", "code", "score", "ran"),
    [
        ({}, HALF, 0.0, 2),
        ({"stop_at_first_failure": False}, HALF, 0.0, 20),
        ({"aggregation": "fraction"}, HALF, 0.5, 20),
        ({"aggregation": "fraction"}, LATE, 0.35, 20),
        ({"aggregation": "fraction", "stop_at_first_failure": True}, HALF, 0.05, 2),
        ({"aggregation": "fraction", "stop_at_first_failure": True}, LATE, 0.35, 8),
        ({"aggregation": "continuous"}, LATE, 0.7, 10),
        ({"aggregation": "continuous", "first_n": 4}, LATE, 1.0, 4),
        ({"aggregation": "continuous", "first_n": 400}, LATE, 0.35, 20),
        ({"aggregation": "continuous", "stop_at_first_failure": True}, HALF, 0.1, 2),
    ],
)
@pytest.mark.parametrize("cases_per_run", [1, 3, 16])
async def test_cases_are_run_and_counted_as_the_aggregation_says(
    sandbox: LocalSandbox, settings: dict[str, Any], code: str, score: float, ran: int, cases_per_run: int
) -> None:
    result = await judged(sandbox, code, copies(20), cases_per_run=cases_per_run, **settings)
    assert result.score is not None
    assert math.isclose(result.score, score)
    wrong = {number for number in range(20) if (number % 2 if code is HALF else number >= 7)}
    expected = ["wrong_answer" if number in wrong else "passed" for number in range(ran)] + ["not_run"] * (20 - ran)
    assert verdicts(result) == expected, "and it does not matter which worker was first"
    assert result.why == ("" if score == 1 else f"case {min(wrong)}: wrong_answer: {result.cases[min(wrong)].why}")


async def test_many_cases_keep_their_order_on_several_workers(sandbox: LocalSandbox) -> None:
    told: list[CaseResult] = []
    async with judge_of(sandbox, cases_per_run=7, aggregation="fraction") as judge:
        code = "import time\nn = int(input())\ntime.sleep(0.02 * (n % 5 == 0))\nprint(n if n != 50 else 'x')"
        result = await judge.judge(fenced(code), copies(100), on_case=told.append)
    assert [case.stdout for case in result.cases] == [f"{n}\n" if n != 50 else "x\n" for n in range(100)]
    assert result.score == 0.99
    assert told == list(result.cases), "each is told once, in order"


async def watched(sandbox: LocalSandbox, judging: Coroutine[Any, Any, CodeResult]) -> tuple[CodeResult, list[int]]:
    """And how many workers were busy meanwhile, as often as one looks."""
    busy: list[int] = []
    async with asyncio.TaskGroup() as group:
        task = group.create_task(judging)
        while not task.done():
            busy.append(sandbox.statistics().busy)
            await asyncio.sleep(0.02)
    return task.result(), busy


async def test_a_lone_answer_uses_all_free_workers(sandbox: LocalSandbox) -> None:
    code = "import time\ntime.sleep(0.1)\nprint(input())"
    result, busy = await watched(sandbox, judged(sandbox, code, copies(20)))
    assert result.score == 1.0
    assert busy.count(2) > busy.count(1), "only the first runs alone"


@pytest.mark.slow
async def test_endless_loops_are_spread_over_the_workers(sandbox: LocalSandbox) -> None:
    judging = judged(sandbox, "while True: pass", copies(9), run_seconds=0.3, aggregation="fraction")
    result, busy = await watched(sandbox, judging)
    assert verdicts(result) == ["time_limit"] * 9
    assert busy.count(2) > busy.count(1), "only the first runs alone"


async def test_a_failure_stops_later_cases_that_are_running_on_other_workers(sandbox: LocalSandbox) -> None:
    code = (
        "import time\nn = int(input())\ntime.sleep(0.3 if n == 1 else 60 if n > 9 else 0)\nprint(n if n != 1 else 'x')"
    )
    result = await judged(sandbox, code, copies(20), run_seconds=90)
    assert verdicts(result) == ["passed", "wrong_answer", *["not_run"] * 18]
    assert result.wall_seconds < 20


# Many answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
async def test_a_thousand_answers_are_judged_in_order_with_progress(sandbox: LocalSandbox) -> None:
    submissions = [
        Submission(fenced(f"print({number})") if number % 4 else "no program", copies(2), tenant=f"t{number % 3}")
        for number in range(1000)
    ]
    seen: list[tuple[int, int]] = []
    async with judge_of(sandbox, aggregation="fraction") as judge:
        results = await judge.judge_all(submissions, progress=lambda done, total: seen.append((done, total)))
    assert [result.score for result in results] == [0.5 if number == 1 else 0.0 for number in range(1000)]
    assert seen == [(number, 1000) for number in range(1, 1001)]
    assert [result.extracted.blocks for result in results] == [int(number % 4 > 0) for number in range(1000)]


async def test_no_answers_have_no_results(sandbox: LocalSandbox) -> None:
    async with judge_of(sandbox) as judge:
        assert await judge.judge_all([]) == []


async def test_tenants_take_turns(sandbox: LocalSandbox) -> None:
    order: list[str] = []
    many = [Submission(fenced(SUM), ADD, tenant="many") for _ in range(60)]
    few = [Submission(fenced(SUM), ADD, tenant="few") for _ in range(3)]
    limiter = LocalLimiter(4)
    async with CodeJudge(sandbox=sandbox, limiter=limiter) as judge:

        def note(done: int, total: int) -> None:
            granted = limiter.read_statistics().tenants
            order.append("few" if granted.get("few") and granted["few"].granted == 3 else "many")

        await judge.judge_all([*many, *few], progress=note)
    assert order.index("few") < 20


async def test_one_bad_task_does_not_stop_the_others(sandbox: LocalSandbox, caplog: pytest.LogCaptureFixture) -> None:
    submissions = [
        Submission(fenced(SUM), ADD),
        Submission(fenced(SUM), {"inputs": ["1"], "outputs": []}),
        Submission(fenced(SUM), Suite(SuiteKind.STDIO, (Case(expected=""),), language="klingon")),
        Submission(fenced("print(1)"), Suite(SuiteKind.STDIO, (Case(expected="1"),), checker="1 / 0")),
        Submission(fenced(SUM), ADD),
    ]
    async with judge_of(sandbox) as judge:
        results = await judge.judge_all(submissions)
    assert [result.score for result in results] == [1.0, None, None, None, 1.0]
    assert "unknown language 'klingon'" in results[2].why
    assert "case 0: the checker failed" in results[3].why
    assert "3 of 5 answers have no score; submission 1: " in caplog.text


async def test_a_progress_callback_that_raises_ends_it_with_its_own_error(sandbox: LocalSandbox) -> None:
    def stop(*_: Any) -> None:
        raise RuntimeError("enough")

    async with judge_of(sandbox) as judge:
        with pytest.raises(RuntimeError, match="enough"):
            await judge.judge_all([Submission(fenced(SUM), ADD)] * 20, progress=stop)
        with pytest.raises(RuntimeError, match="enough"):
            await judge.judge(fenced(SUM), ADD, on_case=stop)
    assert sandbox.statistics().busy == 0


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"agregation": "all"}, "unknown option 'agregation'; known: aggregation, "),
        ({"aggregation": "most"}, "option 'aggregation': .*; given: 'most'"),
        ({"run_seconds": 0}, "option 'run_seconds': .*; given: '0'"),
        ({"language": "klingon"}, "option 'language': unknown language 'klingon'"),
        ({"sandbox_fusion_url": "nowhere"}, "option 'sandbox_fusion_url': sandbox URL 'nowhere'"),
        ({"comparison": {"mode": "words"}}, "option 'comparison.mode': "),
    ],
)
async def test_a_wrong_setting_is_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        CodeJudge(**settings)


async def test_a_suite_without_cases_is_the_tasks_mistake(sandbox: LocalSandbox) -> None:
    with pytest.raises(ConfigError, match="there are none"):
        await judged(sandbox, SUM, Suite(SuiteKind.STDIO, ()))
