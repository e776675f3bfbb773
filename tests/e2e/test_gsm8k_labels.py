"""What the scorers say about real solutions that others have labelled: docs/decisions/0009-gsm8k-labels.md.

The data cannot be kept in the repository. It is beside it, or in TOOLYARD_GSM8K_DATA: `test.jsonl` and
`model_solutions.jsonl` of OpenAI's grade-school-math.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from toolyard.rewards import gsm8k
from toolyard.rewards.math import scorer as math

DATA = Path(os.environ.get("TOOLYARD_GSM8K_DATA") or Path(__file__).parents[3] / "shared" / "data" / "gsm8k")
FILES = (DATA / "test.jsonl", DATA / "model_solutions.jsonl")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
ROWS = 660
MARK = "A: "

pytestmark = pytest.mark.skipif(
    not all(file.is_file() for file in FILES),
    reason="the labelled GSM8K solutions are not here: see TOOLYARD_GSM8K_DATA in tests/e2e/test_gsm8k_labels.py",
)

CUT_OFF = {
    (6, "175b_finetuning"),
    (49, "175b_finetuning"),
    (151, "6b_finetuning"),
    (151, "175b_finetuning"),
    (163, "175b_finetuning"),
    (594, "6b_finetuning"),
    (634, "6b_finetuning"),
}
"""By line and model: the text ends before its answer. What label it has cannot be told from it."""
CUT_AT_THE_COMMA = {
    (258, "6b_verification"),
    (258, "175b_verification"),
    (420, "6b_verification"),
    (452, "6b_verification"),
    (583, "6b_verification"),
}
"""The solution arrives at the right number, and its last line has only what came before the comma: `A: 5` for 5,600."""


@dataclass(frozen=True)
class Solution:
    line: int
    model: str
    text: str
    is_correct: bool
    truth: str
    """As in test.jsonl: a worked solution that ends in `#### 18`."""

    @property
    def place(self):
        return self.line, self.model

    @property
    def answer(self):
        """What follows `A: ` in the last line. None: the text has no such line."""
        last = self.text.rpartition("\n")[2]
        return last.removeprefix(MARK) if last.startswith(MARK) else None


@pytest.fixture(scope="module")
def rows():
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in FILES]


@pytest.fixture(scope="module")
def solutions(rows):
    return [
        Solution(line, model, solved[model]["solution"], solved[model]["is_correct"], test["answer"])
        for line, (test, solved) in enumerate(zip(*rows, strict=True), 1)
        for model in MODELS
    ]


def places(solutions):
    return {solution.place for solution in solutions}


def test_all_of_it_is_there(rows, solutions):
    assert [len(file) for file in rows] == [ROWS, ROWS]
    assert len(solutions) == ROWS * len(MODELS)
    assert {model: sum(found.is_correct for found in solutions if found.model == model) for model in MODELS} == {
        "6b_finetuning": 146,
        "6b_verification": 266,
        "175b_finetuning": 225,
        "175b_verification": 371,
    }


def test_both_files_have_the_same_questions_and_ground_truths_and_all_are_read(rows):
    for test, solved in zip(*rows, strict=True):
        assert test["question"] == solved["question"]
        assert test["answer"].replace("\n#### ", "\nA: ") == solved["ground_truth"]
        number = gsm8k.final_answer(test["answer"])
        assert number == solved["ground_truth"].rpartition(MARK)[2].replace(",", "")
        assert re.fullmatch(r"-?[0-9]+", number)


def test_the_texts_without_an_answer_are_these(solutions):
    assert places(found for found in solutions if found.answer is None) == CUT_OFF
    assert places(found for found in solutions if found.is_correct).isdisjoint(CUT_OFF)


def test_strict_agrees_with_every_label(solutions):
    """With the data's own mark, `A: `, written as GSM8K's."""

    def score(found):
        return gsm8k.compute_score(re.sub(r"^A: ", "#### ", found.text, flags=re.MULTILINE), found.truth, "strict")

    assert places(found for found in solutions if score(found) != found.is_correct) == set()
    assert not any(score(found) for found in solutions if found.place in CUT_OFF)


def test_flexible_agrees_with_every_label(solutions):
    def score(found):
        return gsm8k.compute_score(found.text, found.truth, "flexible")

    assert places(found for found in solutions if score(found) != found.is_correct) == set()


def test_math_agrees_with_every_label(solutions):
    """With the answer in a box. All are plain numbers, but for one in billions."""
    told = [found for found in solutions if found.answer is not None and " " not in found.answer]
    assert len(told) == ROWS * len(MODELS) - len(CUT_OFF) - 1
    wrong = [
        found
        for found in told
        if math.compute_score(f"So it is $\\boxed{{{found.answer}}}$.", gsm8k.final_answer(found.truth))
        != found.is_correct
    ]
    math.close()
    assert places(wrong) == set()


DRESSES = (
    "#### {}",
    "The answer is **{}**.",
    "It is ${}.00.",
    "$\\boxed{{{}}}$",
    "So she has {} of them!",
    "\\[ x = {} \\]",
)


@pytest.mark.parametrize("dress", DRESSES)
def test_flexible_agrees_with_the_labels_however_the_last_line_puts_the_answer(solutions, dress):
    told = [found for found in solutions if found.answer is not None and re.fullmatch(r"-?[0-9,]+", found.answer)]
    assert len(told) > 2500
    wrong = [
        found
        for found in told
        if gsm8k.compute_score(
            f"{found.text.rpartition(chr(10))[0]}\n{dress.format(found.answer)}", found.truth, "flexible"
        )
        != found.is_correct
    ]
    assert places(wrong) == set()


def test_solutions_that_are_right_but_for_their_cut_last_line_are_these(solutions):
    def worked_out(found):
        return gsm8k.compute_score(found.text.rpartition("\n")[0], found.truth, "flexible") == 1.0

    assert places(found for found in solutions if worked_out(found) and not found.is_correct) == CUT_AT_THE_COMMA
    assert sum(found.is_correct and not worked_out(found) for found in solutions) == 24
    for found in solutions:
        if found.place in CUT_AT_THE_COMMA:
            assert gsm8k.final_answer(found.truth) != found.answer
            assert f"{int(gsm8k.final_answer(found.truth)):,}".startswith(f"{found.answer},")
