"""Why a trajectory has its score, for lines of any origin."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from toolyard.records.lines import trajectory_of
from toolyard.rewards.combination import Weights, combine, reward_details
from toolyard.rewards.explanation import explain
from toolyard.viewer.reasons import RewardPart, reward_breakdown
from trajectory_samples import failed_trajectory, good_trajectory


def rewarded(score: float | None, rewards: dict, details: dict | None = None, **fields):
    given = replace(good_trajectory(turns=1), score=score, rewards=rewards, reward_details=details or {})
    return replace(given, **fields)


def test_the_formula_has_weights_and_values_and_every_part_its_explanation():
    weights = Weights(tool={"search": 0.5})
    combined = combine(weights, final=0.0, steps={"search": [-0.05]}, tools={"search": 1.0, "calc": 0.0})
    said = {"final": explain("the answer 71 is not 72", extracted="71", expected="72"), "tool/search": explain("found")}
    details = reward_details(weights, combined.parts, said, {})
    found = reward_breakdown(rewarded(combined.score, combined.parts, details))
    assert found.formula == "score 0.45 = 1 × final 0 + 1 × step -0.05 + 0.5 × tool/search 1 + 0 × tool/calc 0"
    final, step, search, calc = found.parts
    text = "the answer 71 is not 72"
    assert final == RewardPart("final", 0.0, 1.0, text, "71", "72", text), "what the reason quotes is not repeated"
    assert (step.sentence, search.sentence, calc.reason, calc.sentence) == ("", "found", None, "")


def test_what_the_reason_does_not_quote_follows_it_on_one_line():
    said = {"reason": "case 2 of 3: wrong answer", "extracted": "import os\n" * 20, "expected": "0\n1\n"}
    (part,) = reward_breakdown(rewarded(0.0, {"final": 0.0}, {"final": said})).parts
    assert part.sentence.startswith("case 2 of 3: wrong answer · extracted import os import os")
    assert part.sentence.endswith("… · expected 0 1")
    assert part.extracted == said["extracted"]


def test_unknown_is_a_dash_and_never_0():
    found = reward_breakdown(rewarded(1.0, {"final": 1.0, "tool/search": 0.0}))
    assert found.formula == "score 1 = – × final 1 + – × tool/search 0"
    assert [(part.weight, part.reason) for part in found.parts] == [(None, None), (None, None)]
    lost = reward_breakdown(rewarded(None, {"final": None}, {"final": {"weight": 1.0, "reason": "no ground truth"}}))
    assert (lost.formula, lost.parts[0].value) == ("score – = 1 × final –", None)
    assert reward_breakdown(failed_trajectory()).formula == "score –"


def test_earlier_lines_show_what_their_metrics_say():
    metrics = {"reward": {"why": "3 is not 5", "extracted": "3", "expected": "5", "timed_out": False, "weight": 7}}
    (part,) = reward_breakdown(rewarded(0.0, {"final": 0.0}, metrics=metrics)).parts
    assert (part.reason, part.extracted, part.expected, part.weight) == ("3 is not 5", "3", "5", None)


def test_step_rewards_are_counted():
    trajectory = replace(good_trajectory(turns=3), score=0.5, rewards={"step": 0.5})
    count = sum(len(turn.tool_calls) for turn in trajectory.turns)
    assert reward_breakdown(trajectory).parts[0].reason == f"the sum of {count} step rewards"


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ("", 0),
        (', "acc": true, "pred": "4", "weight": 7', 1),
        (', "reason": "the answer 4 equals 4", "extracted": "4"', 1),
        (', "reward_error": "no ground truth"', 1),
    ],
)
def test_verls_lines_show_what_they_have(more, parts):
    found = reward_breakdown(trajectory_of(f'{{"input": "q", "output": "4", "score": 1.0{more}}}'))
    assert (found.formula, len(found.parts)) == ("score 1", parts)
    assert [(part.name, part.value, part.weight) for part in found.parts] == [("score", 1.0, None)] * parts


def test_a_score_that_the_parts_do_not_give_is_not_called_equal():
    details = {"final": {"weight": 1.0}, "tool/a": {"weight": 0.0}}
    assert reward_breakdown(rewarded(0.7, {"final": 1.0, "tool/a": None}, details)).formula == (
        "score 0.7 ≠ 1 × final 1 + 0 × tool/a –"
    )
    withdrawn = reward_breakdown(rewarded(None, {"final": 1.0, "tool/a": None}, details))
    assert withdrawn.formula == "score – ≠ 1 × final 1 + 0 × tool/a –"
    assert reward_breakdown(rewarded(None, {"tool/a": 1.0}, details)).formula == "score – = 0 × tool/a 1"
    almost = reward_breakdown(rewarded(1.0 + 1e-12, {"final": 1.0, "tool/a": None}, details))
    assert almost.formula == "score 1 = 1 × final 1 + 0 × tool/a –"


@pytest.mark.parametrize("odd", ["x", [1], {"a": 1}, True, math.nan, math.inf, 10**400, None])
def test_odd_values_are_unknown(odd):
    details = {"final": {"weight": odd, "reason": odd, "extracted": odd, "expected": odd}, "other": odd}
    trajectory = rewarded(1.0, {"final": odd, "other": odd, "x\n" * 500: odd}, details, metrics={"reward": odd})
    found = reward_breakdown(trajectory)
    assert [(part.value, part.weight) for part in found.parts] == [(None, None)] * 3
    assert "\n" not in found.formula
    assert len(found.formula) < 300


def test_thousands_of_rewards_do_not_flood_the_page():
    huge = {f"tool/{number}": 1.0 for number in range(5_000)}
    details = {name: {"weight": 1.0, "reason": "y" * 10_000} for name in huge}
    found = reward_breakdown(rewarded(1.0, huge, details))
    assert len(found.parts) == 50
    assert found.formula.endswith("+ 4950 more")
    assert all(len(part.sentence) <= 300 for part in found.parts)
