"""Our version of verl's scorer, with the call to the service replaced: codes, metadata, order, and scores."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolyard.errors import ConfigError, RewardError
from toolyard.rewards import sandbox_fusion
from toolyard.rewards.sandbox_fusion import check_correctness, compute_score
from toolyard.rewards.sandbox_fusion.program import calling, program_in

Answer = tuple[dict[str, Any] | None, str | None]

KEYS = [
    "case_index", "input", "expected_output", "api_request_error", "api_response", "status", "stdout", "stderr",
    "exit_code", "duration", "compile_duration", "compile_stderr", "api_status", "compile_status", "run_status",
]  # fmt: skip


def stage(status: str = "Finished", code: int | None = 0, stdout: str = "", stderr: str = "") -> dict[str, Any]:
    return {"status": status, "return_code": code, "stdout": stdout, "stderr": stderr, "execution_time": 0.5}


def ok(stdout: str) -> Answer:
    return {"status": "Success", "message": "", "compile_result": None, "run_result": stage(stdout=stdout)}, None


BROKEN: Answer = (
    {"status": "Failed", "compile_result": stage(code=1, stderr="expected ';'"), "run_result": None},
    None,
)


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Answer]], list[dict[str, Any]]]:
    """Put a function in place of the call; what it was called with."""

    def replace(function: Callable[..., Answer]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def call(**arguments: Any) -> Answer:
            calls.append(arguments)
            return function(**arguments)

        monkeypatch.setattr("toolyard.rewards.sandbox_fusion.call_sandbox_api", call)
        return calls

    return replace


def by_input(**answers: Answer) -> Callable[..., Answer]:
    return lambda stdin, **_: answers[stdin]


def cases(*inputs: Any, outputs: list[Any] | None = None) -> dict[str, Any]:
    return {"inputs": list(inputs), "outputs": outputs or [str(one) for one in inputs]}


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            compute_score,
            "sandbox_fusion_url concurrent_semaphore memory_limit_mb completion test_cases continuous timeout",
        ),
        (
            check_correctness,
            "sandbox_fusion_url in_outs generation timeout memory_limit_mb language concurrent_semaphore",
        ),
        (
            sandbox_fusion._process_single_case,
            (
                "case_index stdin_data expected_output sandbox_fusion_url generation timeout memory_limit_mb language "
                "concurrent_semaphore fn_name"
            ),
        ),
        (
            sandbox_fusion.call_sandbox_api,
            "sandbox_fusion_url code stdin compile_timeout run_timeout memory_limit_mb language",
        ),
    ],
)
def test_arguments_have_verls_names_in_verls_order(function: Callable[..., Any], names: str) -> None:
    assert list(inspect.signature(function).parameters) == names.split()


def test_the_service_is_asked_with_all_that_verl_says(replace: Any) -> None:
    calls = replace(lambda **_: ok("1"))
    check_correctness("http://there", cases("1"), "print(1)", 7, 512, "cpp")
    assert calls == [
        {
            "sandbox_fusion_url": "http://there",
            "code": "print(1)",
            "stdin": "1",
            "compile_timeout": 7,
            "run_timeout": 7,
            "memory_limit_mb": 512,
            "language": "cpp",
        }
    ]


# Codes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "result", "status"),
    [
        (ok("1"), True, "success"),
        (ok("1\n"), True, "success"),
        (ok("2"), False, "wrong_answer"),
        (ok(" 1"), False, "wrong_answer"),
        (({"status": "Success", "run_result": stage(stdout="1")}, None), True, "success"),
        (({"status": "Success", "run_result": {"status": "Finished", "stdout": None}}, None), False, "wrong_answer"),
        (({"status": "Success", "run_result": None}, None), -1, "unexpected_success_state"),
        (({"status": "Failed", "run_result": stage(code=1)}, None), -2, "runtime_error"),
        (({"status": "Failed", "run_result": stage(code=-9)}, None), -2, "runtime_error"),
        (({"status": "Failed", "run_result": stage("Error")}, None), -2, "runtime_error"),
        (({"status": "Failed", "run_result": stage("TimeLimitExceeded", None)}, None), -3, "timeout"),
        (({"status": "Failed", "run_result": stage()}, None), -1, "unknown_failure"),
        (({"status": "Failed"}, None), -1, "unknown_failure_state"),
        (BROKEN, -4, "compile_error"),
        (({"status": "Failed", "compile_result": stage("Error")}, None), -4, "compile_error"),
        (({"status": "Failed", "compile_result": stage("TimeLimitExceeded", None)}, None), -4, "compile_timeout"),
        (({"status": "SandboxError", "message": "no"}, None), -1, "sandbox_error"),
        (({"status": "Maybe"}, None), -1, "unknown_api_status_Maybe"),
        (({"status": "Failed", "run_result": "broken"}, None), -1, "unknown_failure_state"),
        (({"status": ["odd"]}, None), -1, "unknown_api_status_['odd']"),
        (({}, None), -1, "unknown_api_status_None"),
        ((None, "the cable is out"), -1, "api_error"),
        ((None, None), -1, "api_error"),
    ],
)
def test_every_answer_has_its_code_its_word_and_the_same_keys(
    replace: Any, answer: Answer, result: Any, status: str
) -> None:
    replace(lambda **_: answer)
    results, [metadata] = check_correctness("url", cases("1"), "…")
    assert results == [result]
    assert type(results[0]) is type(result)
    assert metadata["status"] == status
    assert list(metadata) == KEYS


def test_metadata_tell_what_the_service_told(replace: Any) -> None:
    response = {
        "status": "Failed",
        "compile_result": {**stage(stderr="a warning"), "execution_time": 2.5},
        "run_result": stage(code=3, stdout="out", stderr="err"),
    }
    replace(lambda **_: (response, None))
    assert check_correctness("url", cases("in", outputs=["out"]), "…")[1] == [
        {
            "case_index": 0,
            "input": "in",
            "expected_output": "out",
            "api_request_error": None,
            "api_response": response,
            "status": "runtime_error",
            "stdout": "out",
            "stderr": "err",
            "exit_code": 3,
            "duration": 0.5,
            "compile_duration": 2.5,
            "compile_stderr": "a warning",
            "api_status": "Failed",
            "compile_status": "Finished",
            "run_status": "Finished",
        }
    ]


def test_a_call_that_raises_is_a_failure_of_the_service(replace: Any) -> None:
    def fail(**_: Any) -> Answer:
        raise OSError("no route")

    replace(fail)
    results, metadata = check_correctness("url", cases("1", "2"), "…")
    assert results == [-1, -1]
    assert [one["api_request_error"] for one in metadata] == ["OSError: no route"] * 2


def test_an_output_that_the_service_may_have_cut_is_not_called_wrong(replace: Any) -> None:
    replace(lambda stdin, **_: ok("12\n" * 400_000 + stdin))
    results, metadata = check_correctness("url", cases("", "wrong", outputs=["12\n" * 500_000] * 2), "…")
    assert (results, [one["status"] for one in metadata]) == ([-1, False], ["output_cut", "wrong_answer"])


def test_an_output_of_none_accepts_any(replace: Any) -> None:
    replace(lambda **_: ok("whatever"))
    assert check_correctness("url", cases(None, outputs=[None]), "…")[0] == [True]


# Cases ----------------------------------------------------------------------------------------------------------------


def test_results_keep_the_order_of_the_cases_however_long_each_takes(replace: Any) -> None:
    def answer(stdin: str, **_: Any) -> Answer:
        time.sleep(0.02 * (7 - int(stdin)))
        return (None, "late") if stdin == "3" else ok(stdin)

    replace(answer)
    results, metadata = check_correctness("url", cases(*range(8)), "…")
    assert results == [True, True, True, -1, True, True, True, True]
    assert [one["case_index"] for one in metadata] == list(range(8))
    assert [one["input"] for one in metadata] == [str(number) for number in range(8)]


def test_cases_run_at_the_same_time(replace: Any) -> None:
    together = threading.Barrier(32)

    def answer(stdin: str, **_: Any) -> Answer:
        together.wait(10)
        return ok(stdin)

    replace(answer)
    assert check_correctness("url", cases(*range(32)), "…")[0] == [True] * 32


def test_a_thousand_cases_are_a_thousand_results(replace: Any) -> None:
    calls = replace(lambda stdin, **_: ok(stdin))
    results, metadata = check_correctness("url", cases(*range(1000)), "…")
    assert results == [True] * 1000
    assert len(metadata) == len(calls) == 1000


@pytest.mark.parametrize("kind", ["threading", "multiprocessing", "manager"])
def test_the_semaphore_bounds_what_is_at_the_service(replace: Any, kind: str) -> None:
    lock = threading.Lock()
    there = most = 0

    def answer(stdin: str, **_: Any) -> Answer:
        nonlocal there, most
        with lock:
            there += 1
            most = max(most, there)
        time.sleep(0.02)
        with lock:
            there -= 1
        return ok(stdin)

    replace(answer)
    if kind == "manager":  # what verl passes
        with multiprocessing.get_context("forkserver").Manager() as manager:
            results, _ = check_correctness("url", cases(*range(20)), "…", concurrent_semaphore=manager.Semaphore(3))
    else:
        semaphore = threading.Semaphore(3) if kind == "threading" else multiprocessing.Semaphore(3)
        results, _ = check_correctness("url", cases(*range(20)), "…", concurrent_semaphore=semaphore)
    assert results == [True] * 20
    assert most == 3


def test_a_semaphore_that_is_gone_is_a_failure_of_ours(replace: Any) -> None:
    replace(lambda stdin, **_: ok(stdin))
    with multiprocessing.get_context("forkserver").Manager() as manager:
        semaphore = manager.Semaphore(3)
    assert check_correctness("url", cases("1"), "…", concurrent_semaphore=semaphore)[0] == [-1]


def test_after_a_compile_error_the_other_cases_have_it_too_and_are_not_sent(replace: Any) -> None:
    calls = replace(lambda **_: BROKEN)
    results, metadata = check_correctness("url", cases(*range(500)), "a = b", language="cpp")
    assert results == [-4] * 500
    assert len(calls) <= 64
    for index, one in enumerate(metadata):
        assert list(one) == KEYS
        assert (one["case_index"], one["input"], one["status"]) == (index, str(index), "compile_error")
        assert one["compile_stderr"] == "expected ';'"


def test_a_compile_error_in_one_case_only_is_one_of_all_that_follow(replace: Any) -> None:
    replace(by_input(a=ok("a"), b=BROKEN, c=ok("c")))
    results, _ = check_correctness("url", cases("a", "b", "c"), "…", language="cpp")
    assert results == [True, -4, -4]


def test_what_runs_one_case_can_be_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(index: int, *_: Any) -> tuple[int, dict[str, Any]]:
        return (-4, {"mine": index}) if index == 1 else (-2, {"mine": index})

    monkeypatch.setattr("toolyard.rewards.sandbox_fusion._process_single_case", process)
    results, metadata = check_correctness("url", cases("a", "b"), "…")
    assert results == [-2, -4]
    assert metadata == [{"mine": 0}, {"mine": 1}]


def test_with_assertions_each_case_is_a_program_of_its_own(replace: Any) -> None:
    calls = replace(lambda code, **_: BROKEN if "bad" in code else ok(""))
    given = {"assert_case": ["assert bad", "assert f(1)"]}
    results, _ = check_correctness("url", given, "def f(x): return x")
    assert results == [-4, True]
    assert sorted(call["code"] for call in calls) == [
        "def f(x): return x\n\nassert bad",
        "def f(x): return x\n\nassert f(1)",
    ]
    assert [call["stdin"] for call in calls] == ["", ""]
    assert given == {"assert_case": ["assert bad", "assert f(1)"]}


@pytest.mark.parametrize(
    ("in_outs", "results", "error"),
    [
        (None, [-1], "Invalid input/output data"),
        ({}, [-1], "Invalid input/output data"),
        ({"inputs": ["1"]}, [-1], "Invalid input/output data"),
        ({"inputs": "1", "outputs": "1"}, [-1], "Invalid input/output data"),
        ({"assert_case": "assert True"}, [-1], "Invalid input/output data"),
        ({"assert_case": 3}, [-1], "Invalid input/output data"),
        ([1], [-1], "Invalid input/output data"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, [-1], "Input/output count mismatch"),
        ({"inputs": ["1", "2"], "outputs": ["1", "2"], "assert_case": ["x"]}, [-1, -1], "Input/output count mismatch"),
        ({"inputs": [], "outputs": []}, [], None),
    ],
)
def test_cases_that_cannot_be_used_say_so(replace: Any, in_outs: Any, results: list[int], error: str | None) -> None:
    calls = replace(lambda **_: ok("1"))
    found, metadata = check_correctness("url", in_outs, "…")
    assert found == results
    assert [one["error"] for one in metadata] == [error] * len(results)
    assert not calls


def test_cases_may_come_as_arrays_and_as_values(replace: Any) -> None:
    replace(lambda stdin, **_: ok(stdin))
    assert check_correctness("url", {"inputs": np.array([1, 2]), "outputs": np.array([1, 3])}, "…")[0] == [True, False]


# Scores ---------------------------------------------------------------------------------------------------------------

ANSWER = "Here it is:\n```python\nprint(input())\n```"


def test_the_score_is_the_share_of_cases_that_passed(replace: Any) -> None:
    calls = replace(
        by_input(a=ok("a"), b=ok("no"), c=ok("c"), d=({"status": "Failed", "run_result": stage(code=1)}, None))
    )
    score, metadata = compute_score("url", None, None, ANSWER, cases("a", "b", "c", "d"))
    assert score == 0.5
    assert len(metadata) == 4
    assert {call["memory_limit_mb"] for call in calls} == {-1}, "the service's own"
    assert {call["code"].strip() for call in calls} == {"print(input())"}


def test_continuous_counts_the_first_ten(replace: Any) -> None:
    replace(lambda stdin, **_: ok(stdin if int(stdin) % 2 else "no"))
    score, metadata = compute_score("url", None, 1024, ANSWER, json.dumps(cases(*range(13))), continuous=True)
    assert score == 0.5
    assert len(metadata) == 13


@pytest.mark.parametrize("answer", [(None, "the cable is out"), ({"status": "SandboxError", "message": "out"}, None)])
def test_an_outage_is_no_score(replace: Any, answer: Answer) -> None:
    replace(by_input(a=ok("a"), b=answer))
    with pytest.raises(RewardError, match=r"1 of 2 test cases could not be run.*case 1 .*out"):
        compute_score("url", None, 1024, ANSWER, cases("a", "b"))


def test_an_outage_in_a_case_that_does_not_count_leaves_the_score(replace: Any) -> None:
    replace(lambda stdin, **_: ok(stdin) if int(stdin) < 10 else (None, "out"))
    score, metadata = compute_score("url", None, 1024, ANSWER, cases(*range(12)), continuous=True)
    assert score == 1.0
    assert [one["status"] for one in metadata[10:]] == ["api_error", "api_error"]


def test_an_answer_without_a_program_is_worth_nothing_and_costs_nothing(replace: Any) -> None:
    calls = replace(lambda **_: ok("1"))
    assert compute_score("url", None, 1024, "I cannot.", cases("1")) == (
        0.0,
        [{"error": "Invalid completion (missing code block)"}],
    )
    assert not calls


@pytest.mark.parametrize(
    "tests", ["no JSON", "[1]", "{}", None, {"inputs": ["1"]}, cases(), {"inputs": [1], "outputs": []}]
)
def test_test_cases_that_cannot_be_used_are_the_tasks_fault_and_no_score(replace: Any, tests: Any) -> None:
    replace(lambda **_: ok("1"))
    with pytest.raises(RewardError) as caught:
        compute_score("url", None, 1024, ANSWER, tests)
    assert isinstance(caught.value, ConfigError)


def test_assertions_alone_are_test_cases(replace: Any) -> None:
    replace(lambda code, **_: ok("") if "== 1" in code else ({"status": "Failed", "run_result": stage(code=1)}, None))
    tests = json.dumps({"assert_case": ["assert f() == 1", "assert f() == 2"]})
    assert compute_score("url", None, 1024, ANSWER, tests)[0] == 0.5


# Programs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "\na\n"),
        ("```python\na\n```\nand\n```python\nb\n```\n```\nc\n```", "\nb\n"),
        ("```python3\na\n```", "\na\n"),
        ("```python3.11\na\n```", "\na\n"),
        ("```python\ncut off", "\ncut off"),
        ("```\na\n```\n```\nb\n```", "\na\n"),
        ("```cpp\nint a;\n```", "int a;\n"),
        ("```c++\nint a;\n```", "int a;\n"),
        ("```\nx = 1\n```", "\nx = 1\n"),
        ("no block", None),
        ("", None),
        ("```", ""),
    ],
)
def test_the_program_is_the_last_python_block_or_else_the_first_block(completion: str, program: str | None) -> None:
    assert program_in(completion) == program


def call(code: str, function: str, stdin: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", calling(code, function)], input=stdin, capture_output=True, text=True, timeout=30
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "function", "stdin", "stdout"),
    [
        ("def f(a, b): return a + b", "f", "1\n2", "3\n"),
        ("def f(a, b): return a + b", "f", '"x"\n"y"', "xy\n"),
        (
            "class Solution:\n    def f(self, a: List[int]) -> int:\n        return Counter(a)[1]",
            "f",
            "[1, 1, 2]",
            "2\n",
        ),
        ("def f(): return [1, (2, True), None]", "f", "", "[1, [2, true], null]\n"),
        ("def f(x): return x", "f", "True", "true\n"),
        ("def f(x): return x", "f", "{'a': (1, None)}", '{"a": [1, null]}\n'),
        ("def f(): return None", "f", "", "null\n"),
        ("def f(): return 0.1 + 0.2", "f", "", "0.30000000000000004\n"),
        # A name that is also imported.
        ("class Solution:\n    def search(self, a): return a[-1]", "search", "[1, 5]", "5\n"),
        ("def search(a): return a[-1]", "search", "[1, 5]", "5\n"),
        ("def f(): return math.floor(datetime.datetime(2000, 1, 1).year / 2)", "f", "", "1000\n"),
        ("def f(): return 7\nif __name__ == '__main__':\n    print(f(), input())", "f", "", "7\n"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\ndef f(): return A(3).x",
            "f",
            "",
            "3\n",
        ),
        ("def f(): return '''{}'\"\\\\n%s'''", "f", "", "{}'\"\\n%s\n"),
    ],
)
def test_a_function_is_called_with_the_lines_of_its_input(code: str, function: str, stdin: str, stdout: str) -> None:
    assert call(code, function, stdin) == (0, stdout, "")


@pytest.mark.parametrize(
    ("code", "stdin", "said"),
    [
        ("def f(x): raise KeyError(x)", "1", "KeyError: 1"),
        ("def g(x): return x", "1", "there is no function f"),
        ("class Solution: pass", "1", "AttributeError"),
        ("def f(x): return x", "1\n2", "TypeError"),
        ("def f(x): return x", "no value", "SyntaxError"),
        ("def f(x): return {1, 2} and [{1}]", "1", "not JSON serializable"),
        ("def f(x) return x", "1", "solution.py"),
    ],
)
def test_a_function_that_cannot_be_called_or_raises_ends_with_code_1(code: str, stdin: str, said: str) -> None:
    exit_code, stdout, stderr = call(code, "f", stdin)
    assert (exit_code, stdout) == (1, "")
    assert said in stderr


def test_only_python_is_wrapped_for_a_function(replace: Any) -> None:
    calls = replace(lambda **_: ok("1"))
    given = {**cases("1"), "fn_name": "f"}
    check_correctness("url", given, "def f(x): …")
    check_correctness("url", given, "int f(int x);", language="cpp")
    assert [call["code"] == "int f(int x);" for call in calls] == [False, True]
