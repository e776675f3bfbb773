"""What scorers say about a score: what they extracted, what they expected, and why."""

from __future__ import annotations

import json

import pytest

from toolyard.rewards import gsm8k
from toolyard.rewards.combination import Weights, combine, reward_details
from toolyard.rewards.explanation import Explanation, explain, explanation_in, short_text
from toolyard.rewards.function import FunctionReward
from toolyard.rewards.registry import load_reward

HUGE = "9" * 1_000_000


async def explained(reward, solution: str, truth) -> tuple[float, Explanation | None]:
    found = await reward.score("tests", solution, truth, {}, deadline_seconds=60)
    return found.value, found.explanation


# Texts ----------------------------------------------------------------------------------------------------------------


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two\nlines", "two\nlines"),
        (72, "72"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        ("half \ud83d", "half ?"),
        ({(1, 2): 3}, "(dict)"),
        ([10**5000], "(list)"),
        (Rude(), "(Rude)"),
    ],
)
def test_any_value_becomes_text_that_can_be_written(value, text):
    assert short_text(value) == text


def test_texts_are_cut_and_cutting_them_again_changes_nothing():
    once = explain(f"too\n long {HUGE}", extracted=HUGE, expected=[HUGE])
    assert all(len(text) == 300 and text.endswith("…") for text in (once.extracted, once.expected))
    assert once.reason is not None
    assert once.reason.startswith("too long 99")
    assert explanation_in(once.as_json()) == once


@pytest.mark.parametrize("said", [None, 1.0, "reason", [], {}, {"reason": None, "other": 1}])
def test_where_nothing_is_said_there_is_no_explanation(said):
    assert explanation_in(said) is None


# GSM8K ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "solution", "value", "extracted", "reason"),
    [
        ("strict", "#### 72", 1.0, "72", "the answer 72 equals 72"),
        ("strict", "#### 71", 0.0, "71", "the answer 71 is not 72"),
        ("strict", "#### 72.0", 0.0, "72.0", "the answer 72.0 is written differently from 72"),
        ("strict", "It is 72.", 0.0, None, "no number after '#### '"),
        ("flexible", "It is $72.00", 1.0, "72.00", "the answer 72.00 equals 72"),
        ("flexible", "It is 1,071", 0.0, "1071", "the answer 1071 is not 72"),
        ("flexible", "I do not know", 0.0, None, "no number in the answer"),
    ],
)
def test_gsm8k_says_what_it_compared(method, solution, value, extracted, reason):
    assert gsm8k.explained_score(solution, "72", method) == (value, Explanation(reason, extracted, "72"))
    assert gsm8k.compute_score(solution, "72", method) == value


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_a_number_of_a_million_digits_is_cut_in_its_explanation(method):
    value, why = gsm8k.explained_score(f"#### {HUGE}", "72", method)
    assert value == 0.0
    assert len(json.dumps(why.as_json())) < 700
    assert why.reason is not None
    assert why.reason.endswith("99 is not 72")


# Mathematics, code, functions -----------------------------------------------------------------------------------------


async def test_math_says_what_it_compared():
    pytest.importorskip("math_verify")
    async with load_reward("math", {"children": 1}) as reward:
        right = await explained(reward, r"So \boxed{\frac{2}{4}}.", "0.5")
        assert right == (1.0, Explanation(r"the answer \frac{2}{4} equals 0.5", r"\frac{2}{4}", "0.5"))
        assert await explained(reward, r"\boxed{3}", "5") == (0.0, Explanation("the answer 3 is not 5", "3", "5"))
        lost = await explained(reward, "no idea", "x + 1")
        assert lost == (0.0, Explanation("no expression in the answer", None, "x + 1"))
        _, huge = await explained(reward, rf"\boxed{{{HUGE}}}", "5")
        assert len(json.dumps(huge.as_json())) < 700


CASES = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}


DOUBLE = "print(int(input()) * 2)"
SAME = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, [3]]}


@pytest.mark.parametrize(
    ("name", "options", "answers"),
    [
        (
            "code",
            {},
            [
                (DOUBLE, "all 3 cases passed", None),
                (
                    "n = int(input())\nprint(n * 2 if n < 3 else 7)",
                    "case 3 of 3: wrong answer: line 1: got '7', expected '6'",
                    "6\n",
                ),
                ("print(", "compile error: SyntaxError: '(' was never closed", None),
                ("raise ValueError('x' * 10**6)", "case 1 of 3: runtime error: ValueError: xxx", "2\n"),
            ],
        ),
        ("code:continuous", {"first_n": 2}, [(DOUBLE, "all 2 cases passed, 1 not run", None)]),
    ],
)
async def test_code_names_the_first_case_that_failed(name, options, answers):
    async with load_reward(name, options) as reward:
        for program, reason, expected in answers:
            _, why = await explained(reward, f"```python\n{program}\n```", CASES)
            assert (why.extracted.rstrip(), why.expected) == (program, expected)
            assert why.reason.startswith(reason)
            assert len(why.reason) <= 300
        # Not only output: what a function should have returned, as JSON.
        _, why = await explained(reward, "```python\ndef f(x): return x\n```", SAME)
        assert (why.reason, why.expected) == ("case 2 of 2: wrong answer: got 2, expected [3]", "[3]")


async def test_code_says_that_there_is_no_program():
    async with load_reward("code") as reward:
        found = await explained(reward, "I do not know.", CASES)
    assert found == (0.0, Explanation("no program in the answer: no fenced block"))


async def test_a_function_may_explain_its_score_and_a_plain_number_is_enough():
    def mine(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "plain":
            return 0.5
        return {"score": 1, "reason": "it is\nfine", "extracted": 72, "expected": {"any": ["of", "these"]}, "length": 4}

    reward = FunctionReward("mine", mine)
    found = await reward.score("tests", "text", None, {}, deadline_seconds=60)
    assert found.explanation == Explanation("it is fine", "72", '{"any": ["of", "these"]}')
    assert found.extras == {"length": 4}
    assert await explained(reward, "plain", None) == (0.5, None)


# Weights --------------------------------------------------------------------------------------------------------------


def test_details_have_the_weight_of_every_part_and_the_last_line_of_a_failure():
    weights = Weights(final=2, tool={"a": 0.5})
    combined = combine(weights, final=None, steps={"a": [0.1]}, tools={"a": 1.0, "b": 1.0}, interaction=0.25)
    failures = {"final": "Traceback:\n  File x\nValueError: no\n", "tool/a": "its release failed"}
    said = {"tool/a": explain("good", extracted="x"), "final": None}
    assert reward_details(weights, combined.parts, said, failures) == {
        "final": {"weight": 2.0, "reason": "ValueError: no"},
        "step": {"weight": 1.0},
        "tool/a": {"weight": 0.5, "reason": "good", "extracted": "x"},
        "tool/b": {"weight": 0.0},
        "interaction": {"weight": 1.0},
    }
