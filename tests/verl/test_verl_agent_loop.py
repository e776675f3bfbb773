"""Our agent loop under verl's own worker: found by its YAML, given its rows, padded and batched by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hydra.errors import InstantiationException
from scripted import LOG_PROB, Configure, call
from serving import (
    COUNTING,
    ROLLOUT,
    STEP,
    CountingTool,
    Line,
    MakeOurs,
    Played,
    batch_of,
    is_masked,
    make_fixture,
    play,
    row,
    unpadded,
)
from test_tools_under_verl import CODE_INTERPRETER, GSM8K, STATEFUL, answer, code, heard
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.replica import TokenOutput

from toolyard.errors import ConfigError
from toolyard.train.verl.settings import settings_of
from verl import DataProto

__all__ = ["make_fixture"]  # fixtures

# A trajectory ---------------------------------------------------------------------------------------------------------


async def test_two_turns_in_the_sandbox_come_out_with_masks_logprobs_and_reward(make: MakeOurs, model: str) -> None:
    replies: list[Line] = [code("x = 6 * 3"), code("print(x)"), "#### 18"]
    worker = make({"How many?": replies}, [STATEFUL], reward="gsm8k")
    [played] = await play(worker, row("How many?"))
    decode = hf_tokenizer(model).decode
    assert played.parts(decode) == [
        (1, f"{replies[0]}<|im_end|>"),
        (0, heard("[no output: print what you want to see]")),
        (1, f"{replies[1]}<|im_end|>"),
        (0, heard("18\n")),
        (1, f"{replies[2]}<|im_end|>"),
    ]
    assert played.logprobs == [LOG_PROB * mask for mask in played.mask]
    assert decode(played.prompt).endswith("<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n")
    assert played.reward == 1.0
    assert played.turns == 1 + 3 + 2
    assert played.metrics["generate_sequences"] > 0
    assert played.metrics["tool_calls"] > 0
    assert played.metrics["num_preempted"] == 0
    told = played.told
    assert told["toolyard_finish_reason"] == "stop"
    assert told["toolyard_refusal"] == ""
    assert told["tool_call_counts"] == 2
    assert (told["min_global_steps"], told["max_global_steps"]) == (STEP, STEP)
    assert told["acc"] == 1.0
    assert told["request_id"] == told["toolyard_request_id"]


async def test_every_prompt_extends_the_last_one_and_what_was_sampled_after_it(make: MakeOurs) -> None:
    worker = make({"How many?": [code("print(1)"), code("print(2)"), "#### 18"]}, [CODE_INTERPRETER], reward="gsm8k")
    [played] = await play(worker, row("How many?"))
    servers = worker.llm_client
    [(session, prompts)] = servers.prompts.items()
    assert prompts[0] == played.prompt
    for before, sampled, after in zip(prompts, servers.answers[session], prompts[1:], strict=False):
        assert after[: len(before) + len(sampled)] == before + sampled
    assert played.prompt + played.response == prompts[-1] + servers.answers[session][-1]


async def test_verls_sampling_parameters_reach_the_servers_with_a_limit_and_stop_tokens(
    make: MakeOurs, model: str
) -> None:
    worker = make(
        {"How many?": [code("print(1)"), "#### 18"]}, [CODE_INTERPRETER], f"{ROLLOUT}.temperature=0.7", reward="gsm8k"
    )
    [played] = await play(worker, row("How many?"))
    first, second = worker.llm_client.asked
    stops = [hf_tokenizer(model).eos_token_id]
    expected = {"temperature": 0.7, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert first == {**expected, "stop_token_ids": stops, "max_tokens": 4096}
    answered = len(worker.llm_client.prompts.popitem()[1][1]) - len(played.prompt)
    assert second == {**first, "max_tokens": 4096 - answered}


async def test_step_rewards_of_tools_are_in_verls_field_and_in_our_score(make: MakeOurs) -> None:
    script: dict[str, list[Line]] = {"How many?": [answer("17"), "#### 18"]}
    worker = make(script, [GSM8K], reward="gsm8k")
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "18"}}}
    [played] = await play(worker, row("How many?", tools_kwargs=kwargs))
    assert played.told["tool_rewards"] == [-0.05]
    assert played.told["turn_scores"] == []
    assert played.reward == pytest.approx(0.95)
    assert played.told["toolyard_rewards"] == {"final": 1.0, "step": -0.05, "tool/calc_gsm8k_reward": 0.0}


async def test_a_row_may_select_its_tools(make: MakeOurs, model: str) -> None:
    script: dict[str, list[Line]] = {"one": ["#### 18"], "all": ["#### 18"], "wrong": ["#### 18"]}
    worker = make(script, [COUNTING, CODE_INTERPRETER], reward="gsm8k")
    rows = [
        row("one", extra_info={"tool_selection": ["count"]}),
        row("all", extra_info={}),
        row("wrong", extra_info={"tool_selection": ["no_such_tool"]}),
    ]
    one, every, wrong = await play(worker, *rows)
    decode = hf_tokenizer(model).decode
    assert "code_interpreter" not in decode(one.prompt)
    assert "code_interpreter" in decode(every.prompt)
    assert is_masked(wrong)
    assert wrong.told["toolyard_finish_reason"] == "bad_task"
    [tool] = CountingTool.made[1:]  # the first was made by verl, for its own loop
    assert len(tool.created) == len(tool.released) == 2


async def test_sixty_four_at_once_keep_their_own_state_and_open_one_set_of_tools(make: MakeOurs, model: str) -> None:
    count = 64
    script: dict[str, list[Line]] = {
        f"Number {i:02}.": [code(f"x = {i}"), code("print(x)"), call("count"), f"#### {i}"] for i in range(count)
    }
    worker = make(script, [STATEFUL, COUNTING], reward="gsm8k", together=count)
    played = await play(worker, *[row(f"Number {i:02}.", truth=str(i)) for i in range(count)])
    decode = hf_tokenizer(model).decode
    for index, one in enumerate(played):
        assert one.parts(decode)[3] == (0, heard(f"{index}\n"))
        assert one.reward == pytest.approx(1.25)
    _, tool = CountingTool.made
    assert len(set(tool.created)) == count
    assert sorted(tool.created) == sorted(tool.released)
    assert len({one.told["toolyard_request_id"] for one in played}) == count


async def test_verl_joins_batches_of_samples_that_ended_well_and_badly(make: MakeOurs) -> None:
    """verl requires the same keys from all samples, also over several workers."""
    script: dict[str, list[Line]] = {"good": [code("print(1)"), "#### 18"], "bad": [ValueError("no")]}
    worker = make(script, [CODE_INTERPRETER], reward="gsm8k")
    outputs = [await worker.generate_sequences(batch_of([row(name)])) for name in ("good", "bad", "good")]
    assert len({frozenset(output.non_tensor_batch) for output in outputs}) == 1
    assert len(unpadded_all(outputs)) == 3


async def test_outputs_are_of_one_kind_for_the_queue_of_verls_newer_trainer(make: MakeOurs) -> None:
    """It takes them as they are, without padding, and reads columns of what it has put in."""
    script: dict[str, list[Line]] = {"good": [code("print(1)"), "#### 18"], "bad": [ValueError("no")]}
    worker = make(script, [CODE_INTERPRETER], reward="gsm8k")
    kept: list[Any] = []

    async def keep(output: Any, validate: bool, **kwargs: Any) -> Any:
        kept.append(output)
        return output

    worker._agent_loop_postprocess = keep
    info = {"step": 5, "sample_index": 0, "rollout_n": 0, "validate": False}
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    for index, name in enumerate(("good", "bad")):
        more = {"global_steps": 5, "session_id": index, "agent_name": "toolyard"}
        await worker._run_agent_loop(params, info, **row(name), **more)
    good, bad = [output.as_dict() for output in kept]
    assert good.keys() == bad.keys()
    assert good["extra_fields"].keys() == bad["extra_fields"].keys()
    for fields in (good, bad):
        lengths = {len(fields[name]) for name in ("responses", "response_mask", "rollout_log_probs", "rm_scores")}
        assert len(lengths) == 1
        assert lengths != {0}
    assert good["rm_scores"].tolist() == [0.0] * (len(good["responses"]) - 1) + [1.0]
    assert [output.extra_fields["max_global_steps"] for output in kept] == [STEP, STEP]


def unpadded_all(outputs: list[DataProto]) -> list[Played]:
    metrics = [metric for output in outputs for metric in output.meta_info.pop("metrics")]
    joined = DataProto.concat(outputs)
    joined.meta_info["metrics"] = metrics
    return unpadded(joined)


# Limits ---------------------------------------------------------------------------------------------------------------


async def test_what_is_too_long_is_cut_by_the_limit_of_tokens_and_still_trained_on(make: MakeOurs) -> None:
    worker = make({"Talk.": ["word " * 100]}, [], f"{ROLLOUT}.response_length=50", reward="gsm8k")
    [played] = await play(worker, row("Talk."))
    assert len(played.response) == 50
    assert played.mask == [1] * 50
    assert played.told["toolyard_finish_reason"] == "length"
    assert played.reward == 0.0


async def test_a_tool_result_that_does_not_fit_ends_the_trajectory_before_it(make: MakeOurs, model: str) -> None:
    reply = code("print('x' * 900)")
    room = len(hf_tokenizer(model).encode(reply)) + 100
    worker = make({"Talk.": [reply]}, [CODE_INTERPRETER], f"{ROLLOUT}.response_length={room}", reward="gsm8k")
    [played] = await play(worker, row("Talk."))
    assert played.told["toolyard_finish_reason"] == "tool_response_too_long"
    assert played.mask == [1] * (room - 100 + 1)
    assert played.turns == 2


async def test_a_prompt_that_is_too_long_is_masked_and_its_end_is_kept(make: MakeOurs, model: str) -> None:
    worker = make({}, [], f"{ROLLOUT}.prompt_length=64", reward="gsm8k")
    [played] = await play(worker, row("word " * 100))
    assert len(played.prompt) == 64
    assert hf_tokenizer(model).decode(played.prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert is_masked(played)
    assert played.told["toolyard_finish_reason"] == "prompt_too_long"
    assert played.turns == 1


async def test_verls_limits_of_turns_hold_and_ours_go_before_them(make: MakeOurs) -> None:
    script: dict[str, list[Line]] = {"Go on.": [code("print(1)")] * 9}
    turns = f"{ROLLOUT}.multi_turn"
    for overrides, settings, expected in [
        ([f"{turns}.max_assistant_turns=2"], {}, 2),
        ([f"{turns}.max_user_turns=2"], {}, 3),
        ([f"{turns}.max_assistant_turns=2"], {"limits": {"max_assistant_turns": 4}}, 4),
    ]:
        worker = make(script, [CODE_INTERPRETER], *overrides, reward="gsm8k", **settings)
        [played] = await play(worker, row("Go on."))
        assert len(worker.llm_client.asked) == expected
        assert played.told["toolyard_finish_reason"] == "max_assistant_turns"


async def test_a_server_that_goes_on_after_a_stop_is_cut_there(make: MakeOurs, model: str) -> None:
    tokenizer = hf_tokenizer(model)
    ids = tokenizer.encode("#### 18<|im_end|>\n<|im_start|>user\nand so on")
    worker = make({"How many?": [TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids))]}, [], reward="gsm8k")
    [played] = await play(worker, row("How many?"))
    assert tokenizer.decode(played.response) == "#### 18<|im_end|>"
    assert played.logprobs == [-1.0] * len(played.response)
    assert played.reward == 1.0


async def test_where_a_syntax_ends_turns_by_text_servers_are_told_and_what_goes_on_is_cut(
    make: MakeOurs, model: str
) -> None:
    tokenizer = hf_tokenizer(model)
    block = "```python\nprint(6 * 3)\n```\n"
    ids = tokenizer.encode(f"{block}The output is 19.")
    chat = {"format": "code_block", "syntax_options": {"tool": "code_interpreter", "argument": "code"}}
    for server, told in (("vllm", {"include_stop_str_in_output": True}), ("sglang", None)):
        said = TokenOutput(token_ids=list(ids), log_probs=[-1.0] * len(ids), stop_reason="completed")
        script: dict[str, list[Line]] = {"How many?": [said, "#### 18"]}
        worker = make(script, [CODE_INTERPRETER], f"{ROLLOUT}.name={server}", reward="gsm8k", chat=chat)
        [played] = await play(worker, row("How many?"))
        parts = played.parts(tokenizer.decode)
        assert parts[0] == (1, block)
        assert "18\n" in parts[1][1]
        asked = worker.llm_client.asked[0]
        # SGLang, started by verl without a tokenizer, would refuse texts.
        expected = {} if told is None else {"stop": ["\n```\n", "</code>"], **told}
        assert {key: asked[key] for key in asked if "stop" in key and key != "stop_token_ids"} == expected


async def test_an_answer_that_a_server_aborted_is_taken_up_where_it_was(make: MakeOurs, model: str) -> None:
    """For new weights, say: verl's plain client hands on what there is."""
    tokenizer = hf_tokenizer(model)
    half = tokenizer.encode("#### ")
    aborted = TokenOutput(
        token_ids=half,
        log_probs=[-1.0] * len(half),
        stop_reason="aborted",
        extra_fields={"min_global_steps": STEP - 1, "max_global_steps": STEP - 1},
    )
    nothing = TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted")
    limits = {"engine_retry_pause_seconds": 0.01}
    worker = make({"How many?": [nothing, aborted, "18"]}, [], reward="gsm8k", limits=limits)
    [played] = await play(worker, row("How many?"))
    assert tokenizer.decode(played.response) == "#### 18<|im_end|>"
    assert played.logprobs == [-1.0] * len(half) + [LOG_PROB] * (len(played.response) - len(half))
    assert (played.told["min_global_steps"], played.told["max_global_steps"]) == (STEP - 1, STEP)


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rewrad": "gsm8k"}, r"unknown key 'rewrad'; expected one of tool_config_path, chat, reward"),
        ({"reward": "gms8k"}, r"reward 'gms8k'"),
        ({"limits": {"turns": 3}}, r"limits\.turns"),
        ({"limits": "none"}, r"limits: .*'none'"),
        ({"limits": {"response_length": 5000}}, r"limits\.response_length: 5000 is more than verl's .* 4096"),
        ({"tool_config_path": "no/such.yaml"}, r"no/such\.yaml: cannot be read"),
        ({"chat": {"format": "no_such"}}, r"no_such"),
    ],
)
async def test_settings_that_are_wrong_end_the_run_at_its_first_sample(
    make: MakeOurs, settings: dict[str, Any], told: str
) -> None:
    """Turned into masked samples, they would be found at the end of the training."""
    worker = make({"How many?": ["18"]}, [], **settings)
    with pytest.raises((ConfigError, InstantiationException), match=told):
        await play(worker, row("How many?"))


def test_verls_functions_as_tools_are_refused_by_name(configure: Configure) -> None:
    rollout = configure([], f"{ROLLOUT}.multi_turn.function_tool_path=tools.py").actor_rollout_ref.rollout
    with pytest.raises(ConfigError, match="function_tool_path"):
        settings_of({}, rollout, {})


async def test_a_tool_file_of_our_own_goes_before_verls(make: MakeOurs, model: str, tmp_path: Path) -> None:
    """verl need not be able to read it: a class without a schema, say."""
    file = tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump({"tools": [{"class_name": CODE_INTERPRETER["class_name"]}]}))
    worker = make({"How many?": [code("print(3)"), "18"]}, [GSM8K], reward="gsm8k", tool_config_path=str(file))
    [played] = await play(worker, row("How many?"))
    prompt = hf_tokenizer(model).decode(played.prompt)
    assert "code_interpreter" in prompt
    assert "calc_gsm8k_reward" not in prompt
    assert played.reward == 1.0


async def test_verls_template_kwargs_reach_the_template(make: MakeOurs, model: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{{ mood }}, {{ weather }}{% endif %}"
    )
    worker = make(
        {"How many?": ["18"]},
        [],
        "+data.apply_chat_template_kwargs.mood=glad",
        reward="gsm8k",
        chat={"chat_template": str(template), "template_kwargs": {"weather": "sunny"}},
    )
    [played] = await play(worker, row("How many?"))
    assert hf_tokenizer(model).decode(played.prompt).endswith("assistant\nglad, sunny")


async def test_a_user_simulator_of_ours_answers_in_verl_too(make: MakeOurs, model: str) -> None:
    worker = make(
        {"How many?": ["17", "18"]},
        [],
        reward="none",
        interaction={"class_name": "serving.AgainOnce", "config": {}},
    )
    [played] = await play(worker, row("How many?"))
    said = played.parts(hf_tokenizer(model).decode)
    assert [mask for mask, _ in said] == [1, 0, 1]
    assert "Are you sure?" in said[1][1]
    assert played.turns == 1 + 2 + 1


async def test_an_agent_of_the_users_own_plays_in_verl_too(make: MakeOurs, model: str) -> None:
    worker = make({"How many?": ["17", "18"]}, [], reward="none", agent="serving:ask_twice")
    [played] = await play(worker, row("How many?"))
    said = played.parts(hf_tokenizer(model).decode)
    assert [mask for mask, _ in said] == [1, 0, 1]
    assert "Are you sure?" in said[1][1]
    assert played.logprobs == [LOG_PROB if mask else 0.0 for mask in played.mask]


async def test_with_full_determinism_servers_know_a_sample_by_verls_name(make: MakeOurs) -> None:
    worker = make({"How many?": [code("print(1)"), "18"]}, [STATEFUL], f"{ROLLOUT}.full_determinism=true")
    for _ in range(2):
        worker.llm_client._turns.clear()
        await play(worker, row("How many?", priority=np.int64(0)), row("How many?", uid="b", priority=np.int64(1)))
    assert set(worker.llm_client.prompts) == {"det-0", "det-1"}
