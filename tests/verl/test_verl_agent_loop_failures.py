"""What verl gets for failed trajectories, and which reward: nothing to learn from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from serving import (
    BROKEN,
    COUNTING,
    FRAGILE,
    ROLLOUT,
    STEP,
    CountingTool,
    Line,
    MakeOurs,
    batch_of,
    is_masked,
    make_fixture,
    play,
    row,
)
from test_tools_under_verl import CODE_INTERPRETER, code, heard
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.replica import TokenOutput

from verl import DataProto

__all__ = ["make_fixture"]  # fixtures

# Failures -------------------------------------------------------------------------------------------------------------

PATIENCE = {"engine_retries": 1, "engine_retry_pause_seconds": 0.01}


async def test_a_server_that_fails_once_is_asked_again(make: MakeOurs) -> None:
    worker = make({"How many?": [RuntimeError("away"), "#### 18"]}, [], reward="gsm8k", limits=PATIENCE)
    [played] = await play(worker, row("How many?"))
    assert played.reward == 1.0
    assert all(played.mask)


@pytest.mark.parametrize(
    ("lines", "asked"),
    [
        ([RuntimeError("away")] * 9, 2),
        ([ValueError("the prompt leaves no room")], 1),
        ([TokenOutput(token_ids=[5, 6], log_probs=None, stop_reason="completed")], 1),
        ([TokenOutput(token_ids=[5, 6], log_probs=[-1.0], stop_reason="completed")] * 9, 2),
    ],
    ids=["away", "refused", "no logprobs", "too few logprobs"],
)
async def test_a_server_that_fails_for_good_costs_its_sample_only(
    make: MakeOurs, lines: list[Line], asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    script: dict[str, list[Line]] = {"good": ["#### 18"], "bad": lines}
    worker = make(script, [], reward="gsm8k", limits=PATIENCE)
    good, bad = await play(worker, row("good"), row("bad"))
    assert good.reward == 1.0
    assert is_masked(bad)
    assert len(bad.response) == 1
    assert bad.logprobs == [0.0]
    assert bad.told["toolyard_finish_reason"] == "engine_failure"
    assert bad.told["toolyard_refusal"] == "failed_request"
    assert len(worker.llm_client.asked) == 1 + asked
    assert "not trained on: engine_failure (ours)" in caplog.text


async def test_a_server_that_hangs_or_is_cancelled_itself_costs_its_sample_only(make: MakeOurs) -> None:
    script: dict[str, list[Line]] = {"good": ["#### 18"], "bad": [asyncio.CancelledError()]}
    worker = make(script, [COUNTING], reward="gsm8k")
    good, bad = await play(worker, row("good"), row("bad"))
    assert good.reward == 1.0
    assert is_masked(bad)
    hasty = make(script, [COUNTING], reward="gsm8k", limits={"generate_seconds": 0.2})
    hasty.llm_client.hang = asyncio.Event()
    [late] = await play(hasty, row("good"))
    assert is_masked(late)
    assert late.told["toolyard_finish_reason"] == "stage_deadline"
    assert [(len(tool.created), len(tool.released)) for tool in CountingTool.made if tool.created] == [(2, 2), (1, 1)]


async def test_what_was_sampled_before_a_failure_is_there_to_see_and_masked(make: MakeOurs, model: str) -> None:
    lines: list[Line] = [code("print(1)"), ValueError("no room")]
    worker = make({"How many?": lines}, [CODE_INTERPRETER], reward="gsm8k")
    [played] = await play(worker, row("How many?"))
    assert hf_tokenizer(model).decode(played.response) == f"{lines[0]}<|im_end|>" + heard("1\n")
    assert is_masked(played)
    assert played.logprobs == [0.0] * len(played.response)


async def test_a_failure_before_any_answer_has_the_version_of_the_weights_that_others_had(make: MakeOurs) -> None:
    """verl's trainers compute with it: None would end them."""
    script: dict[str, list[Line]] = {"good": ["#### 18"], "bad": [ValueError("no")]}
    worker = make(script, [], reward="gsm8k")
    [first] = await play(worker, row("bad", global_steps=np.int64(5)))
    assert first.told["min_global_steps"] == first.told["max_global_steps"] == 4
    await play(worker, row("good", global_steps=np.int64(5)))
    [later] = await play(worker, row("bad", global_steps=np.int64(9)))
    assert later.told["min_global_steps"] == later.told["max_global_steps"] == STEP


async def test_a_tool_that_cannot_be_created_costs_its_sample_only(make: MakeOurs) -> None:
    rows = [row("good", extra_info={"tool_selection": ["code_interpreter"]}), row("bad", extra_info={})]
    worker = make({"good": ["#### 18"], "bad": ["#### 18"]}, [CODE_INTERPRETER, BROKEN], reward="gsm8k")
    good, bad = await play(worker, *rows)
    assert good.reward == 1.0
    assert is_masked(bad)
    assert bad.told["toolyard_finish_reason"] == "tool_failure"


async def test_a_program_that_crashes_is_the_models_doing_and_trained_on(make: MakeOurs, model: str) -> None:
    worker = make({"How many?": [code("1 / 0"), "#### 18"]}, [CODE_INTERPRETER], reward="gsm8k")
    [played] = await play(worker, row("How many?"))
    assert "ZeroDivisionError" in played.parts(hf_tokenizer(model).decode)[1][1]
    assert played.reward == 1.0


@pytest.mark.parametrize(
    "others",
    [
        {"raw_prompt": []},
        {"raw_prompt": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}]},
        {"raw_prompt": None},
        {"tools_kwargs": {"no_such_tool": {"create_kwargs": {}}}},
        {"extra_info": "none"},
    ],
)
async def test_a_row_that_is_no_task_costs_its_sample_only(make: MakeOurs, others: dict[str, Any]) -> None:
    worker = make({"good": ["#### 18"], "bad": ["#### 18"]}, [], reward="gsm8k")
    good, bad = await play(worker, row("good"), row("bad", **others))
    assert good.reward == 1.0
    assert is_masked(bad)
    assert bad.told["toolyard_finish_reason"] == "bad_task"


async def test_an_answer_of_no_tokens_is_the_engines_failure_and_no_sample(make: MakeOurs) -> None:
    nothing = TokenOutput(token_ids=[], log_probs=[], stop_reason="completed")
    limits = {"engine_retry_pause_seconds": 0.01}
    worker = make({"How many?": [nothing] * 9}, [], reward="gsm8k", limits=limits)
    [played] = await play(worker, row("How many?"))
    assert is_masked(played)
    assert played.told["toolyard_refusal"] == "failed_request"
    assert played.told["toolyard_finish_reason"] == "engine_failure"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nothing would set an event
            await asyncio.sleep(0.01)


async def test_cancelled_it_releases_its_tools_and_is_cancelled(make: MakeOurs) -> None:
    worker = make({"How many?": []}, [COUNTING], reward="gsm8k")
    worker.llm_client.hang = waiting = asyncio.Event()
    task = asyncio.create_task(play(worker, row("How many?"), row("How many?")))
    await waiting.wait()
    _, tool = CountingTool.made
    await until(lambda: len(tool.created) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: sorted(tool.created) == sorted(tool.released))  # verl's own tasks hear of it one by one
    assert len(tool.created) == 2


# Rewards --------------------------------------------------------------------------------------------------------------


async def test_a_reward_that_failed_is_no_zero_but_a_masked_sample(make: MakeOurs) -> None:
    """Its place in the group is the mean of those that were scored, so that they are compared with each other only."""
    script: dict[str, list[Line]] = {"How many?": ["18"]}
    worker = make(script, [], reward=FRAGILE)
    servers = worker.llm_client
    [right] = await play(worker, row("How many?"))
    servers._script = {"How many?": ["17"]}
    [wrong] = await play(worker, row("How many?"))
    servers._script = {"How many?": ["18, broken"]}
    [broken] = await play(worker, row("How many?"))
    [alone] = await play(worker, row("How many?", uid="another"))
    assert (right.reward, wrong.reward, broken.reward, alone.reward) == (1.0, 0.0, 0.5, 0.0)
    assert is_masked(broken)
    assert broken.told["toolyard_finish_reason"] == "reward_failure"
    assert broken.told["toolyard_refusal"] == "no_reward"
    assert broken.told["reward_extra_info"] == {"acc": 0.5, "toolyard_refused": 1.0}


async def test_the_reward_of_failures_can_be_chosen(make: MakeOurs) -> None:
    worker = make({"How many?": ["18, broken"]}, [], reward=FRAGILE, failure_reward=-1)
    [played] = await play(worker, row("How many?"))
    assert played.reward == -1.0


async def test_masked_samples_add_nothing_to_verls_loss_and_leave_the_advantages_of_others(make: MakeOurs) -> None:
    script: dict[str, list[Line]] = {"How many?": ["18"]}
    worker = make(script, [], reward=FRAGILE)
    played: list[DataProto] = []
    for said in ("18", "17", "18, broken"):
        worker.llm_client._script = {"How many?": [said]}
        played.append(await worker.generate_sequences(batch_of([row("How many?")])))
    for output in played:
        output.meta_info = {}
    joined = DataProto.concat(played)
    rewards, mask = joined.batch["rm_scores"], joined.batch["response_mask"]
    uids = np.array(["a"] * 3, dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, uids, norm_adv_by_std_in_grpo=False)
    without, _ = compute_grpo_outcome_advantage(rewards[:2], mask[:2], uids[:2], norm_adv_by_std_in_grpo=False)
    assert torch.equal(advantages[:2], without)
    assert not advantages[2].any()
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        loss = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
        assert agg_loss(loss, mask, mode) == pytest.approx(agg_loss(loss[:2], mask[:2], mode).item())
        assert agg_loss(loss[2:], mask[2:], mode).isnan()  # of nothing but failures; verl's FSDP engine skips it


async def test_without_a_reward_of_ours_verls_workers_score(make: MakeOurs) -> None:
    """By reward.custom_reward_function, say, which may be `pkg://toolyard.rewards`."""
    scored: list[Any] = []

    class Workers:
        class compute_score:  # noqa: N801 - as an actor's method looks
            @staticmethod
            async def remote(data: DataProto) -> dict[str, Any]:
                scored.append(data)
                return {"reward_score": 0.75, "reward_extra_info": {"acc": 0.75}}

    worker = make({"good": ["#### 18"], "bad": [ValueError("no")]}, [])
    good, bad = await play(worker, row("good"), row("bad"))
    assert (good.reward, bad.reward) == (None, None)  # where verl scores later, all at once
    worker.reward_loop_worker_handles = [Workers]
    worker.llm_client._turns.clear()
    good, bad = await play(worker, row("good"), row("bad"))
    assert (good.reward, bad.reward) == (0.75, 0.75)
    assert len(scored) == 2
    assert is_masked(bad)


async def test_without_a_ground_truth_verls_workers_can_score(make: MakeOurs) -> None:
    worker = make({"How many?": ["18"]}, [])
    bare = {"raw_prompt": [{"role": "user", "content": "How many?"}]}
    [played] = await play(worker, bare)
    assert all(played.mask)


async def test_log_probabilities_are_left_out_if_verl_does_not_ask(make: MakeOurs) -> None:
    script: dict[str, list[Line]] = {"good": ["#### 18"], "bad": [ValueError("no")]}
    worker = make(script, [], f"{ROLLOUT}.calculate_log_probs=false", reward="gsm8k")
    good, bad = await play(worker, row("good"), row("bad"))
    assert good.logprobs is None
    assert bad.logprobs is None
    assert worker.llm_client.asked[0]["logprobs"] is False


async def test_what_servers_count_of_speculation_is_summed_over_turns_and_0_for_failures(make: MakeOurs) -> None:
    def said(text: str, drafts: int) -> TokenOutput:
        counted = {"spec_num_draft_tokens": drafts, "spec_num_accepted_tokens": 2, "spec_num_verify_steps": 1}
        ids = [*text.encode()]
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="aborted", extra_fields=counted)

    limits = {"engine_retry_pause_seconds": 0.01}
    script: dict[str, list[Line]] = {"good": [said("a", 3), said("b", 4), "#### 18"], "bad": [ValueError("no")]}
    worker = make(script, [], reward="gsm8k", limits=limits)
    [good] = await play(worker, row("good"))
    [bad] = await play(worker, row("bad"))
    names = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
    assert [good.told[name] for name in names] == [7, 4, 2]
    assert [bad.told[name] for name in names] == [0, 0, 0]


async def test_experts_of_a_mixture_reach_verl_also_beside_failures(make: MakeOurs, model: str) -> None:
    prompt = len(hf_tokenizer(model).encode("<|im_start|>user\ngood<|im_end|>\n<|im_start|>assistant\n"))
    experts = np.arange((prompt + 2) * 6, dtype=np.int64).reshape(-1, 3, 2)
    eos = hf_tokenizer(model).eos_token_id
    said = TokenOutput(token_ids=[5, 6, eos], log_probs=[-1.0] * 3, routed_experts=experts)
    worker = make({"good": [said], "bad": [ValueError("no")]}, [], reward="gsm8k")
    output = await worker.generate_sequences(batch_of([row("good"), row("bad")]))
    routed = output.batch["routed_experts"]
    width = output.batch["prompts"].shape[1]
    assert routed[0, width - prompt : width + 2].tolist() == experts.tolist()
    assert not routed[1].any()
