"""One score of several rewards: what counts, what is left out, and when there is none."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from toolyard.rewards.combination import MISSING, Combined, Weights, combine

DEFAULT = Weights()


def test_by_default_the_answer_and_the_steps_count_and_calc_reward_is_only_kept():
    got = combine(DEFAULT, final=1.0, steps={"calc": [-0.05, -0.05], "code": [0.0]}, tools={"calc": 1.0, "code": 0.0})
    assert got == Combined(0.9, {"final": 1.0, "step": -0.1, "tool/calc": 1.0, "tool/code": 0.0})


def test_every_part_is_weighted():
    weights = Weights(final=2, step=10, tool=0.5, interaction=-1)
    got = combine(weights, final=1.0, steps={"a": [0.1]}, tools={"a": 4.0, "b": 2.0}, interaction=0.25)
    assert got.score == 2 + 1 + 2 + 1 - 0.25
    assert got.parts == {"final": 1.0, "step": 0.1, "tool/a": 4.0, "tool/b": 2.0, "interaction": 0.25}


def test_tools_may_be_weighted_by_name_and_others_do_not_count():
    weights = Weights(tool={"a": 2.0, "absent": 100.0})
    got = combine(weights, final=0.0, steps={}, tools={"a": 1.0, "b": 50.0})
    assert got == Combined(2.0, {"final": 0.0, "tool/a": 1.0, "tool/b": 50.0})


# What does not apply --------------------------------------------------------------------------------------------------


def test_parts_that_do_not_apply_are_left_out():
    assert combine(DEFAULT, final=1.0, steps={}, tools={}) == Combined(1.0, {"final": 1.0})


def test_without_a_final_reward_the_rest_makes_the_score():
    assert combine(DEFAULT, final=MISSING, steps={"a": [0.5]}, tools={}).score == 0.5
    assert combine(Weights(tool=1), final=MISSING, steps={"a": []}, tools={"a": 0.0}).score == 0.0
    assert combine(DEFAULT, final=MISSING, steps={}, tools={}, interaction=0.25).score == 0.25


@pytest.mark.parametrize(
    ("weights", "steps", "tools"),
    [(DEFAULT, {}, {}), (DEFAULT, {"a": []}, {"a": 1.0}), (Weights(step=0), {"a": [1.0]}, {"a": 1.0})],
)
def test_where_nobody_judged_there_is_no_score(weights, steps, tools):
    got = combine(weights, final=MISSING, steps=steps, tools=tools)
    assert got.score is None
    assert got.why_missing == "no reward applies: none is configured, or its weight is 0"


# What failed ----------------------------------------------------------------------------------------------------------


def test_a_part_that_failed_makes_the_score_absent_and_says_why():
    got = combine(DEFAULT, final=None, steps={"a": [1.0]}, tools={}, reasons={"final": "did not finish within 5 s"})
    assert got.score is None
    assert got.parts == {"final": None, "step": 1.0}
    assert got.why_missing == "final could not be computed: did not finish within 5 s"


def test_every_part_that_failed_is_named():
    got = combine(Weights(tool=1), final=None, steps={}, tools={"a": None, "b": 1.0}, interaction=None)
    assert got.score is None
    assert got.why_missing == (
        "final could not be computed; tool/a could not be computed; interaction could not be computed"
    )


def test_a_part_that_failed_but_does_not_count_does_no_harm():
    got = combine(DEFAULT, final=1.0, steps={}, tools={"a": None})
    assert got == Combined(1.0, {"final": 1.0, "tool/a": None})
    assert combine(Weights(final=0), final=None, steps={"a": [0.5]}, tools={}).score == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_a_failure(bad):
    assert combine(DEFAULT, final=bad, steps={}, tools={}) == Combined(
        None, {"final": None}, "final could not be computed", ("final",)
    )
    assert combine(DEFAULT, final=1.0, steps={"a": [bad, 1.0]}, tools={}).score is None
    assert combine(DEFAULT, final=1.0, steps={"a": [bad, -bad]}, tools={}).parts["step"] is None


def test_a_sum_that_overflows_is_no_score():
    got = combine(Weights(final=1e10), final=1e300, steps={}, tools={})
    assert (got.score, got.why_missing) == (None, "the weighted sum is not a finite number")


# Order and configuration ----------------------------------------------------------------------------------------------


def test_the_score_does_not_depend_on_the_order_in_which_calls_ended():
    rewards = [0.1, 0.2, 0.3, 1e16, -1e16]
    scores = {combine(DEFAULT, final=0.1, steps={"a": list(order)}, tools={}).score for order in permutations(rewards)}
    assert len(scores) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"final": math.nan}, {"step": math.inf}, {"tool": {"a": math.nan}}, {"tool": "x"}, {"finale": 1}, {"tool": None}],
    ids=str,
)
def test_weights_are_finite_and_known(wrong):
    with pytest.raises(ValidationError):
        Weights.model_validate(wrong)


rewards = st.floats() | st.none()


@given(
    weights=st.builds(
        Weights,
        final=st.floats(-9, 9),
        step=st.floats(-9, 9),
        tool=st.floats(-9, 9) | st.dictionaries(st.sampled_from("abc"), st.floats(-9, 9)),
        interaction=st.floats(-9, 9),
    ),
    final=rewards | st.just(MISSING),
    steps=st.dictionaries(st.sampled_from("abc"), st.lists(st.floats(), max_size=3)),
    tools=st.dictionaries(st.sampled_from("abc"), rewards),
    interaction=rewards | st.just(MISSING),
)
def test_there_is_a_finite_score_or_a_reason(weights, final, steps, tools, interaction):
    got = combine(weights, final=final, steps=steps, tools=tools, interaction=interaction)
    assert (got.score is None) == (got.why_missing is not None)
    assert got.score is None or math.isfinite(got.score)
    assert all(value is None or math.isfinite(value) for value in got.parts.values())
