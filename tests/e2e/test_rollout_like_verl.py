"""verl's tool tests, under their names, and their conversation about John's bonus, from the prompt to the dump."""

from __future__ import annotations

import json

import pytest

from playing import CHAT, TOKENIZER, call, played, request_for, scripted, setting, task
from toolyard.messages import Message
from toolyard.records.audit import audit
from toolyard.records.dump import DumpWriter, read_dump
from toolyard.rollout.finish import FinishReason, RolloutState
from toolyard.rollout.request import create_request
from toolyard.rollout.run_many import RolloutRun
from toolyard.tasks.protocol import Task
from toolyard.tools import initialize_tools_from_config
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.gsm8k import Gsm8kTool

YAML = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config: {type: native}
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k"
        parameters:
          type: "object"
          properties:
            answer: {type: "string", description: "The model's answer to the GSM8K math problem"}
          required: ["answer"]
  - class_name: "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
    config: {type: native, num_workers: 10, enable_global_rate_limit: false, sandbox_fusion_url: ""}
    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties: {code: {type: "string", description: "The code to execute.", enum: null}}
          required: ["code"]
        strict: false
"""

SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. Reasoning step by step "
    "before any tool call. You should use the `calc_gsm8k_reward` tool after step by step solving the question, before "
    "generate final answer at least once and refine your answer if necessary. Put your final answer in the format of "
    "`#### <answer>`."
)
QUESTION = (
    "John gets a bonus that's the same percentage every year.  Last year he made $100,000 and got a $10,000 bonus.  "
    "This year he makes $200,000.  How much will John make this year when adding both his total pay and bonus together?"
    " Let's think step by step and output the final answer after `####`."
)
CODE = (
    "total_pay_this_year = 200000\nbonus_percentage = 10 / 100\n"
    "bonus_this_year = total_pay_this_year * bonus_percentage\n"
    "total_income_this_year = total_pay_this_year + bonus_this_year\nprint(total_income_this_year)"
)
FIRST = (
    "<think>\nOkay, let's see. 10,000 / 100,000 equals 0.1, which is 10% as a percentage. Let me compute that using "
    "the code interpreter to ensure accuracy.\n" + call("code_interpreter", {"code": CODE, "executes": "True"})
)
LAST = "<think>\nSo the code shows that John's total income this year would be $220,000.\n</think>\n\n#### 220000.0"
JOHN = Task(
    id="john",
    messages=(Message("system", SYSTEM), Message("user", QUESTION)),
    ground_truth="220000",
    data_source="openai/gsm8k",
    tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "220000"}}},
)


@pytest.fixture
def tool_list(tmp_path):
    file = tmp_path / "tools.yaml"
    file.write_text(YAML)
    return initialize_tools_from_config(file)


@pytest.fixture
async def tools(tool_list):
    yield tool_list
    for tool in tool_list:
        await tool.close()


def test_tools_registration(tool_list):
    assert [type(tool) for tool in tool_list] == [Gsm8kTool, SandboxFusionTool]
    schemas = [tool.get_openai_tool_schema().model_dump() for tool in tool_list]
    assert schemas[1]["function"]["parameters"]["properties"]["code"]["enum"] is None
    assert [tool.name for tool in tool_list] == ["calc_gsm8k_reward", "code_interpreter"]


def test_rollout_req_creation(tool_list):
    schemas = [tool.tool_schema for tool in tool_list]
    request = create_request(JOHN, 3, tool_schemas=schemas)
    assert request.state is RolloutState.PENDING
    assert (request.batch_data_id, request.rollout_offset) == ("john", 3)
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "220000"}}}
    assert request.prompt_ids == request.response_ids == request.response_mask == []
    assert request.reward_scores == {}
    assert request.finish_reason is None
    again = create_request(JOHN, 3, tool_schemas=schemas)
    assert (again.request_id, again.seed) == (request.request_id, request.seed)
    other = create_request(JOHN, 4, tool_schemas=schemas)
    assert other.request_id != request.request_id
    assert other.seed != request.seed
    assert len(other.request_id) == len(request.request_id), "SGLang aborts by prefix"
    request.begin(CHAT.render(request.messages, request.tool_schemas))
    text = TOKENIZER.decode(request.prompt_ids)
    assert text.startswith(f"<|im_start|>system\n{SYSTEM}\n\n# Tools\n\nYou may call one or more functions")
    assert text.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")


async def test_over_size_case(tools):
    asked = 0

    def say(*_):
        nonlocal asked
        asked += 1
        return "never"

    trajectory = await played(say, tools, JOHN, max_model_len=100)
    assert trajectory.finish_reason == FinishReason.PROMPT_TOO_LONG
    assert (trajectory.state, trajectory.score, trajectory.turns, asked) == ("FAILED", None, (), 0)

    first = len(TOKENIZER.encode(FIRST)) + 1
    trajectory = await played([FIRST, LAST], tools, JOHN, response_length=first + 5)
    assert trajectory.finish_reason == FinishReason.TOOL_RESPONSE_TOO_LONG
    assert len(trajectory.tokens.response_ids) == first

    trajectory = await played([FIRST, LAST], tools, JOHN, response_length=first - 20)
    assert trajectory.finish_reason == FinishReason.LENGTH
    assert len(trajectory.tokens.response_ids) == first - 20


async def test_tool_call_basic_case(tools):
    trajectory = await played([FIRST, LAST], tools, JOHN)
    assert [message.role for message in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    (made,) = trajectory.turns[0].tool_calls
    assert (made.name, made.outcome, made.response) == ("code_interpreter", "ok", "220000.0\n")
    assert trajectory.messages[3].content == "220000.0\n"
    assert trajectory.finish_reason == FinishReason.STOP


async def test_tool_call_batch_case(tools):
    async with scripted([FIRST, LAST]) as engine:
        place = setting(engine, tools)
        requests = [request_for(place, JOHN, offset) for offset in range(64)]
        async with RolloutRun(place, requests, concurrency=32) as run:
            ended = [trajectory async for trajectory in run]
    assert {trajectory.request_id for trajectory in ended} == {request.request_id for request in requests}
    assert {trajectory.messages[3].content for trajectory in ended} == {"220000.0\n"}
    assert {trajectory.score for trajectory in ended} == {1.0}
    assert not any(audit(trajectory, TOKENIZER.decode) for trajectory in ended)


async def test_johns_bonus_from_the_prompt_to_the_dump(tools, tmp_path):
    trajectory = await played([FIRST, LAST], tools, JOHN)
    async with DumpWriter(tmp_path) as dump:
        await dump.write(trajectory)
    (line,) = (tmp_path / "0.jsonl").read_text().splitlines()
    written = json.loads(line)
    assert list(written)[:5] == ["input", "output", "gts", "score", "step"]
    assert (written["gts"], written["score"], written["step"]) == ("220000", 1.0, 0)
    assert written["input"].startswith("<|im_start|>system\nYou are a math expert.")
    assert "<|im_start|>tool\n220000.0\n<|im_end|>\n" in written["output"]
    assert written["output"].endswith("#### 220000.0<|im_end|>")
    assert written["rewards"] == {"final": 1.0, "tool/calc_gsm8k_reward": 0.0, "tool/code_interpreter": 0.0}
    tokens = written["tokens"]
    sampled = [number for number, mask in zip(tokens["response_ids"], tokens["response_mask"], strict=True) if mask]
    assert TOKENIZER.decode(sampled) == FIRST + "<|im_end|>" + LAST + "<|im_end|>", "the model's own, and nothing else"
    ((_, _, again),) = read_dump(tmp_path)
    assert audit(again, TOKENIZER.decode) == []


async def test_kwargs_of_our_own_tools_that_are_absent_are_left_out_and_misspelt_ones_are_told(tools):
    trajectory = await played(["#### 220000"], tools[1:], JOHN)
    assert trajectory.score == 1.0
    misspelt = task(tools_kwargs={"code_interpeter": {"create_kwargs": {"ground_truth": "1"}}})
    trajectory = await played(["#### 42"], tools[1:], misspelt)
    assert trajectory.finish_reason == FinishReason.BAD_TASK
    assert "code_interpeter" in trajectory.failure.error
