"""`POST /submit`: answers to dataset rows in SandboxFusion's formats, through its own client where it supports them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from sandbox_fusion import EvalResult, SubmitRequest, TestConfig, submit
from serving import ScriptedSandbox, raising, request, service, service_in_thread

from toolyard.errors import SandboxBusyError, SandboxError
from toolyard.rewards.code.submissions import SubmissionJudge
from toolyard.sandbox.local import LocalSandbox

ADD = "a, b = map(int, input().split())\nprint(a + b)"
ROW = {
    "id": 7,
    "content": "Add them.",
    "labels": {"programming_language": "python", "execution_language": "python"},
    "test": [
        {"input": {"stdin": "1 2"}, "output": {"stdout": "3"}},
        {"input": {"stdin": "3 4"}, "output": {"stdout": "7\n"}},
        {"input": {"stdin": "5 6"}, "output": {"stdout": "11"}},
    ],
}
CODE = "assert f(1) == 2\nassert f(2) == 3"
ASSERTS = {"id": 1, "labels": {"programming_language": "python"}, "test": {"code": CODE}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with service_in_thread(lambda: LocalSandbox(workers=2), judge=SubmissionJudge(), max_cases=100) as base:
        yield base


def fenced(code: str, language: str = "python") -> str:
    return f"Like this:\n```{language}\n{code}\n```"


def submitted(url: str, completion: str, row: Any = ROW, **config: Any) -> EvalResult:
    asked = SubmitRequest(
        dataset="mine",
        id=7,
        completion=completion,
        config=TestConfig(provided_data=row, **{"run_timeout": 2, **config}),
    )
    return submit(asked, endpoint=url, max_attempts=1, client_timeout=60)


def test_a_right_answer_is_accepted_and_every_test_is_told(url: str) -> None:
    result = submitted(url, fenced(ADD), dataset_type="CommonOJDataset", locale="en", compile_timeout=5)
    assert (result.id, result.accepted, result.extracted_code, result.extracted_type) == (7, True, ADD + "\n", "fenced")
    assert [(one.passed, one.test_info) for one in result.tests] == [(True, test) for test in ROW["test"]]
    [first, *_] = [one.exec_info for one in result.tests]
    assert (first.status, first.run_result.status, first.run_result.return_code) == ("Success", "Finished", 0)
    assert (first.run_result.stdout, first.run_result.stderr, first.compile_result) == ("3\n", "", None)


def test_a_wrong_answer_is_told_up_to_its_first_failure_or_to_the_end(url: str) -> None:
    wrong = fenced(ADD.replace("a + b", "min(a + b, 5)"))
    result = submitted(url, wrong)
    assert (result.accepted, [one.passed for one in result.tests]) == (False, [True, False])
    assert result.tests[1].exec_info.status == "Success", "it ran well, and said something else"
    result = submitted(url, wrong, extra={"run_all_cases": True})
    assert [one.passed for one in result.tests] == [True, False, False]


@pytest.mark.parametrize(
    ("code", "status", "stage"),
    [
        ("1 / 0", "Failed", ("Finished", 1)),
        ("while True: pass", "Failed", ("TimeLimitExceeded", None)),
        ("x = bytearray(2 << 30)", "Failed", ("Finished", -9)),
    ],
)
def test_what_a_program_did_is_told_as_run_code_tells_it(url: str, code: str, status: str, stage: Any) -> None:
    result = submitted(url, fenced(code), run_timeout=1 if "while" in code else 20)
    [test] = result.tests
    assert (result.accepted, test.passed, test.exec_info.status) == (False, False, status)
    assert (test.exec_info.run_result.status, test.exec_info.run_result.return_code) == stage


@pytest.mark.toolchain("cpp")
def test_other_languages_are_compiled_and_what_the_compiler_says_is_told(url: str) -> None:
    code = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
    row = {**ROW, "labels": json.dumps({"programming_language": "cpp"}), "test": json.dumps(ROW["test"])}
    assert submitted(url, fenced(code, "cpp"), row, run_timeout=9, compile_timeout=60).accepted
    test = submitted(url, fenced("int main(", "cpp"), row, compile_timeout=60).tests[0]
    assert (test.exec_info.status, test.exec_info.run_result) == ("Failed", None)
    assert "error" in test.exec_info.compile_result.stderr


def test_assertions_run_after_the_program(url: str) -> None:
    result = submitted(url, fenced("def f(x):\n    return x + 1"), ASSERTS, dataset_type="AutoEvalDataset")
    assert (result.accepted, result.test_code) == (True, CODE)
    assert result.full_code == f"{result.extracted_code}\n{result.test_code}"
    result = submitted(url, fenced("def f(x):\n    return 2"), ASSERTS)
    [test] = result.tests
    assert (result.accepted, test.passed, test.exec_info.status, test.exec_info.run_result.return_code) == (
        False, False, "Failed", 1,
    )  # fmt: skip
    assert "AssertionError" in test.exec_info.run_result.stderr


@pytest.mark.parametrize(
    ("completion", "accepted", "kind"),
    [
        (ADD, True, "heuristic"),
        (f"```python\n{ADD}", True, "incomplete_fenced"),
        ("```python\n```", False, "empty"),
        ("I do not know.", False, "heuristic"),
    ],
)
def test_the_answer_says_how_its_program_was_found(url: str, completion: str, accepted: bool, kind: str) -> None:
    result = submitted(url, completion)
    assert (result.accepted, result.extracted_type) == (accepted, kind)


def test_rows_of_other_forms_are_read_as_everywhere(url: str) -> None:
    for row in (
        {"inputs": ["1 2"], "outputs": ["3"]},
        [{**ROW, "id": 6, "test": []}, ROW],
    ):
        assert submitted(url, fenced(ADD), row).accepted
    for row in (
        {"test_list": ["assert f(1) == 2"]},
        {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"},
        {"fn_name": "f", "inputs": [[1]], "outputs": [2]},
    ):
        assert submitted(url, fenced("def f(x): return x + 1"), row).accepted


def posted(url: str, config: dict[str, Any], **other: Any) -> requests.Response:
    body = {"dataset": "mine", "id": 7, "completion": fenced(ADD), "config": config, **other}
    return requests.post(f"{url}/submit", json=body, timeout=30)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "this server has no datasets"),
        ({"provided_data": []}, "this server has no datasets"),
        ({"provided_data": [ROW, ROW]}, "2 of 2 rows have the id 7"),
        ({"provided_data": {"id": 7}}, "inputs"),
        ({"provided_data": {**ROW, "test": "[1"}}, "not valid JSON"),
        ({"provided_data": {**ROW, "test": [{"input": {"stdin": "1", "data.txt": "2"}, "output": {}}]}}, "data.txt"),
        ({"provided_data": {**ROW, "test": [{"input": "1"}]}}, "test[0].input"),
        ({"provided_data": {**ROW, "test": ROW["test"] * 40}}, "120 tests; this server takes at most 100"),
        ({"provided_data": {**ASSERTS, "test": {"code": "assert x", "asset": {"f": "YQ=="}}}}, "files"),
        ({"provided_data": ASSERTS, "language": "cpp"}, "cpp"),
        ({"provided_data": ROW, "custom_extract_logic": "submit_code_blocks([])"}, "custom_extract_logic"),
        ({"provided_data": ROW, "run_timeout": 1e6}, "at most 3600 s"),
        ({"provided_data": ROW, "run_timeout": 0}, "greater than 0"),
        ({"provided_data": {"test": "[" * 100_000}}, "test: too deeply nested"),
        ({"provided_data": {**ROW, "labels": {"programming_language": [1]}}}, "labels: the language is not text"),
    ],
)
def test_what_cannot_be_judged_is_422_and_says_why(url: str, config: dict[str, Any], said: str) -> None:
    answer = posted(url, config)
    assert answer.status_code == 422, answer.text
    assert said in answer.json()["detail"][0]["msg"]


async def test_our_own_failures_are_never_a_rejected_answer() -> None:
    body = {"dataset": "mine", "id": 7, "completion": fenced(ADD), "config": {"provided_data": ROW}}
    options = {"judge": SubmissionJudge(), "max_wait_seconds": 0.2}
    for error, status in [(SandboxError("no space"), 504), (SandboxBusyError("full"), 504), (KeyError("a bug"), 500)]:
        async with service(ScriptedSandbox(raising(error)), **options) as running:
            got = await request(f"{running.url}/submit", "POST", body)
        assert got.status == status
        assert "accepted" not in got.json


async def test_without_a_judge_there_is_no_such_route() -> None:
    async with service(ScriptedSandbox()) as running:
        assert (await request(f"{running.url}/submit", "POST", {})).status == 404
