"""One request: every way to end, whose failure it was, and that nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from playing import CHAT, FORGED, TOKENIZER, Echo, call, played, playing, request_for, said, scripted, setting, task
from toolyard.engines.protocol import Finish, Generation, Sampling
from toolyard.errors import ChatError, EngineError, EngineRequestError
from toolyard.messages import Message
from toolyard.records.audit import audit
from toolyard.records.lines import to_line, trajectory_of
from toolyard.rewards.combination import Weights
from toolyard.rollout.budget import RolloutLimits
from toolyard.rollout.finish import FinishReason
from toolyard.rollout.interaction import BaseInteraction
from toolyard.rollout.play.play import Play


@pytest.fixture
def echo():
    tool = Echo()
    yield tool
    assert not tool.alive
    assert tool.created == tool.scored


async def test_tokens_are_sampled_or_given_and_nothing_else(echo):
    trajectory = await played([said("hello"), "#### 42"], [echo])
    tokens = trajectory.tokens
    sampled = [i for i, mask in zip(tokens.response_ids, tokens.response_mask, strict=True) if mask]
    given = [i for i, mask in zip(tokens.response_ids, tokens.response_mask, strict=True) if not mask]
    assert TOKENIZER.decode(sampled) == said("hello") + "<|im_end|>#### 42<|im_end|>"
    assert TOKENIZER.decode(given) == "\n<|im_start|>tool\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.response_logprobs == [-0.5 if mask else 0.0 for mask in tokens.response_mask]
    assert audit(trajectory, TOKENIZER.decode) == []


async def test_the_score_is_made_of_its_weighted_parts(echo):
    trajectory = await played([said("a"), "#### 42"], [echo], weights=Weights(step=2.0, tool=0.1))
    assert trajectory.rewards == {"final": 1.0, "step": 0.25, "tool/echo": 0.5}
    assert trajectory.score == pytest.approx(1.0 + 0.5 + 0.05)


async def test_calls_of_one_message_are_made_at_once_and_answered_in_order(echo):
    both = said("one") + "\n" + said("two") + "\n" + call("nobody", {})
    trajectory = await played([both, "#### 42"], [echo])
    assert [message.content for message in trajectory.messages if message.role == "tool"][:2] == ["one", "two"]
    assert [made.outcome for made in trajectory.turns[0].tool_calls] == ["ok", "ok", "unknown_tool"]


async def test_calls_beyond_the_limit_are_told_and_not_made(echo):
    trajectory = await played([said("one") + "\n" + said("two"), "#### 42"], [echo], max_parallel_calls=1)
    assert [made.outcome for made in trajectory.turns[0].tool_calls] == ["ok", "too_many_calls"]
    assert "at most 1 calls" in trajectory.messages[-2].content


async def test_a_malformed_call_is_told_why_and_its_sibling_is_made(echo):
    broken = "<tool_call>\n{not json}\n</tool_call>"
    trajectory = await played([said("fine") + "\n" + broken, "#### 42"], [echo])
    assert [made.outcome for made in trajectory.turns[0].tool_calls] == ["ok", "malformed"]
    assert trajectory.messages[-2].content.startswith("Error: this call could not be read: ")
    assert trajectory.score == pytest.approx(1.25)
    assert audit(trajectory) == []


async def test_malformed_calls_again_and_again_end_the_request(echo):
    trajectory = await played(["<tool_call>\n{\n</tool_call>"] * 5, [echo], max_malformed_turns=2)
    assert (trajectory.finish_reason, len(trajectory.turns)) == (FinishReason.MALFORMED_CALLS, 2)


async def test_what_a_tool_raises_is_told_to_the_model(echo):
    trajectory = await played([said("its failure"), "#### 42"], [echo])
    assert trajectory.turns[0].tool_calls[0].outcome == "raised"
    assert "no idea" in trajectory.messages[-2].content
    assert trajectory.score == 1.0


async def test_a_failure_of_ours_in_a_tool_is_never_scored(echo):
    trajectory = await played([said("our failure"), "#### 42"], [echo])
    assert (trajectory.state, trajectory.finish_reason) == ("FAILED", FinishReason.TOOL_FAILURE)
    assert (trajectory.score, trajectory.failure.whose, trajectory.failure.stage) == (None, "ours", "TOOL_CALLING")
    assert audit(trajectory) == []


async def test_a_long_result_is_cut_to_tokens_and_the_cut_is_marked(echo):
    trajectory = await played([said("x" * 500), "#### 42"], [echo], max_tool_response_length=100)
    (made,) = trajectory.turns[0].tool_calls
    assert made.truncated
    assert "characters cut" in made.response
    assert CHAT.count(made.response) <= 100


async def test_creation_may_say_something_to_the_model(echo):
    given = task(tools_kwargs={"echo": {"create_kwargs": {"greeting": "Echo is here."}}})
    trajectory = await played(["#### 42"], [echo], given)
    assert "What is 6 times 7?\n\nEcho is here.<|im_end|>" in trajectory.input


async def test_a_tool_that_cannot_be_created_fails_the_request_and_releases_the_others(echo):
    class Refusing(Echo):
        async def create(self, instance_id=None, **kwargs):
            raise RuntimeError("no quota")

    refusing = Refusing()
    refusing.name = refusing.tool_schema.function.name = "refusing"
    trajectory = await played(["#### 42"], [echo, refusing])
    assert (trajectory.finish_reason, trajectory.turns) == (FinishReason.TOOL_FAILURE, ())
    assert "no quota" in trajectory.failure.error


# Engines --------------------------------------------------------------------------------------------------------------


async def test_an_engine_that_recovers_costs_an_attempt_and_no_token():
    trajectory = await played([EngineError("busy"), EngineError("busy"), "#### 42"])
    assert (trajectory.score, trajectory.turns[0].sampled.attempts) == (1.0, 3)
    assert audit(trajectory) == []


async def test_an_engine_that_stays_away_fails_the_request_without_a_score():
    trajectory = await played([EngineError("gone")] * 9)
    assert (trajectory.finish_reason, trajectory.score) == (FinishReason.ENGINE_FAILURE, None)
    assert (trajectory.failure.whose, trajectory.failure.stage) == ("ours", "GENERATING")
    assert "gone" in trajectory.failure.error


async def test_a_refusal_is_not_tried_again():
    asked = 0

    def refuse(*_):
        nonlocal asked
        asked += 1
        return EngineRequestError("too long")

    assert (await played(refuse)).finish_reason == FinishReason.ENGINE_FAILURE
    assert asked == 1


async def test_an_answer_that_was_aborted_for_new_weights_goes_on_from_its_exact_tokens():
    prompts = []

    def say(_, turn, prompt):
        prompts.append(list(prompt))
        ids = TOKENIZER.encode("#### 4") if turn == 0 else TOKENIZER.encode("2<|im_end|>")
        finish = Finish.ABORT if turn == 0 else Finish.STOP
        return Generation(ids, [-0.1] * len(ids), finish, weight_version=f"v{turn}")

    trajectory = await played(say)
    assert prompts[1] == prompts[0] + TOKENIZER.encode("#### 4")
    (turn,) = trajectory.turns
    assert (turn.sampled.weight_versions, turn.sampled.attempts) == (("v0", "v1"), 2)
    assert turn.sampled.version_starts == (0, len(TOKENIZER.encode("#### 4")))
    assert trajectory_of(to_line(trajectory)).turns[0].sampled == turn.sampled
    assert (trajectory.score, audit(trajectory, TOKENIZER.decode)) == (1.0, [])


async def test_weights_that_sampled_nothing_are_not_among_the_versions():
    def say(_, turn, __):
        ids = TOKENIZER.encode(("#### 4", "", "2<|im_end|>")[turn])
        finish = Finish.STOP if turn == 2 else Finish.ABORT
        return Generation(ids, [-0.1] * len(ids), finish, weight_version=f"v{turn}")

    (turn,) = (await played(say)).turns
    assert (turn.sampled.weight_versions, turn.sampled.attempts) == (("v0", "v2"), 3)


async def test_an_answer_goes_on_with_other_random_numbers():
    """With the same ones again, its rest would depend on its beginning."""
    seeds = []

    def say(_, turn, __):
        ids = TOKENIZER.encode("#### 4") if turn == 0 else TOKENIZER.encode("2<|im_end|>")
        return Generation(ids, [-0.1] * len(ids), Finish.ABORT if turn == 0 else Finish.STOP, weight_version="v")

    async with scripted(say) as engine:
        place, generate = setting(engine), engine.generate

        async def noted(prompt_ids, sampling, *, request_id):
            seeds.append(sampling.seed)
            return await generate(prompt_ids, sampling, request_id=request_id)

        engine.generate = noted  # type: ignore[method-assign]
        await Play(request_for(place), place).run()
    assert len(seeds) == len({*seeds}) == 2


async def test_wrong_lengths_of_an_engine_are_found_before_anything_is_trained_on():
    trajectory = await played([Generation([52, 50], [-0.1], Finish.STOP)] * 9)
    assert trajectory.finish_reason == FinishReason.ENGINE_FAILURE
    assert (trajectory.score, "2 tokens but 1 logprobs" in trajectory.failure.error) == (None, True)


async def test_a_turn_that_cannot_be_continued_exactly_ends_the_request(echo):
    class Stubborn(type(CHAT)):  # type: ignore[misc]
        def extension(self, prompt_ids, sampled_ids, new_messages, tools=()):
            raise ChatError("the turn ended within its reasoning")

    async with scripted([said("a")]) as engine:
        place = setting(engine, [echo])
        place.speaker._chat = Stubborn(TOKENIZER, CHAT.syntax)  # type: ignore[attr-defined]
        trajectory = await Play(request_for(place), place).run()
    assert (trajectory.finish_reason, trajectory.score) == (FinishReason.CANNOT_CONTINUE, None)


async def test_a_difference_found_by_the_audit_fails_the_request():
    async with scripted(["#### 42"]) as engine:
        place = setting(engine)
        request = request_for(place)
        take = place.speaker.take

        def careless(request, answer):
            spoken = take(request, answer)
            request.input_ids[3] += 1
            return spoken

        place.speaker.take = careless  # type: ignore[method-assign]
        trajectory = await Play(request, place).run()
    assert (trajectory.finish_reason, trajectory.score) == (FinishReason.TOKEN_DRIFT, None)


async def test_an_engine_without_logprobs_gives_a_trajectory_without_them(echo):
    async with scripted([said("a"), "#### 42"], logprob=None) as engine:
        place = setting(engine, [echo])
        trajectory = await Play(request_for(place), place).run()
    assert trajectory.tokens.response_logprobs is None
    assert audit(trajectory) == []


async def test_the_engine_never_gets_a_larger_budget_than_is_left(echo):
    budgets = []
    async with scripted([said("a"), "#### 42"]) as engine:
        generate = engine.generate

        async def watched(prompt, sampling, *, request_id):
            budgets.append((len(prompt), sampling.max_tokens, sampling.seed))
            return await generate(prompt, sampling, request_id=request_id)

        engine.generate = watched
        place = setting(engine, [echo], response_length=300, sampling=Sampling(max_tokens=200))
        trajectory = await Play(request_for(place), place).run()
    first, second = budgets
    prompt = len(trajectory.tokens.prompt_ids)
    assert first[:2] == (prompt, 200)
    assert second[1] == min(200, 300 - (second[0] - prompt))
    assert first[2] != second[2], "each turn has its own seed"


async def test_a_cancellation_out_of_the_engine_is_a_failure_of_it_not_of_the_run():
    trajectory = await played(lambda *_: asyncio.CancelledError())  # type: ignore[arg-type, return-value]
    assert trajectory.finish_reason in (FinishReason.INTERNAL_ERROR, FinishReason.ENGINE_FAILURE)


# Time -----------------------------------------------------------------------------------------------------------------


async def test_a_hanging_tool_ends_the_request_at_the_stage_deadline(echo):
    trajectory = await played([said("sleep")], [echo], tool_seconds=0.05)
    assert (trajectory.finish_reason, trajectory.failure.whose) == (FinishReason.STAGE_DEADLINE, "ours")
    assert "waiting for echo" in trajectory.failure.error


async def test_a_slow_engine_ends_the_request_at_its_deadline(echo):
    trajectory = await played(["#### 42"], [echo], request_seconds=0.05, seconds=30)
    assert trajectory.finish_reason == FinishReason.REQUEST_DEADLINE
    assert trajectory.score is None


@pytest.mark.parametrize("after", [0, 0.02])
async def test_an_abort_ends_the_request_soon(echo, after):
    async with playing([said("sleep")], [echo]) as play:
        running = asyncio.create_task(play.run())
        if after:
            await asyncio.sleep(after)
        play.abort()
        trajectory = await asyncio.wait_for(running, 5)
    assert (trajectory.finish_reason, trajectory.state) == (FinishReason.ABORTED, "FAILED")
    assert trajectory.score is None
    assert trajectory.failure.error.startswith("aborted"), "a record without a score says why"


@pytest.mark.parametrize("pauses", range(24))
async def test_cancelled_at_any_await_it_releases_its_tools(echo, pauses):
    async with playing([said("a"), said("b"), "#### 42"], [echo]) as play:
        running = asyncio.create_task(play.run())
        for _ in range(pauses):
            await asyncio.sleep(0)
        running.cancel()
        (result,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError) or result.state == "COMPLETED"


# The rest -------------------------------------------------------------------------------------------------------------


class Simulated(BaseInteraction):
    def __init__(self, fail_in: str = "") -> None:
        super().__init__()
        self.fail_in = fail_in
        self.open: set[str] = set()

    async def start(self, instance_id, **kwargs):
        self.open.add(instance_id)

    async def generate_response(self, instance_id, messages, **kwargs):
        if self.fail_in == "respond":
            raise RuntimeError("lost for words")
        done = "42" in messages[-1]["content"]
        return done, "" if done else "Try again.", 0.0 if done else -0.1, {"patience": 0.5}

    async def score(self, instance_id, **kwargs):
        if self.fail_in == "score":
            raise RuntimeError("no score")
        return 0.3

    async def finalize(self, instance_id, **kwargs):
        self.open.remove(instance_id)


async def test_a_simulated_user_answers_until_it_is_satisfied():
    user = Simulated()
    trajectory = await played(["41", "#### 42"], interaction=user)
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert trajectory.finish_reason == FinishReason.INTERACTION_ENDED
    assert trajectory.rewards["interaction"] == pytest.approx(0.2)
    assert trajectory.score == pytest.approx(1.2)
    assert trajectory.metrics["interaction"] == [{"patience": 0.5}] * 2
    assert not user.open


async def test_a_simulator_that_raises_fails_the_request_and_is_finalized():
    user = Simulated("respond")
    trajectory = await played(["41"], interaction=user)
    assert (trajectory.finish_reason, trajectory.failure.whose) == (FinishReason.INTERACTION_FAILURE, "task")
    assert "lost for words" in trajectory.failure.error
    assert not user.open


async def test_a_simulator_without_a_score_makes_no_score():
    trajectory = await played(["#### 42"], interaction=Simulated("score"))
    assert (trajectory.finish_reason, trajectory.score) == (FinishReason.REWARD_FAILURE, None)


async def test_a_reward_that_cannot_be_computed_is_absent_not_zero():
    trajectory = await played(["#### 42"], given=task(answer="forty-two"))
    assert (trajectory.finish_reason, trajectory.score) == (FinishReason.REWARD_FAILURE, None)
    assert trajectory.rewards == {"final": None}
    assert "forty-two" in trajectory.failure.error


async def test_without_any_reward_there_is_no_score_and_no_failure():
    trajectory = await played(["#### 42"], reward="none")
    assert (trajectory.state, trajectory.score, trajectory.failure) == ("COMPLETED", None, None)


async def test_only_what_the_model_said_is_scored(echo):
    trajectory = await played([said("#### 42"), "I do not know."], [echo])
    assert trajectory.rewards["final"] == 0.0


async def test_wrong_tools_kwargs_are_the_tasks_fault(echo):
    trajectory = await played(["#### 42"], [echo], task(tools_kwargs={"echo": {"created_kwargs": {}}}))
    assert (trajectory.finish_reason, trajectory.failure.whose) == (FinishReason.BAD_TASK, "task")


async def test_what_cannot_be_rendered_is_the_tasks_fault():
    class Mute(type(CHAT)):  # type: ignore[misc]
        def render(self, messages, tools=()):
            raise ChatError("this template knows no such role")

    async with scripted(["#### 42"]) as engine:
        place = setting(engine)
        place.speaker._chat = Mute(TOKENIZER, CHAT.syntax)  # type: ignore[attr-defined]
        trajectory = await Play(request_for(place), place).run()
    assert (trajectory.finish_reason, trajectory.failure.whose) == (FinishReason.BAD_TASK, "task")


@pytest.mark.parametrize(("word", "keeps"), [("left", "tail"), ("right", "head"), ("middle", "both"), ("tail", "tail")])
def test_the_side_that_is_truncated_has_old_and_new_words(word, keeps):
    assert RolloutLimits(tool_response_truncate_side=word).tool_response_truncate_side == keeps


async def test_forged_turns_in_a_result_stay_text(echo):
    trajectory = await played([said("forge"), "#### 42"], [echo])
    tokens = trajectory.tokens
    given = [i for i, mask in zip(tokens.response_ids, tokens.response_mask, strict=True) if not mask]
    assert given.count(TOKENIZER.special_tokens["<|im_start|>"]) == 2, "of the tool, and of the assistant"
    assert Message("tool", FORGED, tool_call_id="call_0_0", name="echo") in trajectory.messages
