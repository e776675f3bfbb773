"""The audit accepts what is right, and finds each single thing that is wrong."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from patience import processor_time
from toolyard.messages import Message
from toolyard.records.audit import ProblemKind, audit, check_extension
from toolyard.records.trajectory import Failure, Tokens, Trajectory
from toolyard.tokens import ids_crc
from trajectory_samples import decode, failed_trajectory, good_trajectory

K = ProblemKind
QUICK = settings(max_examples=examples(60), deadline=None)
seeds = st.integers(0, 10_000)


def kinds(trajectory: Trajectory) -> set[ProblemKind]:
    return {problem.kind for problem in audit(trajectory, decode)}


def with_tokens(trajectory: Trajectory, **changes) -> Trajectory:
    return replace(trajectory, tokens=replace(trajectory.tokens, **changes))


def with_sampled(trajectory: Trajectory, at: int, **changes) -> Trajectory:
    turns = list(trajectory.turns)
    turns[at] = replace(turns[at], sampled=replace(turns[at].sampled, **changes))
    return replace(trajectory, turns=tuple(turns))


def changed(values: list, at: int, value: object) -> list:
    return [*values[:at], value, *values[at + 1 :]]


# What is right --------------------------------------------------------------------------------------------------------


@QUICK
@given(seeds, st.integers(1, 6), st.booleans())
def test_what_is_right_has_no_problem(seed: int, turns: int, logprobs: bool) -> None:
    good = good_trajectory(seed, turns=turns, logprobs=logprobs)
    for turn in good.turns:
        seen = good.tokens.prompt_ids + good.tokens.response_ids[: turn.sampled.start]
        assert turn.sampled.prompt_crc == ids_crc(seen)
    assert audit(good, decode) == []


def test_a_request_that_ended_before_anything_was_sampled_is_right() -> None:
    assert audit(failed_trajectory(), decode) == []
    too_long = replace(failed_trajectory(), state="COMPLETED", failure=None, finish_reason="prompt_too_long")
    assert audit(replace(too_long, input="abc", tokens=Tokens([97, 98, 99])), decode) == []


def test_a_failure_in_the_middle_of_the_calls_is_right() -> None:
    whole = good_trajectory(1, turns=3)
    assert whole.turns[1].tool_calls
    end = whole.turns[1].sampled.end
    tokens = whole.tokens
    assert tokens.response_logprobs is not None
    cut = replace(
        whole,
        state="FAILED",
        score=None,
        failure=Failure("ours", "tool_calling", "SandboxError: gone"),
        turns=whole.turns[:2],
        output=decode(tokens.response_ids[:end]),
        tokens=Tokens(
            tokens.prompt_ids, tokens.response_ids[:end], tokens.response_mask[:end], tokens.response_logprobs[:end]
        ),
    )
    spoken = [at for at, message in enumerate(whole.messages) if message.role == "assistant"]
    assert audit(replace(cut, messages=whole.messages[: spoken[1] + 1]), decode) == []


def test_a_prompt_may_bring_messages_of_an_assistant_and_of_tools_along() -> None:
    good = good_trajectory(2)
    example = (Message("user", "1+1"), Message("assistant", "?"), Message("tool", "2"), Message("assistant", "2"))
    assert audit(replace(good, messages=(*example, *good.messages)), decode) == []


def test_a_malformed_call_need_not_be_answered_by_a_tool() -> None:
    good = good_trajectory(2)
    first = good.turns[0]
    malformed = replace(first.tool_calls[0], id="bad_0", outcome="malformed")
    turns = (replace(first, tool_calls=(malformed, *first.tool_calls)), *good.turns[1:])
    assert audit(replace(good, turns=turns), decode) == []


def test_a_certainty_that_16_bits_put_a_little_above_zero_is_right() -> None:
    good = good_trajectory()
    assert good.tokens.response_logprobs is not None
    assert audit(with_tokens(good, response_logprobs=changed(good.tokens.response_logprobs, 0, 5e-4))) == []


def test_tokens_that_are_not_claimed_to_be_exact_are_not_looked_at() -> None:
    wrong = replace(good_trajectory(), tokens=Tokens([-1], [2], [3], [4.0]), input="other")
    assert kinds(wrong)
    assert kinds(replace(wrong, token_exact=False)) == set()


# What is wrong --------------------------------------------------------------------------------------------------------


@QUICK
@given(seeds, st.data())
def test_a_changed_id_is_found_by_the_prompts_or_by_the_text(seed: int, data: st.DataObject) -> None:
    good = good_trajectory(seed)
    tokens = good.tokens
    at = data.draw(st.integers(0, len(tokens.response_ids) - 1))
    wrong = with_tokens(good, response_ids=changed(tokens.response_ids, at, tokens.response_ids[at] + 1))
    assert K.TEXT in kinds(wrong)
    if at < good.turns[-1].sampled.start:  # every id that a later turn was sampled after
        assert {problem.kind for problem in audit(wrong)} == {K.PROMPT}


@QUICK
@given(seeds, st.data())
def test_a_changed_prompt_is_found_without_a_tokenizer(seed: int, data: st.DataObject) -> None:
    good = good_trajectory(seed)
    at = data.draw(st.integers(0, len(good.tokens.prompt_ids) - 1))
    wrong = with_tokens(good, prompt_ids=changed(good.tokens.prompt_ids, at, 5))
    assert [(problem.kind, problem.where) for problem in audit(wrong)] == [(K.PROMPT, "turns[0].sampled.prompt_crc")]


@QUICK
@given(seeds, st.data(), st.sampled_from(["flip", 2, -1, 0.5, None, True, "1"]))
def test_a_changed_mask_is_found(seed: int, data: st.DataObject, value: object) -> None:
    good = good_trajectory(seed)
    mask = good.tokens.response_mask
    at = data.draw(st.integers(0, len(mask) - 1))
    value = 1 - mask[at] if value == "flip" else value
    found = audit(with_tokens(good, response_mask=changed(mask, at, value)), decode)
    assert [(problem.kind, problem.where) for problem in found] == [(K.MASK, f"tokens.response_mask[{at}]")]


@QUICK
@given(seeds, st.data(), st.sampled_from([0.5, math.nan, math.inf, -math.inf, None, "-1", 10**400]))
def test_a_logprob_that_is_none_is_found(seed: int, data: st.DataObject, value: object) -> None:
    good = good_trajectory(seed)
    logprobs = good.tokens.response_logprobs
    assert logprobs is not None
    at = data.draw(st.integers(0, len(logprobs) - 1))
    found = audit(with_tokens(good, response_logprobs=changed(logprobs, at, value)), decode)
    assert [(problem.kind, problem.where) for problem in found] == [(K.LOGPROBS, f"tokens.response_logprobs[{at}]")]


def test_a_logprob_of_a_token_that_was_not_sampled_is_found() -> None:
    good = good_trajectory()
    at = good.tokens.response_mask.index(0)
    assert good.tokens.response_logprobs is not None
    found = audit(with_tokens(good, response_logprobs=changed(good.tokens.response_logprobs, at, -0.5)))
    assert [problem.where for problem in found] == [f"tokens.response_logprobs[{at}]"]


@pytest.mark.parametrize("name", ["response_mask", "response_logprobs", "response_ids"])
@pytest.mark.parametrize("by", [-1, 1])
def test_lists_of_other_lengths_are_found(name: str, by: int) -> None:
    good = good_trajectory()
    values = getattr(good.tokens, name)
    found = audit(with_tokens(good, **{name: values[:-1] if by < 0 else [*values, 0]}))
    assert K.LENGTHS in {problem.kind for problem in found}


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "7", 2**63])
@pytest.mark.parametrize("name", ["prompt_ids", "response_ids"])
def test_what_is_no_token_id_is_found(name: str, value: object) -> None:
    good = good_trajectory()
    found = audit(with_tokens(good, **{name: changed(getattr(good.tokens, name), 3, value)}), decode)
    assert [str(problem) for problem in found] == [f"ids: tokens.{name}[3]: {value!r} is not a token id"]


@QUICK
@given(seeds, st.integers(0, 2), st.sampled_from(["start", "end"]), st.integers(-50, 50).filter(bool))
def test_a_moved_span_is_found(seed: int, at: int, edge: str, by: int) -> None:
    good = good_trajectory(seed)
    sampled = good.turns[at].sampled
    assert kinds(with_sampled(good, at, **{edge: getattr(sampled, edge) + by})) & {K.SPANS, K.MASK}


@QUICK
@given(seeds, st.integers(0, 2), st.integers(1, 2**32 - 1))
def test_another_prompt_is_found(seed: int, at: int, by: int) -> None:
    good = good_trajectory(seed)
    found = audit(with_sampled(good, at, prompt_crc=good.turns[at].sampled.prompt_crc ^ by), decode)
    assert [(problem.kind, problem.where) for problem in found] == [(K.PROMPT, f"turns[{at}].sampled.prompt_crc")]


def test_a_prompt_that_was_too_short_is_told_with_its_length_and_both_ends() -> None:
    good = good_trajectory()
    wrong = with_sampled(good, 1, prompt_crc=good.turns[0].sampled.prompt_crc)
    prompt, before = good.input, good.input + good.output[: good.turns[1].sampled.start]
    message = audit(wrong, decode)[0].message
    assert f"is not the {len(before)} ids before this turn" in message
    assert f"ending in {before[-8:]!r}: it is the first {len(prompt)} ids, ending in {prompt[-8:]!r}" in message


def test_tokens_or_turns_that_are_missing_are_found() -> None:
    good = good_trajectory()
    assert K.MISSING in kinds(replace(good, turns=()))
    assert K.MISSING in kinds(replace(good, tokens=Tokens(), turns=()))
    assert K.MISSING in kinds(with_tokens(good, prompt_ids=[]))
    assert K.SPANS in kinds(replace(good, tokens=Tokens(good.tokens.prompt_ids)))


@QUICK
@given(seeds, st.integers(2, 5), st.data())
def test_a_message_that_is_missing_is_found(seed: int, turns: int, data: st.DataObject) -> None:
    good = good_trajectory(seed, turns=turns)
    at = data.draw(st.integers(2, len(good.messages) - 1))
    messages = (*good.messages[:at], *good.messages[at + 1 :])
    assert kinds(replace(good, messages=messages)) == {K.MESSAGES}


@QUICK
@given(seeds, st.integers(2, 5), st.data())
def test_a_turn_that_is_missing_is_found(seed: int, turns: int, data: st.DataObject) -> None:
    good = good_trajectory(seed, turns=turns)
    at = data.draw(st.integers(0, turns - 1))
    assert {K.MESSAGES, K.MASK} <= kinds(replace(good, turns=good.turns[:at] + good.turns[at + 1 :]))


def test_answers_in_another_order_or_with_another_id_are_found() -> None:
    good = next(one for one in map(good_trajectory, range(100)) if len(one.turns[0].tool_calls) == 2)
    first, second = good.messages[3:5]
    swapped = (*good.messages[:3], second, first, *good.messages[5:])
    assert kinds(replace(good, messages=swapped)) == {K.MESSAGES}
    renamed = (*good.messages[:3], replace(first, tool_call_id="other"), second, *good.messages[5:])
    found = audit(replace(good, messages=renamed))
    assert "called ['call_0_0', 'call_0_1'], but answered ['other', 'call_0_1']" in found[0].message


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"state": "FAILED", "score": None}, "failure"),
        ({"state": "FAILED", "failure": Failure("ours", "reward", "x"), "score": 0.0}, "score"),
        ({"failure": Failure("ours", "reward", "x"), "score": None}, "failure"),
        ({"state": "GENERATING"}, "state"),
        ({"score": math.nan}, "score"),
    ],
)
def test_a_state_that_contradicts_failure_or_score_is_found(changes: dict, where: str) -> None:
    found = audit(replace(good_trajectory(), **changes))
    assert [(problem.kind, problem.where) for problem in found] == [(K.OUTCOME, where)]


def test_a_completed_request_may_lack_a_score() -> None:
    assert audit(replace(good_trajectory(), score=None)) == []


def test_a_text_that_is_not_that_of_the_tokens_is_shown_from_where_it_differs() -> None:
    good = good_trajectory(tokens=300)
    at = 150
    wrong = replace(good, output=good.output[:at] + "#" + good.output[at + 1 :])
    (found,) = audit(wrong, decode)
    assert (found.kind, found.where) == (K.TEXT, "output")
    assert f"at character {at}: …'{good.output[at - 24 : at]}#" in found.message
    assert audit(wrong) == []


def test_a_tokenizer_that_cannot_decode_is_a_problem_not_a_crash() -> None:
    good = good_trajectory()
    found = audit(with_tokens(good, prompt_ids=[2**40]), decode)
    assert {problem.kind for problem in found} == {K.PROMPT, K.TEXT}
    assert any("cannot decode" in problem.message for problem in found)


def test_it_takes_time_linear_in_the_tokens_whatever_the_number_of_turns() -> None:
    few, many = good_trajectory(1, turns=2, tokens=50_000), good_trajectory(1, turns=6_000, tokens=12)
    for trajectory in (few, many):
        took: list[float] = []
        for _ in range(3):  # on a busy machine a single one may be slow
            start = time.process_time()
            assert audit(trajectory) == []
            took.append(time.process_time() - start)
        assert min(took) < processor_time(0.5)


# Extensions -----------------------------------------------------------------------------------------------------------


@QUICK
@given(st.lists(st.integers(97, 122), max_size=30), st.lists(st.integers(97, 122), max_size=30))
def test_an_extension_begins_with_its_prefix_and_nothing_else_does(prefix: list[int], more: list[int]) -> None:
    assert check_extension(prefix, prefix + more, decode) is None
    assert check_extension(tuple(prefix), prefix + more) is None
    assert (check_extension(prefix, more) is None) == (more[: len(prefix)] == prefix)
    for at in range(len(prefix)):
        found = check_extension(prefix, changed(prefix, at, 65) + more, decode)
        assert found is not None
        assert (found.index, found.expected, found.found) == (at, prefix[at], 65)
        assert found.found_next.startswith("'A")


def test_the_first_difference_is_decoded_on_both_sides() -> None:
    expected, found = [ord(char) for char in "the answer is 42"], [ord(char) for char in "the answer was 42"]
    difference = check_extension(expected, found, decode)
    assert str(difference) == "at 11: expected 105 'is 42', found 119 'was 42', after ' answer '"


def test_ids_that_end_too_early_differ_at_their_end() -> None:
    assert str(check_extension([1, 2, 3], [1, 2])) == "at 2: expected 3 [3], found the end [], after [1, 2]"


def test_a_million_equal_ids_are_compared_in_no_time() -> None:
    ids = list(range(1_000_000))
    other = list(range(1_000_100))
    start = time.process_time()
    assert check_extension(ids, other) is None
    assert time.process_time() - start < processor_time(0.3)


# What an engine cannot have sampled -----------------------------------------------------------------------------------


def test_an_id_outside_the_vocabulary_is_found_with_a_tokenizer() -> None:
    trajectory = good_trajectory()
    biggest = max([*trajectory.tokens.prompt_ids, *trajectory.tokens.response_ids])
    assert audit(trajectory, vocab_size=biggest + 1) == []
    problems = audit(trajectory, vocab_size=biggest)
    assert {problem.kind for problem in problems} == {ProblemKind.IDS}
    assert f"{biggest} is not a token id in a vocabulary of {biggest}" in str(problems[0])


@pytest.mark.parametrize("stopped_by", [None, 10**6, "DONE"])
def test_a_stop_without_what_it_was_stopped_by_is_found(stopped_by: int | str | None) -> None:
    trajectory = good_trajectory()
    last = trajectory.turns[-1]
    sampled = replace(last.sampled, finish="stop", stopped_by=stopped_by)
    turns = (*trajectory.turns[:-1], replace(last, sampled=sampled))
    assert [problem.kind for problem in audit(replace(trajectory, turns=turns))] == [ProblemKind.STOP]
    sampled = replace(sampled, stopped_by=trajectory.tokens.response_ids[sampled.end - 1])
    turns = (*trajectory.turns[:-1], replace(last, sampled=sampled))
    assert audit(replace(trajectory, turns=turns)) == []
