"""Final rewards that have a name: their options, what they open and close, and when there is no score."""

from __future__ import annotations

import asyncio
import json

import pytest

from left_behind import children
from toolyard.errors import ConfigError, RewardError
from toolyard.limits.local import LocalLimiter
from toolyard.rewards import data_sources
from toolyard.rewards.registry import FinalScore, GroundTruthError, load_reward

SECONDS = 20.0


async def score(reward, solution="#### 18", truth="18", seconds=SECONDS) -> FinalScore:
    return await reward.score("source", solution, truth, {}, deadline_seconds=seconds)


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "gsm8k", "gsm8k:strict"])
def test_rewards_without_options_refuse_them(name):
    with pytest.raises(ConfigError, match=f"reward '{name}': takes no options, but was given memory_limit_mb, x"):
        load_reward(name, {"memory_limit_mb": 5, "x": 1})
    load_reward(name, {})


@pytest.mark.parametrize("name", ["code", "code:fraction", "code:continuous", "math", "default"])
def test_an_unknown_option_names_the_known_ones(name):
    with pytest.raises(ConfigError, match=f"reward '{name}': unknown option 'memory'; known: .*memory_limit_mb"):
        load_reward(name, {"memory": 5})
    with pytest.raises(ConfigError, match=r"unknown option 'aggregation'; known: (?!.*aggregation)"):
        load_reward(name, {"aggregation": "all"})


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("code", {"memory_limit_mb": -5}, "option 'memory_limit_mb': Input should be greater than 0; given: '-5'"),
        ("code", {"comparison": {"mode": "x"}}, r"option 'comparison\.mode': Input should be 'lines'"),
        ("code", {"comparison": {"mod": "x"}}, r"option 'comparison\.mod': Extra inputs are not permitted"),
        ("default", {"retries": "many"}, "option 'retries': Input should be a valid integer"),
        ("math", {"children": 0}, "option 'children': Input should be greater than 0"),
    ],
)
def test_an_option_that_is_wrong_is_named_with_its_value(name, options, told):
    with pytest.raises(ConfigError, match=told):
        load_reward(name, options)


# Mathematics ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def loaded():
    """Loads rewards, and closes them."""
    rewards = []

    def load(name, **options):
        rewards.append(load_reward(name, options))
        return rewards[-1]

    yield load
    for reward in rewards:
        await reward.close()


async def test_math_by_name(loaded):
    pytest.importorskip("math_verify")
    reward = loaded("math", children=1)
    right = await score(reward, r"So it is \boxed{\frac{2}{4}}.", "0.5")
    assert (right.value, right.extras) == (1.0, {"timed_out": False})
    wrong = await score(reward, r"\boxed{3}", "5")
    assert (wrong.value, wrong.explanation.reason) == (0.0, "the answer 3 is not 5")
    for truth in (None, "", {"a": 1}):
        with pytest.raises(GroundTruthError, match="reward 'math': "):
            await score(reward, truth=truth)


async def test_a_mathematical_check_that_hangs_is_stopped_and_is_the_answers_doing(loaded):
    pytest.importorskip("math_verify")
    reward = loaded("math", children=1)
    await score(reward, r"\boxed{\frac{1}{3}}", r"\frac{2}{6}")  # its process has started
    found = await score(reward, r"\boxed{10^{10^{10}}}", r"\frac{2}{6}", seconds=0.5)
    assert (found.value, found.extras["timed_out"], found.explanation.reason) == (
        0.0,
        True,
        "the answer could not be checked within 0.5 s",
    )


async def test_closed_the_math_reward_leaves_no_process():
    pytest.importorskip("math_verify")
    before = children()
    reward = load_reward("math")
    await score(reward, r"\boxed{\frac{1}{3}}", r"\frac{2}{6}")
    assert children() != before
    await reward.close()
    await reward.close()
    assert children() == before


# By data source -------------------------------------------------------------------------------------------------------


async def test_default_is_whichever_the_data_source_needs(loaded):
    reward = loaded("default", memory_limit_mb=512)
    assert (await reward.score("openai/gsm8k", "#### 18", "18", {}, deadline_seconds=SECONDS)).value == 1.0
    with pytest.raises(RewardError, match="reward 'default': data source 'nobody/knows' has no reward; registered:"):
        await reward.score("nobody/knows", "#### 18", "18", {}, deadline_seconds=SECONDS)
    with pytest.raises(GroundTruthError, match="reward 'gsm8k:strict': "):
        await reward.score("openai/gsm8k", "#### 18", None, {}, deadline_seconds=SECONDS)


async def test_default_knows_functions_that_were_registered(loaded):
    def judge(data_source, solution_str, ground_truth, extra_info):
        return {"score": 0.5, "source": data_source, "extra": extra_info}

    data_sources.register("test_rewards_final/mine", judge, replace=True)
    found = await loaded("default").score("test_rewards_final/mine", "s", 1, {"a": 1}, deadline_seconds=SECONDS)
    assert found == FinalScore(0.5, {"source": "test_rewards_final/mine", "extra": {"a": 1}})


# By running -----------------------------------------------------------------------------------------------------------

CASES = {"inputs": ["1\n", "2\n", "3\n", "4\n"], "outputs": ["2\n", "4\n", "6\n", "8\n"]}
DOUBLE = "```python\nprint(int(input()) * 2)\n```"
HALF_RIGHT = "```python\nn = int(input())\nprint(n * 2 if n < 3 else 0)\n```"


async def test_code_by_name(loaded):
    right = await score(loaded("code"), DOUBLE, CASES)
    assert right.value == 1.0
    assert (right.extras["passed"], right.extras["cases"], right.extras["blocks"]) == (4, 4, 1)
    assert right.extras["verdicts"] == {"passed": 4}
    assert right.extras["seconds"] > 0
    assert (await score(loaded("code"), HALF_RIGHT, CASES)).value == 0.0
    half = await score(loaded("code:fraction"), HALF_RIGHT, json.dumps(CASES))
    assert (half.value, half.extras["verdicts"]) == (0.5, {"passed": 2, "wrong_answer": 2})
    assert half.explanation.reason.startswith("case 3 of 4: wrong answer")
    first = await score(loaded("code:continuous", first_n=3), HALF_RIGHT, CASES)
    assert first.value == pytest.approx(2 / 3)


async def test_an_answer_without_a_program_is_worth_nothing_and_says_so(loaded):
    found = await score(loaded("code"), "I do not know.", CASES)
    assert (found.value, found.extras["passed"], found.extras["blocks"]) == (0.0, 0, 0)
    assert found.explanation.reason


@pytest.mark.parametrize("truth", [None, "", "not JSON", {"inputs": ["1"]}, [], 18, {"inputs": [], "outputs": []}])
async def test_a_ground_truth_without_test_cases_is_the_tasks_fault(loaded, truth):
    with pytest.raises(GroundTruthError, match="reward 'code': "):
        await score(loaded("code"), DOUBLE, truth)


async def test_what_a_program_printed_is_not_kept(loaded):
    loud = "```python\nprint('x' * 1_000_000)\nraise ValueError('y' * 1_000_000)\n```"
    found = await score(loaded("code"), loud, CASES)
    assert found.value == 0.0
    assert len(json.dumps([found.extras, found.explanation.as_json()])) < 1_000


async def test_a_service_that_is_none_takes_the_score_away(loaded):
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        reward = loaded("code", sandbox_fusion_url=f"http://{host}:{port}", retries=0)
        with pytest.raises(RewardError, match=r"reward 'code': .*is not a SandboxFusion server") as caught:
            await score(reward, DOUBLE, CASES)
    assert not isinstance(caught.value, GroundTruthError)


LOOP = "```python\nn = int(input())\nwhile n > 1: pass\nprint(n * 2)\n```"


@pytest.mark.slow
async def test_the_time_that_a_program_takes_itself_is_its_own_and_no_deadline_takes_its_score_away(loaded):
    reward = loaded("code:continuous", run_seconds=0.5)
    found = await score(reward, LOOP, CASES, seconds=0.3)
    assert (found.value, found.extras["verdicts"]) == (0.25, {"passed": 1, "time_limit": 3})


@pytest.mark.slow
async def test_an_answers_deadline_begins_with_its_turn(loaded):
    reward = loaded("code", run_seconds=0.2, compile_seconds=0.1, num_workers=2)
    async with asyncio.TaskGroup() as group:
        loops = [group.create_task(score(reward, LOOP, CASES, seconds=2)) for _ in range(30)]
    assert {loop.result().value for loop in loops} == {0.0}


async def test_an_answer_that_nobody_runs_has_no_score_at_the_deadline(loaded):
    reward = loaded("code", run_seconds=0.1, compile_seconds=0.1, rate_limit=1)
    await score(reward, DOUBLE, CASES)
    limiter = LocalLimiter(1, name="rate-limiter")
    async with limiter.permit("somebody else"):
        with pytest.raises(RewardError, match="reward 'code': case 0: infrastructure: the deadline passed"):
            await score(reward, DOUBLE, CASES, seconds=0.2)
    await limiter.close()


async def test_nothing_is_opened_before_the_first_answer_and_nothing_is_left_after_the_last():
    before, tasks = children(), asyncio.all_tasks()
    reward = load_reward("code")
    await reward.close()
    assert children() == before
    await score(reward, DOUBLE, CASES)
    assert children() != before
    await reward.close()
    await reward.close()
    assert children() == before
    assert asyncio.all_tasks() == tasks
    assert (await score(reward, DOUBLE, CASES)).value == 1.0, "it opens again"
    await reward.close()


async def test_many_answers_share_one_judge_and_one_that_is_cancelled_harms_no_other(loaded):
    reward = loaded("code")
    first = asyncio.create_task(score(reward, DOUBLE, CASES))
    others = [asyncio.create_task(score(reward, DOUBLE, CASES)) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()  # while it opens the sandbox for all
    with pytest.raises(asyncio.CancelledError):
        await first
    assert [(await other).value for other in others] == [1.0] * 20
