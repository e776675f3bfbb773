"""Trainable trajectories become samples unchanged; others are refused with a reason."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from pictures import png
from toolyard.errors import ConfigError
from toolyard.images import image_of
from toolyard.records.lines import to_line, trajectory_of
from toolyard.records.trajectory import Failure, Tokens, Trajectory
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.train.groups import SampleGroup, grouped
from toolyard.train.padding import padded
from toolyard.train.samples import Refusal, Refused, TrainingSample, sample_of, samples_of
from trajectory_samples import failed_trajectory, good_trajectory

QUICK = settings(max_examples=examples(60), deadline=None)
seeds = st.integers(0, 10_000)
rewards = st.floats(-1e6, 1e6, allow_nan=False)


def taken(trajectory: Trajectory, **settings) -> TrainingSample:
    sample = sample_of(trajectory, **settings)
    assert isinstance(sample, TrainingSample), sample
    return sample


def refused(trajectory: Trajectory, **settings) -> Refused:
    found = sample_of(trajectory, **settings)
    assert isinstance(found, Refused), found
    assert found.request_id == trajectory.request_id
    assert found.why
    return found


def with_tokens(trajectory: Trajectory, **changes) -> Trajectory:
    return replace(trajectory, tokens=replace(trajectory.tokens, **changes))


def with_sampled(trajectory: Trajectory, at: int, **changes) -> Trajectory:
    turns = list(trajectory.turns)
    turns[at] = replace(turns[at], sampled=replace(turns[at].sampled, **changes))
    return replace(trajectory, turns=tuple(turns))


def failed(reason: FinishReason, error: str = "EngineError: away") -> Trajectory:
    """The trajectory of a request that completed."""
    failure = Failure("ours", "generating", f"Traceback (most recent call last):\n  …\n{error}")
    return replace(good_trajectory(), state="FAILED", finish_reason=reason.value, score=None, failure=failure)


def empty(prompt: str = "abc") -> Trajectory:
    """COMPLETED and scored, with an answer of no token at all."""
    good = good_trajectory(turns=1)
    ids = [ord(character) for character in prompt]
    bare = replace(good, input=prompt, output="", tokens=Tokens(ids, [], [], []))
    return replace(bare, turns=(), messages=good.messages[:2])


def sample(reward: float, group: str = "task@1", name: str = "", **changes) -> TrainingSample:
    made = TrainingSample(name, group, [1, 2], [3, 4], [1, 0], [-0.5, 0.0], reward, (), "stop", False)
    return replace(made, **changes)


def group_of(*given: float) -> SampleGroup:
    (group,) = grouped([sample(reward) for reward in given])
    return group


# Taken ----------------------------------------------------------------------------------------------------------------


@QUICK
@given(seeds, st.integers(1, 5), st.booleans(), rewards)
def test_a_sample_has_the_ids_mask_and_logprobs_of_its_trajectory(
    seed: int, turns: int, logprobs: bool, score: float
) -> None:
    good = replace(good_trajectory(seed, turns=turns, logprobs=logprobs), score=score)
    made = taken(good)
    assert Tokens(made.prompt_ids, made.response_ids, made.response_mask, made.logprobs) == good.tokens
    assert (made.request_id, made.reward, made.finish_reason) == (good.request_id, score, "stop")
    assert len(made.response_mask) == len(made.response_ids)
    assert made.logprobs is None or len(made.logprobs) == len(made.response_ids)


def test_a_sample_survives_the_dump_that_its_trajectory_was_written_to() -> None:
    good = good_trajectory(3)
    assert taken(trajectory_of(to_line(good))) == taken(good)


def test_changing_a_sample_changes_no_trajectory() -> None:
    good = good_trajectory()
    before = to_line(good)
    made = taken(good)
    assert made.logprobs is not None
    for values in (made.prompt_ids, made.response_ids, made.response_mask, made.logprobs):
        values.append(0)
    assert to_line(good) == before


def test_a_score_of_zero_is_a_reward() -> None:
    made = taken(replace(good_trajectory(), score=0))
    assert made.reward == 0.0
    assert isinstance(made.reward, float)


def test_a_group_is_a_task_in_a_step() -> None:
    first, second = good_trajectory(1, step=4), good_trajectory(2, step=4)
    assert taken(first).group == taken(second).group == "task-0@4"
    assert taken(good_trajectory(1, step=5)).group != taken(first).group
    assert taken(good_trajectory(9, step=4)).group != taken(first).group


def test_every_version_of_the_weights_is_named_once_in_the_order_of_the_turns() -> None:
    good = good_trajectory(turns=4)
    for at, versions in enumerate([("7",), ("7", "8"), (), ("10", "8")]):
        good = with_sampled(good, at, weight_versions=versions)
    assert taken(good).weight_versions == ("7", "8", "10")
    silent = good_trajectory(turns=1)
    assert taken(with_sampled(silent, 0, weight_versions=())).weight_versions == ()


def test_every_sampled_token_has_the_version_of_its_weights() -> None:
    good = good_trajectory(turns=2)
    first, second = (turn.sampled for turn in good.turns)
    assert taken(good).token_versions == ["7" if bit else "" for bit in good.tokens.response_mask]
    mixed = with_sampled(good, 1, weight_versions=("8", "9"), version_starts=(0, 2))
    told = taken(mixed).token_versions
    assert told is not None
    assert told[first.start : first.end] == ["7"] * (first.end - first.start)
    assert told[second.start : second.end] == ["8"] * 2 + ["9"] * (second.end - second.start - 2)
    for unknown in ({"weight_versions": ()}, {"weight_versions": ("8", "9")}, {"version_starts": (0, 1)}):
        assert taken(with_sampled(good, 1, **unknown)).token_versions is None
    for wrong in ((1, 2), (0, 900), (2, 0)):
        assert taken(with_sampled(mixed, 1, version_starts=wrong)).token_versions is None


def test_what_is_masked_in_a_branch_has_no_version_and_no_log_probability() -> None:
    good = good_trajectory()
    session = {**good.metrics, "branch": {"session": good.request_id}}
    branches = [replace(good, metrics=session, request_id=name) for name in ("first", "second")]
    trained, masked = samples_of(branches).samples
    assert trained.token_versions == ["7" if bit else "" for bit in good.tokens.response_mask]
    assert not any(masked.response_mask)
    assert masked.token_versions == [""] * len(masked.response_ids)
    assert masked.logprobs == [0.0] * len(masked.response_ids)


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason.state is RolloutState.COMPLETED])
def test_whatever_completed_is_a_sample_and_truncated_where_the_model_was_not_done(reason: FinishReason) -> None:
    made = taken(replace(good_trajectory(), finish_reason=reason.value))
    cut = {"length", "length_before_generation", "tool_response_too_long", "max_assistant_turns"}
    assert made.finish_reason == reason
    assert made.truncated == (reason.value in cut)


def test_a_truncated_sample_may_end_with_what_a_tool_said() -> None:
    whole = good_trajectory(5, turns=2)
    end = whole.turns[1].sampled.start
    tokens = whole.tokens
    assert tokens.response_logprobs is not None
    cut = replace(
        whole,
        finish_reason="length_before_generation",
        turns=whole.turns[:1],
        messages=whole.messages[:-1],
        output=whole.output[:end],
        tokens=Tokens(
            tokens.prompt_ids, tokens.response_ids[:end], tokens.response_mask[:end], tokens.response_logprobs[:end]
        ),
    )
    made = taken(cut)
    assert made.truncated
    assert made.response_mask[-1] == 0


def test_an_answer_that_is_only_a_stop_token_is_not_empty() -> None:
    good = good_trajectory(turns=1)
    first, prompt = good.turns[0], good.tokens.prompt_ids
    stop = replace(first, sampled=replace(first.sampled, end=1, text=""))
    silent = replace(good, turns=(stop,), output="\x03", tokens=Tokens(prompt, [3], [1], [-2.0]))
    assert taken(silent).response_ids == [3]


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason.state is RolloutState.FAILED])
def test_whatever_failed_is_refused(reason: FinishReason) -> None:
    own = {"token_drift": Refusal.FAILED_AUDIT, "reward_failure": Refusal.NO_REWARD}
    found = refused(failed(reason))
    assert found.refusal == own.get(reason.value, Refusal.FAILED_REQUEST)
    assert found.why == f"{reason.value} (ours): EngineError: away"


def test_a_failure_is_refused_also_if_it_says_nothing_or_somebody_scored_it() -> None:
    bare = failed(FinishReason.ABORTED)
    assert refused(replace(bare, failure=None)).refusal is Refusal.FAILED_REQUEST
    assert refused(replace(bare, failure=Failure("ours", "x", ""))).refusal is Refusal.FAILED_REQUEST
    assert refused(replace(bare, score=0.0)).refusal is Refusal.FAILED_REQUEST
    assert refused(replace(good_trajectory(), state="GENERATING")).refusal is Refusal.FAILED_REQUEST


@pytest.mark.parametrize("score", [None, math.nan, math.inf, -math.inf, 1e39, -1e300])
def test_what_is_no_finite_number_in_32_bits_is_no_reward(score: float | None) -> None:
    found = refused(replace(good_trajectory(), score=score))
    assert found.refusal is Refusal.NO_REWARD
    assert repr(score) in found.why


def test_tokens_that_are_not_exact_are_refused() -> None:
    assert refused(replace(good_trajectory(), token_exact=False)).refusal is Refusal.NOT_TOKEN_EXACT


def test_injected_faults_are_refused_and_the_mark_of_their_run_alone_is_not():
    def of_a_run_with_faults(*injected):
        return replace(good_trajectory(), metrics={"faults": {"profile": "chaos", "seed": 0, "injected": injected}})

    found = refused(of_a_run_with_faults({"kind": "tool_timeout", "turn": 0}))
    assert (found.refusal, "the first: tool_timeout" in found.why) == (Refusal.FAULTS, True)
    assert isinstance(sample_of(of_a_run_with_faults()), TrainingSample)


def test_what_saw_images_is_refused_since_trainers_get_tokens_only() -> None:
    good = good_trajectory()
    seen = replace(good.messages[-1], images=(image_of(png()),))
    found = refused(replace(good, messages=(*good.messages[:-1], seen)))
    assert (found.refusal, "1 images" in found.why) == (Refusal.HAS_IMAGES, True)


def test_a_line_of_verl_is_refused_for_the_tokens_that_it_does_not_have() -> None:
    line = json.dumps({"input": "1+1", "output": "2", "gts": "2", "score": 1.0, "step": 3})
    assert refused(trajectory_of(line)).refusal is Refusal.NOT_TOKEN_EXACT


def shorter(values: list) -> list:
    return values[:-1]


ALTERED: dict[str, Callable[[Trajectory], Trajectory]] = {
    "a mask that is too short": lambda it: with_tokens(it, response_mask=shorter(it.tokens.response_mask)),
    "a tool's token marked as sampled": lambda it: with_tokens(it, response_mask=[1] * len(it.tokens.response_mask)),
    "logprobs that are too few": lambda it: with_tokens(it, response_logprobs=shorter(it.tokens.response_logprobs)),
    "a logprob that is not a number": lambda it: with_tokens(
        it, response_logprobs=[math.nan, *it.tokens.response_logprobs[1:]]
    ),
    "an id that is none": lambda it: with_tokens(it, response_ids=[-1, *it.tokens.response_ids[1:]]),
    "another prompt than was seen": lambda it: with_tokens(it, prompt_ids=[*it.tokens.prompt_ids, 7]),
    "no prompt": lambda it: with_tokens(it, prompt_ids=[]),
    "an id changed before a later turn": lambda it: with_tokens(
        it, response_ids=[it.tokens.response_ids[0] + 1, *it.tokens.response_ids[1:]]
    ),
    "a turn that sampled nothing of it": lambda it: with_sampled(it, 0, end=it.turns[0].sampled.start),
    "a turn that is missing": lambda it: replace(it, turns=it.turns[:-1]),
    "a message that is missing": lambda it: replace(it, messages=it.messages[:2]),
    "completed, with a failure": lambda it: replace(it, failure=Failure("ours", "x", "y")),
}


@pytest.mark.parametrize("alter", ALTERED.values(), ids=ALTERED.keys())
def test_what_the_audit_would_not_pass_is_refused(alter: Callable[[Trajectory], Trajectory]) -> None:
    assert refused(alter(good_trajectory(4))).refusal is Refusal.FAILED_AUDIT


def test_a_refusal_by_the_audit_tells_the_first_problem_and_how_many_there_are() -> None:
    good = good_trajectory()
    assert refused(with_tokens(good, prompt_ids=[])).why.endswith("more)")
    assert "tokens.response_ids[0]" in refused(with_tokens(good, response_ids=[-1] * len(good.tokens.response_ids))).why


@QUICK
@given(seeds, st.data())
def test_no_flip_of_the_mask_gets_through(seed: int, data: st.DataObject) -> None:
    good = good_trajectory(seed)
    mask = list(good.tokens.response_mask)
    at = data.draw(st.integers(0, len(mask) - 1))
    mask[at] = 1 - mask[at]
    assert refused(with_tokens(good, response_mask=mask)).refusal is Refusal.FAILED_AUDIT


def test_an_answer_without_a_sampled_token_is_refused_as_empty() -> None:
    assert refused(empty()).refusal is Refusal.EMPTY
    good = good_trajectory(turns=1)
    nothing = replace(good.turns[0], sampled=replace(good.turns[0].sampled, end=0, text=""))
    asked = replace(good, turns=(nothing,), output="", tokens=Tokens(good.tokens.prompt_ids, [], [], []))
    assert refused(asked).refusal is Refusal.EMPTY


def test_a_response_is_refused_above_the_longest_that_is_taken_and_never_cut() -> None:
    good = good_trajectory()
    length = len(good.tokens.response_ids)
    assert len(taken(good, max_response_length=length).response_ids) == length
    found = refused(good, max_response_length=length - 1)
    assert found.refusal is Refusal.TOO_LONG
    assert str(length) in found.why


def test_where_several_refusals_apply_it_is_the_first_in_their_order() -> None:
    broken = replace(failed(FinishReason.ABORTED), token_exact=False, tokens=Tokens([1], [-1], [], []))
    found = [refused(broken, max_response_length=0)]
    steps = [
        {"state": "COMPLETED", "failure": None},
        {"score": 1.0},
        {"token_exact": True},
        {"tokens": empty().tokens, "turns": (), "output": ""},
    ]
    for changes in steps:
        broken = replace(broken, **changes)
        found.append(refused(broken, max_response_length=0))
    names = [Refusal.FAILED_REQUEST, Refusal.NO_REWARD, Refusal.NOT_TOKEN_EXACT, Refusal.FAILED_AUDIT, Refusal.EMPTY]
    assert [one.refusal for one in found] == names
    assert list(Refusal)[: len(names)] == names


# Many -----------------------------------------------------------------------------------------------------------------


@QUICK
@given(st.lists(st.sampled_from(["good", "failed", "unscored", "empty"])))
def test_every_trajectory_is_a_sample_or_refused_and_the_order_is_kept(kinds: list[str]) -> None:
    made = {
        "good": good_trajectory(1),
        "failed": failed_trajectory(),
        "unscored": replace(good_trajectory(2), score=None),
        "empty": empty(),
    }
    names = [f"{at}-{kind}" for at, kind in enumerate(kinds)]
    samples, others = samples_of(replace(made[kind], request_id=name) for kind, name in zip(kinds, names, strict=True))
    assert [one.request_id for one in samples] == [name for name in names if name.endswith("good")]
    assert [one.request_id for one in others] == [name for name in names if not name.endswith("good")]


def test_a_request_counts_once_however_often_it_was_written() -> None:
    good = good_trajectory()
    samples, others = samples_of([good, good_trajectory(1), good])
    assert [one.request_id for one in samples] == ["request-0", "request-1"]
    assert [(one.request_id, one.refusal) for one in others] == [("request-0", Refusal.DUPLICATE)]


def test_a_request_that_failed_and_was_run_again_is_no_duplicate() -> None:
    samples, others = samples_of([failed(FinishReason.ABORTED), good_trajectory()])
    assert len(samples) == 1
    assert [one.refusal for one in others] == [Refusal.FAILED_REQUEST]


def test_the_longest_that_is_taken_holds_for_all() -> None:
    samples, others = samples_of([good_trajectory(), good_trajectory(1)], max_response_length=0)
    assert not samples
    assert {one.refusal for one in others} == {Refusal.TOO_LONG}


# Groups ---------------------------------------------------------------------------------------------------------------


@QUICK
@given(st.lists(st.tuples(st.sampled_from("abc"), rewards)))
def test_groups_have_all_samples_in_their_order_however_they_are_mixed(given: list[tuple[str, float]]) -> None:
    samples = [sample(reward, group, str(at)) for at, (group, reward) in enumerate(given)]
    groups = grouped(samples)
    assert [group.name for group in groups] == list(dict.fromkeys(name for name, _ in given))
    for group in groups:
        assert group.samples == [one for one in samples if one.group == group.name]


@QUICK
@given(st.lists(rewards, min_size=1, max_size=12))
def test_advantages_add_up_to_nothing_and_keep_the_order_of_the_rewards(given: list[float]) -> None:
    group = group_of(*given)
    for scale in ("group", "none"):
        advantages = group.advantages(scale)
        assert len(advantages) == len(given)
        assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6 * (1 + max(map(abs, given))))
        for (one, other), (first, second) in zip(pairwise(given), pairwise(advantages), strict=True):
            assert first <= second if one <= other else first >= second


@QUICK
@given(st.lists(rewards, min_size=2, max_size=12), rewards)
def test_what_all_get_on_top_changes_no_advantage(given: list[float], more: float) -> None:
    plain, moved = group_of(*given), group_of(*(reward + more for reward in given))
    assert moved.advantages("none") == pytest.approx(plain.advantages("none"), abs=1e-6)


def test_advantages_are_those_of_trl() -> None:
    torch = pytest.importorskip("torch")
    given = [0.0, 1.0, 1.0, 0.25, -3.0]
    values = torch.tensor(given, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + 1e-4)
    assert group_of(*given).advantages() == pytest.approx(expected.tolist())
    assert group_of(*given).advantages("none") == pytest.approx((values - values.mean()).tolist())


@QUICK
@given(st.floats(-1e38, 1e38), st.integers(1, 12))
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(reward: float, size: int) -> None:
    group = group_of(*[reward] * size)
    assert not group.has_signal
    assert group.deviation == 0.0
    assert group.advantages() == group.advantages("none") == [0.0] * size


def test_a_sample_that_is_alone_in_its_group_has_no_advantage() -> None:
    good = replace(good_trajectory(0), score=1.0)
    others = [replace(good_trajectory(seed), score=None) for seed in range(1, 8)]
    (group,) = grouped(samples_of([good, *others]).samples)
    assert group.advantages() == [0.0]


def test_a_refused_one_counts_neither_for_nor_against_its_group() -> None:
    scores = [0.0, 1.0, None, 1.0]
    trajectories = [replace(good_trajectory(seed), score=score) for seed, score in enumerate(scores)]
    (group,) = grouped(samples_of(trajectories).samples)
    assert group.mean == pytest.approx(2 / 3)
    assert group.advantages() == group_of(0.0, 1.0, 1.0).advantages()


@QUICK
@given(st.lists(st.floats(-3.4e38, 3.4e38), min_size=2, max_size=9))
def test_the_largest_rewards_have_finite_advantages(given: list[float]) -> None:
    assert all(map(math.isfinite, group_of(*given).advantages()))


# Padding --------------------------------------------------------------------------------------------------------------


@QUICK
@given(st.lists(seeds, min_size=1, max_size=5, unique=True), st.integers(0, 9), st.integers(0, 9))
def test_padding_can_be_taken_off_again(chosen: list[int], more: int, still_more: int) -> None:
    samples = [taken(good_trajectory(seed, tokens=1 + seed % 13)) for seed in chosen]
    prompts = max(len(one.prompt_ids) for one in samples) + more
    responses = max(len(one.response_ids) for one in samples) + still_more
    batch = padded(samples, 0, prompt_length=prompts, response_length=responses)
    assert batch.logprobs is not None
    for at, one in enumerate(samples):
        assert {len(batch.prompt_ids[at]), len(batch.prompt_mask[at])} == {prompts}
        row = (batch.response_ids[at], batch.response_attention[at], batch.response_mask[at], batch.logprobs[at])
        assert {len(values) for values in row} == {responses}
        told, length = len(one.prompt_ids), len(one.response_ids)
        assert batch.prompt_ids[at] == [0] * (prompts - told) + one.prompt_ids
        assert batch.prompt_mask[at] == [0] * (prompts - told) + [1] * told
        assert batch.response_ids[at] == one.response_ids + [0] * (responses - length)
        assert batch.response_attention[at] == [1] * length + [0] * (responses - length)
        assert batch.response_mask[at] == one.response_mask + [0] * (responses - length)
        assert batch.logprobs[at] == one.logprobs + [0.0] * (responses - length)
        seen = [id_ for id_, real in zip(batch.input_ids[at], batch.attention_mask[at], strict=True) if real]
        places = [place for place, real in zip(batch.position_ids[at], batch.attention_mask[at], strict=True) if real]
        assert seen == one.prompt_ids + one.response_ids
        assert places == list(range(told + length))
    assert batch.rewards == [one.reward for one in samples]


def test_without_a_width_a_batch_is_as_wide_as_its_longest() -> None:
    samples = [taken(good_trajectory(seed, tokens=tokens)) for seed, tokens in ((0, 3), (1, 9))]
    batch = padded(samples, 0)
    assert batch.prompt_length == max(len(one.prompt_ids) for one in samples)
    assert batch.response_length == max(len(one.response_ids) for one in samples)


def test_logprobs_of_some_are_logprobs_of_none() -> None:
    assert padded([sample(1.0), sample(1.0, logprobs=None)], 0).logprobs is None


@pytest.mark.parametrize("name", ["prompt_length", "response_length"])
def test_a_sample_that_does_not_fit_is_named_and_not_cut(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'long' has 2 tokens, but {name} is 1"):
        padded([sample(1.0, name="long")], 0, **{name: 1})


def test_a_batch_becomes_tensors_of_one_shape() -> None:
    torch = pytest.importorskip("torch")
    samples = [taken(good_trajectory(seed, tokens=tokens)) for seed, tokens in ((0, 3), (1, 9))]
    batch = padded(samples, 5)
    tensors = batch.as_torch()
    assert tensors.input_ids.tolist() == batch.input_ids
    assert tensors.position_ids.tolist() == batch.position_ids
    assert tensors.input_ids.shape == tensors.attention_mask.shape == (2, batch.prompt_length + batch.response_length)
    assert tensors.response_mask.dtype == tensors.response_ids.dtype == torch.int64
    assert tensors.logprobs is not None
    assert tensors.logprobs.dtype == tensors.rewards.dtype == torch.float32
    assert padded([sample(1.0, logprobs=None)], 0).as_torch().logprobs is None


def test_no_samples_are_a_batch_of_no_rows() -> None:
    pytest.importorskip("torch")
    tensors = padded([], 0, prompt_length=4, response_length=3).as_torch()
    assert tensors.input_ids.shape == (0, 7)
    assert tensors.rewards.shape == (0,)


def test_samples_groups_and_padding_do_not_load_torch() -> None:
    code = "import sys, toolyard.train.samples, toolyard.train.groups, toolyard.train.padding as p\n"
    code += "p.padded([], 0)\nprint('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60, text=True)
    assert done.stdout.split() == ["False", "False"]
