"""verl's released scorers and ours on the same answers: the same values, except where docs/guides/verl-rewards.md says.

Two corpora: 200 answers in verl's forms (`corpus.verl_forms`), and all solutions of tests/corpus, in Python and C++.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from alone import Question, ask
from differences import Differences, check
from verl.utils.reward_score import sandbox_fusion as theirs
from verl.utils.reward_score.sandbox_fusion import utils as their_utils

from corpus import Problem, Solution, read_corpus
from corpus.verl_forms import READ, WRAPPINGS, Answer, answers
from toolyard.errors import RewardError
from toolyard.rewards import blocking, prime_code
from toolyard.rewards import sandbox_fusion as ours
from toolyard.rewards.code.extraction import extract_code
from toolyard.rewards.code.protocol import Aggregation, CaseVerdict

ANSWERS = list(answers())
SOLUTIONS = [(problem, solution) for problem in read_corpus() for solution in problem.solutions]
PYTHON = [(problem, solution) for problem, solution in SOLUTIONS if solution.language == "python"]
CPP = [(problem, solution) for problem, solution in SOLUTIONS if solution.language == "cpp"]

# What differs: the number of the line in docs/guides/verl-rewards.md that says why, verl's value and ours.
NO_SCORE = "no score"
DIFFERENT: Differences = {
    **{
        f"fn_name, of another name, {wrapping}": (1, 1.0, 0.0)
        for wrapping in ("fenced as python", "fenced", "cut off", "the last of two")
    },
    "pair, python: has a main part that reads stdin": (2, 0.0, 1.0),
}
DIFFERENT_PRIME: Differences = {
    **{
        f"fn_name, of another name, {wrapping}": (1, 1.0, 0.0)
        for wrapping in ("fenced as python", "not fenced", "cut off", "the last of two")
    },
    **{
        f"fn_name, {program}, {wrapping}": (6, 0.0, 0.5)
        for program in ("half right", "raises in one case")
        for wrapping in WRAPPINGS
    },
    "pair, python: prints the answer instead of returning it": (6, 0.0, 0.25),
    "pair, python: uses one number twice": (6, 0.0, 0.75),
    "pair, python: raises where there is no pair": (6, 0.0, 0.75),
    "stdin, right, fenced": (7, 0.0, 1.0),
    "stdin, half right, fenced": (7, 0.0, 0.5),
    "stdin, raises in one case, fenced": (7, 0.0, 0.5),
    "stdin, right with white space around it, fenced": (7, 0.0, 1.0),
    "stdin, a float where an integer is expected, fenced": (7, 0.0, 1.0),
    "stdin, takes names of modules for granted, fenced": (7, 0.0, 1.0),
    "fn_name, right, fenced": (7, 0.0, 1.0),
    "fn_name, prints as well, fenced": (7, 0.0, 1.0),
    "fn_name, takes List for granted, fenced": (7, 0.0, 1.0),
    "total, python: a fence that names no language": (7, 0.0, 1.0),
    "total, python: an answer with CRLF line ends and a short name for the language": (7, 0.0, 1.0),
    "wrong, not continuous": (8, "UnboundLocalError", 0.0),
    "stdin, calls exit(), not fenced": (9, 0.0, 1.0),
    "stdin, exits with code 3, not fenced": (9, 1.0, 0.0),
    "total, python: right, and then an exit code that is not 0": (9, 1.0, 0.0),
    "fibonacci, python: asks the same question again and again": (10, [-1] * 3, [True, True, -1]),
    "pair, python: never returns where there is no pair": (10, [-1] * 4, [True, True, -1]),
    "total, python: never ends on the empty list": (10, [-1] * 4, [True, True, -1]),
    "total, python: sleeps on it": (10, [-1] * 4, [True, True, True, -1]),
    "total, python: right, and then a sleep": (10, [-1] * 4, [True, True, -1]),
    "divisors, python: right, in pairs": (21, 0.5, 1.0),
    "divisors, python: the root of a square is printed twice": (21, 0.25, 0.5),
    "halves, python: one and the rest, on two lines": (21, 0.25, 1.0),
    "halves, python: prints nothing where there is no answer": (21, 0.25, 0.75),
    "halves, python: right, but crashes afterwards": (21, 0.0, 0.5),
    "brackets, python: right": (22, 0.0, 1.0),
    "brackets, python: counts only": (22, 0.0, 0.8),
    "brackets, python: looks at the first character of nothing": (22, 0.0, 0.8),
    "brackets, python: a function instead of the class": (22, 0.0, 1.0),
    "brackets, python: waits for a bracket that never comes": (22, [-1] * 5, [True, True, True, True, -1]),
    "roots, python: right, the larger one first": (22, 0.0, 1.0),
    "roots, python: nearly right, by another way": (22, 0.0, 1.0),
    "roots, python: a double one twice": (22, 0.0, 0.8),
    "roots, python: complex ones too": (22, 0.0, 0.8),
    "roots, python: the square root of a negative number": (22, 0.0, 0.4),
    **{
        f"{kind}, {program}, {wrapping}": (23, 0.0, value)
        for kind in ("assert_case", "fn_name and assert_case")
        for program, value in {
            "right": 1.0,
            "half right": 0.5,
            "raises in one case": 0.5,
            "prints as well": 1.0,
            "takes List for granted": 1.0,
        }.items()
        for wrapping in WRAPPINGS
    },
    "slug, python: right": (23, 0.0, 1.0),
    "slug, python: prints and asserts things itself": (23, 0.0, 1.0),
    "slug, python: only spaces": (23, 0.0, 0.5),
    "slug, python: no answer for the empty text": (23, 0.0, 0.75),
    "slug, python: an assertion of its own that fails is no assertion of the test": (23, 0.0, 0.75),
    "slug, python: never ends on the empty text": (23, "KeyError", [True, True, -1]),
    "total, python: ends its line with CR LF": (24, 0.0, 1.0),
    "total, python: reads an address that is not there": (24, 0.0, 0.75),
    "fibonacci, python: a child that never ends": (24, [-2], [True, True, -1]),
    "words, python: spaces at the ends of all lines": (25, 0.8, 1.0),
    "words, python: spaces at their beginnings": (25, 0.8, 1.0),
    "pair, python: remembers what it was asked before, and must not be able to": (26, 0.0, 1.0),
}
DIFFERENT_CODE: Differences = {
    "pair, python: has a main part that reads stdin": (2, 0.0, 1.0),
    "total, python: spaces after the number and empty lines after that": (27, 0.0, 1.0),
    "total, python: ends its line with CR LF": (27, 0.0, 1.0),
    "words, python: right": (27, 0.8, 1.0),
    "words, python: spaces at the ends of all lines": (27, 0.2, 1.0),
    "words, python: words that occur twice are printed twice": (27, 0.6, 0.8),
    "words, python: capitals where their small letters are": (27, 0.6, 0.8),
    "words, python: expects two lines, and gets what there is": (27, 0.4, 0.6),
    "total_cpp, cpp: spaces and CR after the number": (27, 0.0, 1.0),
    "words, cpp: right": (27, 0.4, 1.0),
    "words, cpp: words that occur twice are printed twice": (27, 0.4, 0.6),
    "divisors, python: right, in pairs": (28, 0.5, 1.0),
    "divisors, python: the root of a square is printed twice": (28, 0.25, 0.5),
    "halves, python: one and the rest, on two lines": (28, 0.25, 1.0),
    "halves, python: prints nothing where there is no answer": (28, 0.25, 0.75),
    "halves, python: right, but crashes afterwards": (28, 0.0, 0.5),
    "mean, python: right, with all digits of a double": (28, 0.25, 1.0),
    "mean, python: with an exponent": (28, 0.0, 1.0),
    "mean, python: rounded too early": (28, 0.5, 0.75),
    "divisors, cpp: right, largest first": (28, 0.25, 1.0),
    "halves, cpp: right": (28, 0.25, 1.0),
    "halves, cpp: forgets that one cannot be divided": (28, 0.5, 0.75),
    "mean, cpp: right": (28, 0.0, 1.0),
    "brackets, python: right": (29, 0.0, 1.0),
    "brackets, python: counts only": (29, 0.0, 0.8),
    "brackets, python: looks at the first character of nothing": (29, 0.0, 0.8),
    "brackets, python: a function instead of the class": (29, 0.0, 1.0),
    "brackets, python: waits for a bracket that never comes": (29, 0.0, 0.8),
    "roots, python: right, the larger one first": (29, 0.0, 1.0),
    "roots, python: nearly right, by another way": (29, 0.0, 1.0),
    "roots, python: a double one twice": (29, 0.0, 0.8),
    "roots, python: complex ones too": (29, 0.0, 0.8),
    "roots, python: the square root of a negative number": (29, 0.0, 0.4),
    "pair, python: prints while it works": (30, 0.0, 1.0),
    "slug, python: leaves before it is asked": (31, 1.0, 0.0),
    "slug, python: leaves when it is asked, for good": (31, 1.0, 0.0),
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # verl logs every failure
    yield
    logging.disable(logging.NOTSET)
    blocking.close()


def value(score: Any, *arguments: Any) -> Any:
    try:
        return score(*arguments)[0]
    except RewardError:
        return NO_SCORE


def test_there_are_two_hundred_answers_in_every_form() -> None:
    assert (len(ANSWERS), len({answer.completion + answer.kind for answer in ANSWERS})) == (200, 200)


# At a service ---------------------------------------------------------------------------------------------------------


def test_both_score_answers_in_verls_forms_the_same(url: str) -> None:
    def both(answer: Answer) -> tuple[Any, Any]:
        asked = url, None, 1024, answer.completion, json.dumps(answer.tests)
        return value(theirs.compute_score, *asked), value(ours.compute_score, *asked)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(map(str, ANSWERS), pool.map(both, ANSWERS), strict=True))
    check(found, {name: one for name, one in DIFFERENT.items() if name in found})
    assert len({values[1] for values in found.values()}) == 3, "nothing, a half and all"


@pytest.fixture(scope="module")
def python_scores(url: str) -> dict[str, tuple[Any, Any]]:
    """verl's and ours."""

    def both(pair: tuple[Problem, Solution]) -> tuple[Any, Any]:
        problem, solution = pair
        asked = url, None, 256, solution.answer, json.dumps(problem.tests), False, 1
        return value(theirs.compute_score, *asked), value(ours.compute_score, *asked)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip([str(solution) for _, solution in PYTHON], pool.map(both, PYTHON), strict=True))


@pytest.fixture(scope="module")
def cpp_results(url: str) -> dict[str, tuple[Any, Any]]:
    """verl's and ours, for each case. Only `check_correctness` takes another language than Python."""

    def both(pair: tuple[Problem, Solution]) -> tuple[Any, Any]:
        problem, solution = pair
        program = extract_code(solution.answer, language="cpp").code
        memory = problem.settings.get("memory_limit_mb", 256)
        # It has one time limit for both stages. Compiled before, and kept by the service, programs need only the other.
        their_utils.call_sandbox_api(url, program, None, 60, 1, memory, "cpp")
        asked = url, dict(problem.tests), program, 3, memory, "cpp"
        return value(their_utils.check_correctness, *asked), value(ours.check_correctness, *asked)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip([str(solution) for _, solution in CPP], pool.map(both, CPP), strict=True))


def test_both_score_the_corpus_of_solutions_the_same(python_scores: dict[str, tuple[Any, Any]]) -> None:
    assert len(python_scores) == len(PYTHON) > 95
    check(python_scores, {name: one for name, one in DIFFERENT.items() if name in python_scores})


@pytest.mark.exhaustive
def test_both_say_the_same_of_each_case_of_the_solutions_in_cpp(cpp_results: dict[str, tuple[Any, Any]]) -> None:
    assert len(cpp_results) == len(CPP) >= 35
    check(cpp_results, {})
    assert {result for _, results in cpp_results.values() for result in results} == {True, False, -2, -3, -4}


def test_our_own_judge_differs_where_it_is_listed(
    python_scores: dict[str, tuple[Any, Any]], cpp_results: dict[str, tuple[Any, Any]]
) -> None:
    """Its results on the corpus are listed there, and tests/e2e/test_code_corpus.py checks them."""
    verls = {name: score for name, (score, _) in python_scores.items()}
    verls |= {name: results.count(True) / len(results) for name, (results, _) in cpp_results.items()}
    judged = {str(solution): solution.scores[Aggregation.FRACTION] for _, solution in SOLUTIONS}
    check({name: (round(verls[name], 4), score) for name, score in judged.items()}, DIFFERENT_CODE)


# Without one ----------------------------------------------------------------------------------------------------------


def prime_questions() -> Iterator[tuple[str, Question]]:
    """What they are called, and which function is asked what."""
    more = [
        Answer("stdin", "calls exit()", "not fenced", f"{READ}print(a + b)\nexit()"),
        Answer("stdin", "exits with code 3", "not fenced", f"{READ}print(a + b)\nimport sys\nsys.exit(3)"),
    ]
    for answer in [*ANSWERS, *more]:
        yield str(answer), ("compute_score", (answer.completion, answer.tests, True))
    [wrong] = [answer for answer in ANSWERS if str(answer) == "stdin, wrong, not fenced"]
    yield "wrong, not continuous", ("compute_score", (wrong.completion, wrong.tests, False))
    for problem, solution in PYTHON:
        if solution.name.startswith("leaves a note"):  # verl would leave it in this machine's /tmp
            continue
        if CaseVerdict.TIME_LIMIT in solution.verdicts:  # verl's `compute_score` gives each of them 15 seconds
            program = extract_code(solution.answer, language="python").code
            yield str(solution), ("apps_check_correctness", (problem.tests, program, 1, False))
        else:
            yield str(solution), ("compute_score", (solution.answer, problem.tests, True))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_both_prime_codes_score_the_same() -> None:
    questions = dict(prime_questions())
    names = list(questions)
    parts = names[::3], names[1::3], names[2::3]
    with ThreadPoolExecutor(len(parts)) as pool:
        running = [pool.submit(ask, "prime_code", [questions[name] for name in part]) for part in parts]
        mine = {name: value(getattr(prime_code, function), *asked) for name, (function, asked) in questions.items()}
        verls: dict[str, Any] = {}
        for part, run in zip(parts, running, strict=True):
            verls |= zip(part, run.result(), strict=True)
    assert len(verls) == len(questions) > 300
    check({name: (verls[name], mine[name]) for name in questions}, DIFFERENT_PRIME)
