"""Tools explain the rewards that they calculate."""

from __future__ import annotations

import pytest

from toolyard.rewards.explanation import Explanation
from toolyard.tools.gsm8k import Gsm8kTool
from toolyard.tools.instance import open_instance

HUGE = "9" * 100_000


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([], Explanation("no answer was given")),
        (["18", "17"], Explanation("the answer 17 is not 18", "17", "18")),
        ([HUGE, "18"], Explanation("the answer 18 equals 18", "18", "18")),
    ],
)
async def test_the_gsm8k_tool_explains_its_last_answer_and_still_returns_a_number(answers, why):
    async with open_instance(Gsm8kTool({}), "r", {"create_kwargs": {"ground_truth": "18"}}) as instance:
        for answer in answers:
            await instance.call({"answer": answer})
    assert (type(instance.reward), instance.explanation, instance.problems) == (float, why, [])


async def test_a_reward_of_its_own_is_not_explained_by_the_class_it_inherits_from():
    class Mine(Gsm8kTool):
        async def calc_reward(self, instance_id, **kwargs):
            return 0.5

    async with open_instance(Mine({}), "r", {"create_kwargs": {"ground_truth": "18"}}) as instance:
        await instance.call({"answer": "18"})
    assert (instance.reward, instance.explanation) == (0.5, None)


@pytest.mark.parametrize("returned", [RuntimeError("no"), None, "text", {"reason": HUGE}, {"reason": "fine"}])
async def test_an_explanation_that_fails_costs_nothing_but_itself(returned):
    class Tool(Gsm8kTool):
        released = False

        async def explain_reward(self, instance_id):
            if isinstance(returned, Exception):
                raise returned
            return returned

        async def release(self, instance_id, **kwargs):
            self.released = True

    tool = Tool({})
    async with open_instance(tool, "r", {"create_kwargs": {"ground_truth": "18"}}) as instance:
        await instance.call({"answer": "18"})
    assert (instance.reward, tool.released, instance.our_failure) == (1.0, True, False)
    assert bool(instance.problems) == isinstance(returned, Exception)
    assert (instance.explanation is not None) == isinstance(returned, dict)
