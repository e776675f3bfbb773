"""Our version of verl's scorer without a service: `prime_code` on the embedded sandbox."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

from toolyard.errors import ConfigError
from toolyard.rewards import blocking
from toolyard.rewards.prime_code import apps_check_correctness, check_correctness, compute_score

ADD = "a, b = map(int, input().split())\nprint(a + b)"
CASES = {"inputs": ["1 2\n", "3 4\n", "5 x\n"], "outputs": ["3\n", "8\n", "5\n"]}
CALLS = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    blocking.close()


def test_arguments_have_verls_names_in_verls_order() -> None:
    assert list(inspect.signature(compute_score).parameters) == ["completion", "test_cases", "continuous"]
    assert list(inspect.signature(apps_check_correctness).parameters) == ["in_outs", "generation", "timeout", "debug"]
    assert check_correctness is apps_check_correctness


@pytest.mark.parametrize("form", ["{}", "So:\n```python\n{}\n```", "```\n{}\n```\nDone.", "```python\n{}"])
def test_an_answer_is_the_block_or_without_one_all_of_it(form: str) -> None:
    answer = form.replace("{}", ADD)
    assert compute_score(answer, json.dumps(CASES), continuous=True)[0] == pytest.approx(1 / 3)
    assert compute_score(answer, CASES)[0] is False
    assert compute_score(answer, {"inputs": ["1 2"], "outputs": ["3"]}) == (True, [{}])


def test_continuous_counts_the_first_ten() -> None:
    cases = {
        "inputs": [f"{number} 1" for number in range(12)],
        "outputs": [str(min(number + 1, 9)) for number in range(12)],
    }
    score, metadata = compute_score(ADD, cases, continuous=True)
    assert (score, len(metadata)) == (0.9, 10)


@pytest.mark.parametrize(
    ("program", "in_outs", "results"),
    [
        (ADD, CASES, [True, False]),
        (ADD, {"inputs": ["1 2", "1 x"], "outputs": ["3", "3"]}, [True, -1]),
        ("print(", CASES, [-2]),
        pytest.param("while True: pass", CASES, [-1], marks=pytest.mark.slow),
        ("def add(a, b): return a + b", CALLS, [True, True]),
        ("class Solution:\n    def add(self, a: List[int], b): return a + b", CALLS, [True, True]),
        ("def other(a, b): return a + b", CALLS, [-1]),
        ("x: List = [*accumulate([1, 2])]\nprint(sqrt(4), x)", {"inputs": [""], "outputs": ["2.0 [1, 3]"]}, [True]),
        ("from __future__ import annotations\nprint(1)", {"inputs": [""], "outputs": ["1"]}, [True]),
        ("print(' 1\\n\\n  2.0000001 ')", {"inputs": [""], "outputs": ["1\n2"]}, [True]),
        ("print('```')", {"inputs": [""], "outputs": ["```"]}, [True]),
        ("def f(n): return n and f(n - 1)\nprint(f(20000))", {"inputs": [""], "outputs": ["0"]}, [True]),
    ],
)  # fmt: skip
def test_cases_are_run_until_one_is_not_right(program: str, in_outs: Any, results: list[Any]) -> None:
    found, metadata = apps_check_correctness(in_outs, program, timeout=2, debug=False)
    assert [*map(repr, found)] == [*map(repr, results)]
    assert [bool(one) for one in metadata] == [results[-1] is not True]


def test_test_cases_that_cannot_be_read_are_no_score() -> None:
    for tests in ("no JSON", {"inputs": ["1"]}, {}):
        with pytest.raises(ConfigError):
            compute_score(ADD, tests)
