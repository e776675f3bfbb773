"""verl's functions for mathematics and for GSM8K beside ours: docs/rewards.md lists where they differ, and why.

What is right is written down with each answer, and our value is always that.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from alone import ask
from differences import Differences, check
from verl.utils.reward_score import gsm8k, math_dapo, math_reward, math_verify

from corpus.verl_math import GSM8K, GSM8K_FLEXIBLE, MATHEMATICS, MathAnswer
from toolyard.rewards import gsm8k as our_gsm8k
from toolyard.rewards.math import scorer as our_math

VERLS: dict[str, Callable[[str, str], float]] = {
    "math_verify": math_verify.compute_score,
    "math_reward": math_reward.compute_score,
    "math_dapo": lambda text, truth: (math_dapo.compute_score(text, truth)["score"] + 1) / 2,  # of -1 and 1
}


def wrong_in_verl(line: int, *names: str) -> Differences:
    return dict.fromkeys(names, (line, 0.0, 1.0))


def right_in_verl(line: int, *names: str) -> Differences:
    return dict.fromkeys(names, (line, 1.0, 0.0))


BY_VALUE = (
    "thousands parted by a comma",
    "thousands parted by LaTeX's comma",
    "a decimal for another fraction",
    "a decimal with a zero too many",
    "an integer as a decimal",
    "with an exponent",
    "a power",
    "a factorial",
    "a binomial",
    "the full stop in the box",
    "bold",
    "a fraction that can be reduced",
    "the minus before the fraction",
    "a mixed number",
    "a root that can be simplified",
    "a denominator made rational",
    "a multiple of pi",
    "a sine",
    "a complex number, the other way round",
    "a point with a decimal",
    "a set in another order",
    "numbers in another order",
    "numbers joined by a word",
    "terms in another order",
    "factors",
    "a product with a dot",
    "a matrix in other brackets",
    "a matrix with other fractions",
    "two boxes that belong together",
    "a ground truth in a box",
    "a ground truth between dollars",
    "a letter to choose",
)
"""Equal, and written in another way than the ground truth."""
WITHOUT_A_BOX = (
    "a matrix alone",
    "a matrix between dollars",
    "a matrix in a sentence",
    "another kind of box",
    "in a sentence",
    "a formula in a sentence",
    "a formula alone",
    "a number alone",
)
DIFFERENT: dict[str, Differences] = {
    "math_verify": {
        **wrong_in_verl(16, "a matrix alone", "another kind of box", "the full stop in the box"),
        **wrong_in_verl(17, "the last of two boxes"),
    },
    "math_reward": {
        **wrong_in_verl(13, *BY_VALUE),
        **wrong_in_verl(14, *WITHOUT_A_BOX, "after a word", "after a word, between dollars"),
        **right_in_verl(15, "percent where a number is asked for"),
    },
    "math_dapo": {
        **wrong_in_verl(
            13,
            *BY_VALUE,
            "a decimal for a fraction",
            "a large fraction",
            "a fraction without braces",
            "a fraction with a slash",
            "a root without braces",
            "degrees",
            "centimetres",
            "square centimetres",
            "dollars",
            "a point",
            "an interval",
            "an equation",
            "an inequality",
            "a matrix on several lines",
            "a box with spaces in it",
        ),
        **wrong_in_verl(14, *WITHOUT_A_BOX, "a box with a space", "a box, and much text after it"),
    },
    "prime_math": {
        **wrong_in_verl(
            13,
            "with an exponent",
            "a power",
            "a factorial",
            "a binomial",
            "a fraction that can be reduced",
            "a sine",
            "a set in another order",
            "numbers in another order",
            "numbers joined by a word",
            "a matrix with other fractions",
            "two boxes that belong together",
        ),
        **wrong_in_verl(14, "a formula in a sentence"),
        **right_in_verl(
            15, "percent where a number is asked for", "pi, cut after two places", "a box that was cut off"
        ),
    },
}
DIFFERENT_STRICT: Differences = {
    **wrong_in_verl(18, "dollars", "a full stop"),
    **wrong_in_verl(19, "much text after it"),
    **right_in_verl(18, "a fraction"),
}
DIFFERENT_FLEXIBLE: Differences = wrong_in_verl(
    20,
    "the last number of a sentence",
    "dollars and cents",
    "thousands",
    "a number after the mark, and another",
    "numbers in a list",
)


@pytest.fixture(scope="module", autouse=True)
def processes_end() -> Iterator[None]:
    yield
    our_math.close()
    math_verify._get_pool().shutdown()
    math_verify._pool = None


@pytest.fixture(scope="module")
def ours() -> dict[str, float]:
    return {str(answer): our_math.compute_score(answer.text, answer.truth) for answer in MATHEMATICS}


def test_our_value_is_the_right_one(ours: dict[str, float]) -> None:
    assert len(ours) == len(MATHEMATICS) > 80
    assert ours == {str(answer): float(answer.right) for answer in MATHEMATICS}


@pytest.mark.parametrize("name", VERLS)
def test_mathematics_differ_where_it_is_listed(name: str, ours: dict[str, float]) -> None:
    def values(answer: MathAnswer) -> tuple[float, float]:
        different = DIFFERENT[name].get(str(answer))
        for _ in range(3):
            with contextlib.redirect_stdout(io.StringIO()):  # verl prints what it could not read
                verls = VERLS[name](answer.text, answer.truth)
            # math-verify takes an expression for none after five seconds, which it may need on a busy machine.
            if verls == (ours[str(answer)] if different is None else different[1]):
                break
        return verls, ours[str(answer)]

    check({str(answer): values(answer) for answer in MATHEMATICS}, DIFFERENT[name])


def test_prime_math_differs_where_it_is_listed(ours: dict[str, float]) -> None:
    found = ask("prime_math", [("compute_score", (answer.text, answer.truth)) for answer in MATHEMATICS])
    verls = dict(zip(map(str, MATHEMATICS), found, strict=True))
    check({name: (verls[name], ours[name]) for name in ours}, DIFFERENT["prime_math"])


def test_of_mathematics_a_wrong_answer_may_be_worth_less_than_nothing_in_verl() -> None:
    assert math_dapo.compute_score("Answer: 17", "18")["score"] == -1.0
    assert our_math.compute_score("Answer: 17", "18") == 0.0


@pytest.mark.parametrize(
    ("answers", "method", "different"),
    [(GSM8K, "strict", DIFFERENT_STRICT), (GSM8K_FLEXIBLE, "flexible", DIFFERENT_FLEXIBLE)],
    ids=["strict", "flexible"],
)
def test_gsm8k_differs_where_it_is_listed(answers: list[MathAnswer], method: Any, different: Differences) -> None:
    mine = {str(answer): our_gsm8k.compute_score(answer.text, answer.truth, method) for answer in answers}
    verls = {str(answer): float(gsm8k.compute_score(answer.text, answer.truth, method)) for answer in answers}
    assert mine == {str(answer): float(answer.right) for answer in answers}
    check({name: (verls[name], mine[name]) for name in mine}, different)
