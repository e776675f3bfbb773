"""Our native tools, named in a verl tool YAML file, under verl's own registry and tool agent loop."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import scripted
import yaml
from scripted import LOG_PROB, Configure, MakeWorker, ScriptedEngine, call, roll_out
from verl.experimental.agent_loop import AgentLoopManager
from verl.tools import schemas
from verl.tools.tool_registry import initialize_tools_from_config

from toolyard.limits.cluster.ray import NAMESPACE, PREFIX
from toolyard.limits.protocol import DEFAULT_NAME
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.gsm8k import Gsm8kTool

GSM8K = {
    "class_name": "toolyard.tools.gsm8k.Gsm8kTool",
    "config": {"type": "native"},
    "tool_schema": {
        "type": "function",
        "function": {
            "name": "calc_gsm8k_reward",
            "description": "A tool for calculating the reward of gsm8k. (1.0 if your answer is correct, 0.0 if not)",
            "parameters": {
                "type": "object",
                "properties": {
                    "answer": {"type": "string", "description": "The model's answer to the GSM8K math problem"}
                },
                "required": ["answer"],
            },
        },
    },
}
CODE_INTERPRETER = {
    "class_name": "toolyard.tools.code_interpreter.SandboxFusionTool",
    "config": {
        "type": "native",
        "num_workers": 10,
        "enable_global_rate_limit": True,
        "rate_limit": 10,
        "default_timeout": 30,
        "default_language": "python",
        "memory_limit_mb": 1024,
    },
    "tool_schema": {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "A tool for executing code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to execute."}},
                "required": ["code"],
            },
        },
    },
}
"""As verl's users wrote them for the tools of these names."""
STATEFUL = {**CODE_INTERPRETER, "config": {**CODE_INTERPRETER["config"], "stateful": True}}


def recording(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "class_name": "recording.Recording" + tool["class_name"].rpartition(".")[2]}


def row(question: str, **create_kwargs: Any) -> dict[str, Any]:
    """Of a data set prepared for verl. `create_kwargs` are for both tools."""
    return {
        "raw_prompt": [{"role": "user", "content": question}],
        "tools_kwargs": {name: {"create_kwargs": create_kwargs} for name in ("calc_gsm8k_reward", "code_interpreter")},
    }


def answer(number: str) -> str:
    return call("calc_gsm8k_reward", answer=number)


def code(program: str) -> str:
    return call("code_interpreter", code=program)


def heard(*texts: str) -> str:
    """How the template renders tool responses before the model's next turn."""
    responses = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in texts)
    return f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"


# Registry -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tool", "kind"), [(GSM8K, Gsm8kTool), (CODE_INTERPRETER, SandboxFusionTool)])
def test_verls_registry_builds_our_tool_with_its_own_schema_class(
    tool: dict[str, Any], kind: type, tmp_path: Path
) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [tool, recording(tool)]}))
    ours, recorded = initialize_tools_from_config(str(file))
    assert type(ours) is kind
    assert ours.name == tool["tool_schema"]["function"]["name"]

    config, schema = recorded.built_with
    assert config == tool["config"]
    assert type(schema) is schemas.OpenAIFunctionToolSchema
    # What verl's loop reads from a tool's schema, as from one of its own tools.
    assert ours.tool_schema.model_dump(exclude_unset=True, exclude_none=True) == tool["tool_schema"]
    assert schema.model_dump(exclude_unset=True, exclude_none=True) == tool["tool_schema"]


@pytest.mark.parametrize("tool", [GSM8K, CODE_INTERPRETER])
def test_a_tool_named_without_a_schema_brings_its_own(tool: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [{key: tool[key] for key in ("class_name", "config")}]}))
    [ours] = initialize_tools_from_config(str(file))
    shown = ours.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    assert schemas.OpenAIFunctionToolSchema.model_validate(shown).function.name == ours.name
    assert shown["function"]["parameters"] == tool["tool_schema"]["function"]["parameters"]


# GSM8K ----------------------------------------------------------------------------------------------------------------


async def test_gsm8k_tool_rewards_an_improvement_over_the_trajectorys_own_calls(make_worker: MakeWorker) -> None:
    replies = [answer("17"), answer("18"), answer("18"), "It is 18."]
    worker = make_worker({"How many eggs?": replies}, [GSM8K])
    [trajectory] = await roll_out(worker, row("How many eggs?", ground_truth="18"))
    assert trajectory.prompt == (
        f"<|im_start|>system\n<tools>\n{json.dumps(GSM8K['tool_schema'])}\n</tools><|im_end|>\n"
        "<|im_start|>user\nHow many eggs?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trajectory.tool_rewards == [-0.05, 0.0, -0.05]  # wrong; better; no better than the best before it
    assert trajectory.said == [f"{reply}<|im_end|>" for reply in replies]
    assert trajectory.heard == [
        heard("Current parsed answer='17' reward=0.0"),
        heard("Current parsed answer='18' reward=1.0"),
        heard("Current parsed answer='18' reward=1.0"),
    ]
    assert trajectory.log_probs == [{LOG_PROB}, {0.0}] * 3 + [{LOG_PROB}]


async def test_create_execute_and_release_surround_every_call(make_worker: MakeWorker) -> None:
    """verl does not promise it, but the tools' state depends on it."""
    script = {"How many eggs?": [answer("17"), answer("18"), "It is 18."]}
    worker = make_worker(script, [recording(GSM8K)])
    await roll_out(worker, row("How many eggs?", ground_truth="18"))
    [tool] = worker.tools
    assert [method for method, _, _ in tool.calls] == ["create", "execute", "release"] * 2
    first, second = tool.calls[:3], tool.calls[3:]
    for made, executed, released in (first, second):
        assert made[1] == executed[1] == released[1]
        assert made[2] == {"create_kwargs": {"ground_truth": "18"}}  # nested
        assert executed[2].keys() == {"agent_data"}
        assert executed[2]["agent_data"].request_id == worker.llm_client.requests[0]
        assert released[2] == {}
    assert first[0][1] != second[0][1]
    assert len(set(worker.llm_client.requests)) == 1


async def test_a_row_without_a_ground_truth_is_told_to_the_model_and_to_the_log(
    make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker({"How many eggs?": [answer("18"), "I give up."]}, [GSM8K])
    [trajectory] = await roll_out(worker, row("How many eggs?"))
    expected = "Error executing tool 'calc_gsm8k_reward': tool 'calc_gsm8k_reward': create needs ground_truth"
    assert expected in trajectory.heard[0]
    assert expected in caplog.text


# Code interpreter -----------------------------------------------------------------------------------------------------


async def test_code_interpreter_runs_code_and_gives_no_reward(make_worker: MakeWorker) -> None:
    replies = [code("print(6 * 7)"), code("1 / 0"), "42."]
    worker = make_worker({"6 times 7?": replies}, [CODE_INTERPRETER])
    [trajectory] = await roll_out(worker, row("6 times 7?"))
    assert trajectory.said == [f"{reply}<|im_end|>" for reply in replies]
    assert trajectory.heard[0] == heard("42\n")
    assert "ZeroDivisionError: division by zero" in trajectory.heard[1]
    assert trajectory.tool_rewards == []
    assert trajectory.log_probs == [{LOG_PROB}, {0.0}] * 2 + [{LOG_PROB}]


async def test_stateful_code_interpreter_keeps_a_variable_over_two_calls(make_worker: MakeWorker) -> None:
    script = {"6 times 7?": [code("x = 6; print(x)"), code("print(x * 7)"), "42."]}
    worker = make_worker(script, [STATEFUL])
    [trajectory] = await roll_out(worker, row("6 times 7?"))
    assert trajectory.heard == [heard("6\n"), heard("42\n")]


async def test_stateless_code_interpreter_keeps_nothing(make_worker: MakeWorker) -> None:
    script = {"6 times 7?": [code("x = 6; print(x)"), code("print(x * 7)"), "42."]}
    worker = make_worker(script, [CODE_INTERPRETER])
    [trajectory] = await roll_out(worker, row("6 times 7?"))
    assert "NameError: name 'x' is not defined" in trajectory.heard[1]


async def test_code_interpreter_does_not_mind_create_kwargs_that_are_for_the_reward(make_worker: MakeWorker) -> None:
    """verl's ReTool recipe gives every row's code_interpreter a ground_truth."""
    worker = make_worker({"6 times 7?": [code("print(6 * 7)"), "42."]}, [CODE_INTERPRETER])
    [trajectory] = await roll_out(worker, row("6 times 7?", ground_truth="42"))
    assert trajectory.heard == [heard("42\n")]


# Several at once ------------------------------------------------------------------------------------------------------


async def test_two_trajectories_at_once_do_not_mix(make_worker: MakeWorker) -> None:
    script = {
        "How many eggs?": [code("x = 18; print('eggs')"), answer("18"), code("print(x)"), answer("18"), "It is 18."],
        "How many bolts?": [code("x = 3; print('bolts')"), answer("18"), code("print(x)"), answer("3"), "It is 3."],
    }
    worker = make_worker(script, [GSM8K, STATEFUL], together=2)
    eggs, bolts = await roll_out(
        worker, row("How many eggs?", ground_truth="18"), row("How many bolts?", ground_truth="3")
    )
    assert eggs.heard == [
        heard("eggs\n"),
        heard("Current parsed answer='18' reward=1.0"),
        heard("18\n"),
        heard("Current parsed answer='18' reward=1.0"),
    ]
    assert bolts.heard == [
        heard("bolts\n"),
        heard("Current parsed answer='18' reward=0.0"),
        heard("3\n"),
        heard("Current parsed answer='3' reward=1.0"),
    ]
    assert eggs.tool_rewards == [0.0, -0.05]
    assert bolts.tool_rewards == [-0.05, 0.0]
    requests = worker.llm_client.requests
    turns = list(zip(requests[::2], requests[1::2], strict=True))
    assert len(turns) == 5
    assert all(len(set(turn)) == 2 for turn in turns)  # they did take them at once


async def test_two_calls_of_one_turn_reach_the_same_state(make_worker: MakeWorker) -> None:
    increment = code("x += 1; print(x)")
    script = {"Count.": [code("x = 6; print(x)"), f"{increment}\n{increment}", "Done."]}
    worker = make_worker(script, [STATEFUL], "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2")
    [trajectory] = await roll_out(worker, row("Count."))
    assert trajectory.heard[0] == heard("6\n")
    assert trajectory.heard[1] in (heard("7\n", "8\n"), heard("8\n", "7\n"))


async def test_a_request_id_that_comes_again_in_the_next_step_is_another_trajectory(make_worker: MakeWorker) -> None:
    """With `full_determinism`, verl counts trajectories from det-0 in every step."""
    script = {"How many eggs?": [answer("18"), "It is 18."] * 2}
    worker = make_worker(script, [GSM8K], "actor_rollout_ref.rollout.full_determinism=true")
    for _ in range(2):
        [trajectory] = await roll_out(worker, {**row("How many eggs?", ground_truth="18"), "priority": 0})
        assert trajectory.tool_rewards == [0.0]
    assert worker.llm_client.requests == ["det-0"] * 4


# Parsers --------------------------------------------------------------------------------------------------------------


async def test_verls_parsers_that_read_schemas_can_read_ours(make_worker: MakeWorker) -> None:
    """qwen3_coder converts arguments to the types that the schema names."""
    spoken = (
        "<tool_call>\n<function=code_interpreter>\n<parameter=code>\nprint(42)\n</parameter>\n</function>\n</tool_call>"
    )
    script = {"6 times 7?": [spoken, "42."]}
    worker = make_worker(script, [CODE_INTERPRETER], "actor_rollout_ref.rollout.multi_turn.format=qwen3_coder")
    [trajectory] = await roll_out(worker, row("6 times 7?"))
    assert trajectory.heard == [heard("42\n")]


# On Ray ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="ty-")
    ray.cloudpickle.register_pickle_by_value(scripted)
    ray.init(
        num_cpus=2, include_dashboard=False, _temp_dir=folder, _node_ip_address="127.0.0.1", logging_level="warning"
    )
    yield
    ray.shutdown()
    deadline = time.monotonic() + 10
    while os.path.exists(folder) and time.monotonic() < deadline:  # Ray's processes write to it until they are gone
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


@pytest.mark.usefixtures("cluster")
async def test_code_interpreters_of_verls_actors_are_under_one_limit(model: str, configure: Configure) -> None:
    """As verl runs them: its manager starts Ray actors, and each of these builds the tools."""
    script = {
        "How many eggs?": [code("x = 18; print('eggs')"), code("print(x)"), "It is 18."],
        "How many bolts?": [code("x = 3; print('bolts')"), code("print(x)"), "It is 3."],
    }
    config = configure([STATEFUL], "actor_rollout_ref.rollout.agent.num_workers=2")
    manager = await AgentLoopManager.create(config, ScriptedEngine(model, script))
    eggs, bolts = await roll_out(manager, row("How many eggs?"), row("How many bolts?"))
    assert eggs.heard == [heard("eggs\n"), heard("18\n")]
    assert bolts.heard == [heard("bolts\n"), heard("3\n")]
    lender = ray.get_actor(PREFIX + DEFAULT_NAME, NAMESPACE)
    statistics = await lender.statistics.remote()
    assert statistics["limit"] == STATEFUL["config"]["rate_limit"]
    assert len(statistics["leases"]) == 2  # one for each actor's process
