"""The GSM8K tool: what the model reads, the rewards of steps, and the final reward of a trajectory."""

from types import SimpleNamespace

import pytest

from toolyard.errors import ConfigError, ToolError
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.tools.gsm8k import Gsm8kTool
from toolyard.tools.instance import ToolOutcome, open_instance
from toolyard.tools.registry import initialize_tools_from_config

SEED_YAML = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k"
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem"
          required: ["answer"]
"""


async def answers(tool, truth, *given):
    """Texts, step rewards and the reward in the end."""
    instance_id, _ = await tool.create("t", ground_truth=truth)
    results = [await tool.execute(instance_id, {"answer": answer}) for answer in given]
    reward = await tool.calc_reward(instance_id)
    await tool.release(instance_id)
    return [response.text for response, _, _ in results], [step for _, step, _ in results], reward


# Made -----------------------------------------------------------------------------------------------------------------


def test_its_own_schema_is_the_one_of_the_seeds(tmp_path):
    (tmp_path / "tools.yaml").write_text(SEED_YAML)
    [seeded] = initialize_tools_from_config(tmp_path / "tools.yaml")
    assert isinstance(seeded, Gsm8kTool)
    assert Gsm8kTool({}).get_openai_tool_schema().model_dump() == seeded.get_openai_tool_schema().model_dump()
    assert Gsm8kTool({}).name == "calc_gsm8k_reward"


def test_a_given_schema_overrides_its_own():
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "check"}})
    assert Gsm8kTool({}, schema).name == "check"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"metod": "strict"}, "config.metod"),
        ({"method": "lenient"}, "config.method.*'strict' or 'flexible'.*'lenient'"),
        ({"penalty": 0.05}, "config.penalty.*0.05"),
        ({"score": float("inf")}, "config.score"),
    ],
)
def test_a_wrong_setting_is_named(config, named):
    with pytest.raises(ConfigError, match=named):
        Gsm8kTool(config)


@pytest.mark.parametrize("kwargs", [{}, {"ground_truth": None}, {"create_kwargs": {}}])
async def test_a_trajectory_without_ground_truth_cannot_begin(kwargs):
    with pytest.raises(ConfigError, match="'calc_gsm8k_reward': create needs ground_truth"):
        await Gsm8kTool({}).create("t", **kwargs)


async def test_a_ground_truth_that_is_no_number_is_noticed_before_the_model_answers():
    with pytest.raises(ConfigError, match="ground_truth 'eighteen'"):
        await Gsm8kTool({}).create("t", ground_truth="eighteen")


# Answered -------------------------------------------------------------------------------------------------------------


async def test_the_model_reads_what_the_seeds_tool_says():
    texts, _, _ = await answers(Gsm8kTool({}), "18", "17", "#### 18", "it's $18.00", 18, "")
    assert texts == [
        "Current parsed answer='17' reward=0.0",
        "Current parsed answer='#### 18' reward=1.0",
        """Current parsed answer="it's $18.00" reward=1.0""",
        "Current parsed answer='18' reward=1.0",
        "Current parsed answer='' reward=0.0",
    ]


async def test_a_call_without_an_answer_is_an_empty_answer():
    tool = Gsm8kTool({})
    await tool.create("t", ground_truth="18")
    response, step, _ = await tool.execute("t", {})
    assert (response.text, step) == ("Current parsed answer='' reward=0.0", -0.05)


async def test_only_an_answer_better_than_all_before_it_goes_without_penalty():
    _, steps, _ = await answers(Gsm8kTool({}), "18", "17", "18", "18", "17", "18")
    assert steps == [-0.05, 0.0, -0.05, -0.05, -0.05]


@pytest.mark.parametrize(("given", "reward"), [([], 0.0), (["18"], 1.0), (["17", "18"], 1.0), (["18", "17"], 0.0)])
async def test_the_reward_is_the_score_of_the_last_answer(given, reward):
    assert (await answers(Gsm8kTool({}), "18", *given))[2] == reward


async def test_the_metrics_tell_the_best_score_besides_the_last():
    tool = Gsm8kTool({})
    await tool.create("t", ground_truth="18")
    await tool.execute("t", {"answer": "18"})
    _, _, metrics = await tool.execute("t", {"answer": "17"})
    assert metrics == {"score": 0.0, "best_score": 1.0}


async def test_an_equation_counts_by_its_result():
    assert (await answers(Gsm8kTool({}), "18", "3 + 15 = 18"))[2] == 1.0


@pytest.mark.parametrize("answer", ["18", " 18", "$18", "#### 18", "It is:\n#### 18"])
async def test_strict_needs_no_mark_before_a_bare_number(answer):
    assert (await answers(Gsm8kTool({"method": "strict"}), "18", answer))[2] == 1.0


async def test_strict_takes_no_sentence_and_no_other_way_of_writing():
    assert (await answers(Gsm8kTool({"method": "strict"}), "18", "The answer is 18"))[2] == 0.0
    assert (await answers(Gsm8kTool({"method": "strict"}), "18", "18.0"))[2] == 0.0


async def test_scores_and_penalty_are_those_of_the_config():
    tool = Gsm8kTool({"format_score": 0.1, "score": 2.0, "penalty": -1.0})
    texts, steps, reward = await answers(tool, 18, "17", "16", "18")
    assert texts[0] == "Current parsed answer='17' reward=0.1"
    assert steps == [0.0, -1.0, 0.0]
    assert reward == 2.0


# Trajectories ---------------------------------------------------------------------------------------------------------


async def test_trajectories_do_not_see_each_others_answers():
    tool = Gsm8kTool({})
    await tool.create("a", ground_truth="18")
    await tool.create("b", ground_truth="19")
    await tool.execute("a", {"answer": "18"})
    _, step, _ = await tool.execute("b", {"answer": "18"})
    assert step == -0.05
    assert [await tool.calc_reward("a"), await tool.calc_reward("b")] == [1.0, 0.0]


async def test_a_released_trajectory_leaves_nothing_behind():
    tool = Gsm8kTool({})
    await answers(tool, "18", "18")
    assert len(tool._trajectories) == 0
    with pytest.raises(KeyError):
        await tool.execute("t", {"answer": "18"})


async def test_a_framework_that_creates_and_releases_around_every_call_still_gets_the_penalty_for_repetition():
    tool = Gsm8kTool({})

    async def call(request_id, answer):
        instance_id, _ = await tool.create(create_kwargs={"ground_truth": "18"})
        agent = SimpleNamespace(request_id=request_id)
        _, step, _ = await tool.execute(instance_id, {"answer": answer}, agent_data=agent)
        reward = await tool.calc_reward(instance_id, agent_data=agent)
        await tool.release(instance_id)
        return step, reward

    assert await call("a", "18") == (0.0, 1.0)
    assert await call("a", "18") == (-0.05, 1.0)
    assert await call("b", "18") == (0.0, 1.0)


async def test_a_whole_trajectory_runs_through_an_instance():
    kwargs = {"create_kwargs": {"ground_truth": "18"}}
    async with open_instance(Gsm8kTool({"type": "native"}), "t", kwargs) as instance:
        result = await instance.call('{"answer": "$18.00"}')
    assert (result.outcome, result.reward) == (ToolOutcome.OK, 0.0)
    assert instance.reward == 1.0


async def test_an_instance_without_ground_truth_says_so():
    with pytest.raises(ToolError, match="ground_truth"):
        async with open_instance(Gsm8kTool({}), "t"):
            pass
