"""verl's released scorers and ours on the same answers: the same values, but for what docs/rewards.md lists.

Two corpora: 200 answers in verl's forms (`corpus.verl_forms`), and the Python solutions of tests/corpus.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from verl.utils.reward_score import sandbox_fusion as theirs

from corpus import Problem, Solution, read_corpus
from corpus.verl_forms import READ, Answer, answers
from toolyard.errors import RewardError
from toolyard.rewards import blocking, prime_code
from toolyard.rewards import sandbox_fusion as ours

HERE = Path(__file__).parent
DOCS = (HERE.parents[1] / "docs" / "rewards.md").read_text()

ANSWERS = list(answers())
PRIME = [
    *[
        answer
        for answer in ANSWERS
        if answer.kind in ("stdin", "fn_name")
        and (
            answer.wrapping == "not fenced"
            or (answer.program in ("right", "half right") and "fenced" in answer.wrapping)
        )
    ],
    Answer("stdin", "calls exit()", "not fenced", f"{READ}print(a + b)\nexit()"),
    Answer("stdin", "exits with code 3", "not fenced", f"{READ}print(a + b)\nimport sys\nsys.exit(3)"),
]
"""Without a service verl knows no assertions, and takes half a second for each answer: not all of them."""
SOLUTIONS = [
    (problem, solution)
    for problem in read_corpus()
    if set(problem.tests) <= {"inputs", "outputs", "fn_name", "assert_case"}
    for solution in problem.solutions
    if solution.language == "python"
]

# What differs: (what it is about, verl's value, ours), by the number of the line in docs/rewards.md that says why.
NO_SCORE = "no score"
DIFFERENT: dict[str, tuple[int, Any, Any]] = {
    **dict.fromkeys(
        [
            f"fn_name, of another name, {wrapping}"
            for wrapping in ("fenced as python", "fenced", "cut off", "the last of two")
        ],
        (1, 1.0, 0.0),
    ),
    "pair, python: has a main part that reads stdin": (2, 0.0, 1.0),
}
DIFFERENT_PRIME: dict[str, tuple[int, Any, Any]] = {
    "fn_name, of another name, not fenced": (1, 1.0, 0.0),
    **{f"fn_name, half right, {wrapping}": (6, 0.0, 0.5) for wrapping in ("fenced as python", "not fenced", "fenced")},
    "fn_name, raises in one case, not fenced": (6, 0.0, 0.5),
    "stdin, right, fenced": (7, 0.0, 1.0),
    "stdin, half right, fenced": (7, 0.0, 0.5),
    "fn_name, right, fenced": (7, 0.0, 1.0),
    "wrong, not continuous": (8, "UnboundLocalError", 0.0),
    "stdin, calls exit(), not fenced": (9, 0.0, 1.0),
    "stdin, exits with code 3, not fenced": (9, 1.0, 0.0),
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # verl logs every failure
    yield
    logging.disable(logging.NOTSET)
    blocking.close()


def value(score: Any, *arguments: Any) -> Any:
    try:
        return float(score(*arguments)[0])
    except RewardError:
        return NO_SCORE


def check(found: dict[str, tuple[Any, Any]], different: dict[str, tuple[int, Any, Any]]) -> None:
    """Every difference is listed, and what is listed differs so."""
    differing = {name: values for name, values in found.items() if values[0] != values[1]}
    assert differing == {name: (verls, ours) for name, (_, verls, ours) in different.items()}
    for number, *_ in different.values():
        assert re.search(rf"^\| {number} \|", DOCS, re.MULTILINE), f"docs/rewards.md has no line {number}"


GUIDE = (HERE.parents[1] / "docs" / "migrating_from_verl.md").read_text()
NAMES: list[str] = re.findall(r"^\| `(verl\.[\w.]+)` \| `toolyard", GUIDE, re.MULTILINE)
GONE = ("verl.tools.sandbox_fusion_tools.", "verl.tools.gsm8k_tool.", "verl.tools.mcp_")
"""With 0.9."""


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(GONE)])
def test_the_migration_guide_names_what_verl_has(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(import_module(module), attribute)


def test_there_are_two_hundred_answers_in_every_form() -> None:
    assert (len(ANSWERS), len({answer.completion + answer.kind for answer in ANSWERS})) == (200, 200)


def test_both_score_answers_in_verls_forms_the_same(url: str) -> None:
    def both(answer: Answer) -> tuple[Any, Any]:
        asked = url, None, 1024, answer.completion, json.dumps(answer.tests)
        return value(theirs.compute_score, *asked), value(ours.compute_score, *asked)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(map(str, ANSWERS), pool.map(both, ANSWERS), strict=True))
    check(found, {name: one for name, one in DIFFERENT.items() if name in found})
    assert len({values[1] for values in found.values()}) == 3, "nothing, a half and all"


def test_both_score_the_corpus_of_solutions_the_same(url: str) -> None:
    def both(pair: tuple[Problem, Solution]) -> tuple[Any, Any]:
        problem, solution = pair
        asked = url, None, 256, solution.answer, json.dumps(problem.tests), False, 1
        return value(theirs.compute_score, *asked), value(ours.compute_score, *asked)

    with ThreadPoolExecutor(4) as pool:
        found = dict(zip([str(solution) for _, solution in SOLUTIONS], pool.map(both, SOLUTIONS), strict=True))
    assert len(found) == len(SOLUTIONS) > 70
    check(found, {name: one for name, one in DIFFERENT.items() if name in found})


def test_both_prime_codes_score_the_same() -> None:
    asked = [(str(answer), answer.completion, answer.tests, True) for answer in PRIME]
    [wrong] = [answer for answer in PRIME if str(answer) == "stdin, wrong, not fenced"]
    asked.append(("wrong, not continuous", wrong.completion, wrong.tests, False))
    halves = asked[::2], asked[1::2]

    def verls(some: Sequence[tuple[Any, ...]]) -> list[Any]:
        lines = "".join(json.dumps(one[1:]) + "\n" for one in some)
        command = [sys.executable, str(HERE / "prime_code_values.py")]
        done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True, timeout=200)
        return [json.loads(line) for line in done.stdout.splitlines()]

    found: dict[str, tuple[Any, Any]] = {}
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(verls, half) for half in halves]
        mine = {name: value(prime_code.compute_score, *arguments) for name, *arguments in asked}
        for half, run in zip(halves, running, strict=True):
            found |= {one[0]: (verl, mine[one[0]]) for one, verl in zip(half, run.result(), strict=True)}
    check(found, DIFFERENT_PRIME)
