"""The state machine of a request, driven through every order of events. No engine, no tool, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expensive import examples
from toolyard.engines.protocol import Finish
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.play.machine import (
    BEGIN,
    Append,
    CallTools,
    Conclude,
    EffectFailed,
    Interact,
    Machine,
    Prepare,
    Prepared,
    Progress,
    Sample,
    ToolsAnswered,
    TurnSampled,
    UserSaid,
)

GENERATING = Progress(RolloutState.GENERATING, prompt_tokens=10)


def limits(**given_limits: object) -> RolloutLimits:
    return RolloutLimits.model_validate({"prompt_length": 50, "response_length": 100, **given_limits})


events = st.one_of(
    st.builds(Prepared, st.integers(0, 80)),
    st.builds(TurnSampled, st.integers(0, 60), st.sampled_from(Finish), st.integers(0, 3), st.integers(0, 2)),
    st.builds(ToolsAnswered, st.integers(0, 80)),
    st.builds(UserSaid, st.integers(0, 80), st.booleans()),
    st.builds(
        EffectFailed, st.sampled_from([reason for reason in FinishReason if reason.state is RolloutState.FAILED])
    ),
)
EXPECTED = {Prepare: Prepared, Sample: TurnSampled, CallTools: ToolsAnswered, Interact: UserSaid}


@given(
    st.lists(events, max_size=60),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 3),
    st.none() | st.integers(1, 120),
)
@settings(max_examples=examples(400), deadline=None)
def test_in_every_order_of_events_a_request_keeps_its_limits_and_ends_once(order, interactive, turns, users, context):
    rules = limits(max_assistant_turns=turns, max_user_turns=users, max_model_len=context)
    machine = Machine(rules, interactive=interactive)
    now, under_way, concluded = Progress(), list(BEGIN), 0
    for event in order:
        performed = under_way[-1] if under_way else None
        belongs = performed is not None and isinstance(event, (EXPECTED.get(type(performed), ()), EffectFailed))
        if isinstance(event, TurnSampled) and isinstance(performed, Sample):
            event = TurnSampled(min(event.tokens, performed.max_tokens), event.finish, event.calls, event.malformed)
        if not now.state.ended and not belongs:
            with pytest.raises(ValueError, match="does not belong to"):
                machine.step(now, event)
            continue
        before, (now, effects) = now, machine.step(now, event)
        if before.state.ended:
            assert (now, effects) == (before, ()), "what comes after the end changes nothing"
            continue
        concluded += sum(isinstance(effect, Conclude) for effect in effects)
        assert now.state.ended == bool(concluded) == (now.finish_reason is not None)
        assert now.finish_reason is None or now.state is now.finish_reason.state
        assert now.assistant_turns <= turns
        assert now.user_turns <= users
        assert now.response_tokens <= rules.response_length
        assert context is None or now.state is RolloutState.FAILED or now.prompt_tokens + now.response_tokens <= context
        under_way = [effect for effect in effects if not isinstance(effect, (Append, Conclude))]
        assert len(under_way) == (0 if now.state.ended else 1), "one effect is under way in every live state"
        for effect in under_way:
            assert not isinstance(effect, Sample) or 0 < effect.max_tokens <= now.room(rules)
    assert concluded <= 1


def test_a_request_without_calls_ends_with_stop():
    now, effects = Machine(limits()).step(GENERATING, TurnSampled(5, Finish.STOP))
    assert (now.state, now.finish_reason, effects) == (RolloutState.COMPLETED, FinishReason.STOP, (Conclude(),))


def test_results_are_appended_before_the_next_message_is_sampled():
    machine = Machine(limits())
    now, effects = machine.step(GENERATING, TurnSampled(5, Finish.STOP, calls=2))
    assert (now.state, effects) == (RolloutState.TOOL_CALLING, (CallTools(),))
    now, effects = machine.step(now, ToolsAnswered(20))
    assert (now.state, effects) == (RolloutState.GENERATING, (Append(), Sample(75)))


@pytest.mark.parametrize(("prompt", "context"), [(51, None), (20, 20), (20, 10)])
def test_a_prompt_too_long_ends_early_without_a_call(prompt, context):
    now, effects = Machine(limits(max_model_len=context)).step(Progress(), Prepared(prompt))
    assert (now.finish_reason, effects) == (FinishReason.PROMPT_TOO_LONG, (Conclude(),))


def test_results_that_do_not_fit_are_not_appended():
    now, effects = Machine(limits()).step(
        Progress(RolloutState.TOOL_CALLING, prompt_tokens=10, response_tokens=60, assistant_turns=1), ToolsAnswered(41)
    )
    assert (now.finish_reason, now.response_tokens) == (FinishReason.TOOL_RESPONSE_TOO_LONG, 60)
    assert effects == (Conclude(),)


def test_results_that_leave_nothing_to_sample_are_appended():
    now, effects = Machine(limits()).step(
        Progress(RolloutState.TOOL_CALLING, prompt_tokens=10, response_tokens=60, assistant_turns=1), ToolsAnswered(40)
    )
    assert (now.finish_reason, now.response_tokens) == (FinishReason.LENGTH_BEFORE_GENERATION, 100)
    assert effects == (Append(), Conclude())


def test_a_message_that_was_cut_calls_nothing():
    now, _ = Machine(limits()).step(GENERATING, TurnSampled(5, Finish.LENGTH, calls=1))
    assert now.finish_reason is FinishReason.LENGTH


def test_the_calls_of_the_last_turn_are_not_made():
    now, _ = Machine(limits(max_assistant_turns=1)).step(GENERATING, TurnSampled(5, Finish.STOP, calls=1))
    assert now.finish_reason is FinishReason.MAX_ASSISTANT_TURNS


def test_malformed_calls_are_answered_until_there_were_too_many():
    machine, now = Machine(limits(max_malformed_turns=2)), GENERATING
    now, effects = machine.step(now, TurnSampled(5, Finish.STOP, malformed=1))
    assert effects == (CallTools(),)
    now, _ = machine.step(now, ToolsAnswered(5))
    now, _ = machine.step(now, TurnSampled(5, Finish.STOP, malformed=1))
    assert now.finish_reason is FinishReason.MALFORMED_CALLS


def test_a_good_sibling_redeems_a_malformed_call():
    machine, now = Machine(limits(max_malformed_turns=1)), GENERATING
    now, effects = machine.step(now, TurnSampled(5, Finish.STOP, calls=1, malformed=1))
    assert (now.malformed_turns, effects) == (0, (CallTools(),))


def test_a_simulated_user_is_asked_until_it_is_done():
    machine, now = Machine(limits(), interactive=True), GENERATING
    now, effects = machine.step(now, TurnSampled(5, Finish.STOP))
    assert (now.state, effects) == (RolloutState.INTERACTING, (Interact(),))
    now, effects = machine.step(now, UserSaid(10, done=False))
    assert effects == (Append(), Sample(85))
    now, _ = machine.step(now, TurnSampled(5, Finish.STOP))
    now, _ = machine.step(now, UserSaid(0, done=True))
    assert now.finish_reason is FinishReason.INTERACTION_ENDED


def test_every_reason_says_whether_it_can_be_scored():
    assert {reason.state for reason in FinishReason} == {RolloutState.COMPLETED, RolloutState.FAILED}
    assert FinishReason.ENGINE_FAILURE.state is RolloutState.FAILED
