"""What tools return, in old and new forms, and how much of it the model gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from pictures import png
from toolyard.errors import SandboxError
from toolyard.images import image_of
from toolyard.messages import OpenAIFunctionToolSchema
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.instance import ToolOutcome, ToolResult, open_instance

SCHEMA = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "search"}})
QUERY = {"query": "x"}
PNG = image_of(png()).as_json()["data"]


class Tool(BaseTool):
    """Calls `act` with the number of the call, from 1."""

    def __init__(self, act: Callable[[int], Any], **call: Any) -> None:
        super().__init__({"call": {"retry_pause_seconds": 0.001, **call}}, SCHEMA)
        self.act = act
        self.calls = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.calls += 1
        return self.act(self.calls)


async def once(tool: BaseTool, arguments: Any = QUERY, **options: Any) -> ToolResult:
    async with open_instance(tool, "r1") as instance:
        return await instance.call(arguments, **options)


# What tools return ----------------------------------------------------------------------------------------------------


class OtherResponse(BaseModel):
    """As another framework has it."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class Number:
    """As numpy and torch have them."""

    def __float__(self) -> float:
        return 0.25

    def __repr__(self) -> str:
        return "Number"


@pytest.mark.parametrize(
    ("returned", "text", "reward", "metrics"),
    [
        ("found", "found", None, {}),
        (None, None, None, {}),
        (ToolResponse(text="found"), "found", None, {}),
        (OtherResponse(text="found"), "found", None, {}),
        (("found", 0.5), "found", 0.5, {}),
        (("found", 1, {"hits": 3}), "found", 1.0, {"hits": 3}),
        (("found", "found", {}), "found", None, {}),
        (("found", Number(), None), "found", 0.25, {}),
        ({"text": "found"}, "found", None, {}),
        ({"hits": [1, 2], "wo": "Straße"}, '{"hits": [1, 2], "wo": "Straße"}', None, {}),
        ({(1, 2): 3}, "{(1, 2): 3}", None, {}),
        ([1, 2], "[1, 2]", None, {}),
        (42, "42", None, {}),
        ((), None, None, {}),
    ],
    ids=repr,
)
async def test_tools_of_all_ages_are_understood(returned: Any, text: Any, reward: Any, metrics: Any) -> None:
    result = await once(Tool(lambda _: returned))
    assert (result.outcome, result.response.text, result.error) == (ToolOutcome.OK, text, None)
    assert (result.reward, result.metrics) == (reward, metrics)


async def test_images_reach_the_model_in_one_form() -> None:
    result = await once(Tool(lambda _: ToolResponse(text="a cat", image=[png()])))
    assert (result.response.text, result.response.image) == ("a cat", [image_of(png()).as_json()])
    assert not result.truncated


async def test_bad_images_are_named_and_the_others_stay() -> None:
    given = [png(pad=50 << 20), {"mime_type": "image/png", "data": "AAA"}, {"mime_type": "image/jpeg", "data": PNG}, 7]
    result = await once(Tool(lambda _: ToolResponse(image=given)))
    assert (result.outcome, result.truncated) == (ToolOutcome.OK, True)
    assert result.response.image == [{"mime_type": "image/png", "data": PNG}]
    assert (result.response.text or "").splitlines() == [
        f"[image 1 omitted: {len(given[0]):,} bytes; at most 4,194,304 are allowed]",
        "[image 2 omitted: its base64 is invalid]",
        "[image 4 omitted: int is not an image]",
    ]


async def test_of_a_hundred_images_the_first_are_kept() -> None:
    result = await once(Tool(lambda _: ToolResponse(text="frames", image=[png()] * 100), max_images=3))
    assert len(result.response.image or ()) == 3
    assert result.response.text == "frames\n[97 more images are left out: at most 3]"


async def test_step_rewards_are_collected() -> None:
    async with open_instance(Tool(lambda call: ("found", -0.5 * call) if call < 3 else "none"), "r1") as instance:
        for _ in range(3):
            await instance.call(QUERY)
    assert instance.step_rewards == [-0.5, -1.0]


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), [1, 2]])
async def test_a_step_reward_that_is_no_number_is_the_tools_error(reward: Any) -> None:
    result = await once(Tool(lambda _: ("found", reward)))
    assert (result.outcome, result.reward) == (ToolOutcome.RAISED, None)
    assert "is not a finite number" in (result.error or "")


async def test_half_an_emoji_can_be_encoded() -> None:
    result = await once(Tool(lambda _: "Straße \ud83d!"))
    assert result.response.text == "Straße \\ud83d!"


async def test_a_tool_may_change_its_arguments_without_harm() -> None:
    class Greedy(Tool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            query = parameters.pop("query")
            await super().execute(instance_id, parameters)
            return query

    def act(call: int) -> None:
        if call == 1:
            raise SandboxError("died")

    given = {"query": "x"}
    result = await once(Greedy(act), given)
    assert (result.response.text, result.attempts, given) == ("x", 2, {"query": "x"})


# How much the model gets ----------------------------------------------------------------------------------------------


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    ("keep", "start", "end"), [("head", "0 1 2", "cut …]"), ("tail", "[… ", "97 98 99"), ("both", "0 1 2", "97 98 99")]
)
async def test_a_long_answer_is_cut_and_the_cut_marked(keep: str, start: str, end: str) -> None:
    text = " ".join(map(str, range(100)))
    result = await once(Tool(lambda _: text, max_response_chars=100, keep=keep))
    shown = result.response.text or ""
    assert (result.truncated, len(shown)) == (True, 100)
    assert (shown.startswith(start), shown.endswith(end)) == (True, True), shown
    assert "characters cut …]" in shown


async def test_tokens_are_counted_by_whoever_knows_the_tokenizer() -> None:
    text = " ".join(map(str, range(100)))
    tool = Tool(lambda _: text, max_response_tokens=30)
    cut = await once(tool, measure=words)
    assert (cut.truncated, words(cut.response.text or "")) == (True, 30)
    whole = await once(tool)
    assert (whole.truncated, whole.response.text) == (False, text), "nobody counts"


async def test_a_short_answer_and_pictures_are_left_alone() -> None:
    response = ToolResponse(text="short", image=[image_of(png()).as_json()])
    result = await once(Tool(lambda _: response, max_response_chars=5))
    assert (result.truncated, result.response) == (False, response)


async def test_arguments_may_come_as_text_or_decoded() -> None:
    class Echo(Tool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return parameters

    for arguments in (QUERY, json.dumps(QUERY)):
        assert (await once(Echo(lambda _: None), arguments)).response.text == '{"query": "x"}'
