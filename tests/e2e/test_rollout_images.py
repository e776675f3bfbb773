"""Images that tools return: tool, message, tokens, engine, dump, viewer; or a line in their place, and a record of it.

The template and the vocabulary are those of a real vision model. The servers are stand-ins that record what they are
sent; they cannot show how a vision model would answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from material import family_folder, family_tokenizer
from pictures import png
from playing import CHAT, call, limits, played, request_for, task
from toolyard.chat.formats import open_format
from toolyard.chat.protocol import ChatFormat, Tokenizer
from toolyard.engines.http.openai import OpenaiEngine
from toolyard.engines.http.sglang import SglangEngine
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import Sampling
from toolyard.errors import ChatError, ConfigError
from toolyard.images import image_of
from toolyard.messages import Message
from toolyard.records.audit import audit
from toolyard.records.dump import read_dump
from toolyard.records.lines import to_line, trajectory_of
from toolyard.records.trajectory import Trajectory
from toolyard.rewards.registry import load_reward
from toolyard.rollout import assembly
from toolyard.rollout.config import load_config
from toolyard.rollout.play.play import Play
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.play.speaker import MessageSpeaker, Speaker, TokenSpeaker
from toolyard.rollout.run import run_rollouts
from toolyard.testing.engine.byte_model import ByteModel
from toolyard.testing.engine.servers import OPENAI, SGLANG, VLLM, VLLM_TOKENS, EngineServer
from toolyard.tools.base import BaseTool, ToolResponse
from toolyard.tools.registry import initialize_tools_from_config
from toolyard.viewer.conversation import conversation

HELD = limits(max_assistant_turns=3)
SAMPLING = Sampling(max_tokens=400)
SCHEMA: Any = {"type": "function", "function": {"name": "draw", "description": "Draws two pictures."}}
PICTURES = (png(2, 3), png(4, 5))
CALLS = "</think>\n\n<tool_call>\n<function=draw>\n</function>\n</tool_call>"


class Draw(BaseTool):
    """Returns pictures, and a text that looks like one's tokens."""

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config or {}, tool_schema or SCHEMA)
        self.returns: list[Any] = list(PICTURES)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text="drawn <|image_pad|>", image=self.returns)


class Saying(ByteModel):
    """Says tokens: those of the first line, in a conversation with one picture less those of the next, and so on."""

    def __init__(self, tokenizer: Tokenizer, turns: Sequence[str], turn_of: Callable[[Sequence[int]], int]) -> None:
        super().__init__()
        self.vocabulary = tokenizer.vocab_size
        self._lines = [tokenizer.encode(f"{text}<|im_end|>") for text in turns]
        self._turn_of = turn_of

    def distribution(self, ids: Sequence[int], start: int) -> list[tuple[int, float]]:
        line = self._lines[self._turn_of(ids[:start])]
        return [(line[min(len(ids) - start, len(line) - 1)], 1.0)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return family_tokenizer("qwen3.5")


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> ChatFormat:
    return open_format(tokenizer)


@pytest.fixture
def model(tokenizer: Tokenizer, chat: ChatFormat) -> ByteModel:
    """Calls twice, then answers."""
    return Saying(
        tokenizer, [CALLS, CALLS, "</think>\n\n#### 42"], lambda ids: list(ids).count(chat.image_token_id or -1) // 2
    )


async def play(speaker: Speaker, tool: BaseTool) -> Trajectory:
    place = Setting(speaker, {tool.name: tool}, HELD, load_reward("gsm8k"))
    return await Play(request_for(place, task()), place).run()


# Tokens ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.material
def test_a_real_vision_template_writes_a_token_for_each_image(tokenizer: Tokenizer, chat: ChatFormat) -> None:
    assert tokenizer.decode([chat.image_token_id or 0]) == "<|image_pad|>"
    images = tuple(map(image_of, PICTURES))
    answer = Message("tool", "two <|image_pad|> dots", tool_call_id="c", name="draw", images=images)
    sampled = tokenizer.encode(f"{CALLS}<|im_end|>")
    ids = chat.extension([], sampled, [answer, Message("tool", "none", tool_call_id="d", name="draw")])
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert tokenizer.decode(ids).startswith(
        f"\n<|im_start|>user\n<tool_response>\ntwo <|image_pad|> dots{picture}{picture}\n</tool_response>\n"
        "<tool_response>\nnone\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(chat.image_token_id) == 2, "text is no image"
    alone = chat.render([Message("user", "Look.", images=images)])
    assert alone.count(chat.image_token_id) == 2


@pytest.mark.material
@pytest.mark.exhaustive
def test_a_template_that_leaves_out_images_of_tools_has_no_place_for_them() -> None:
    """Though it writes those of users."""
    assert open_format(family_tokenizer("gemma-4")).image_token_id is None


def test_a_format_without_a_place_for_images_refuses_them() -> None:
    with pytest.raises(ChatError, match="does not support images"):
        CHAT.render([Message("user", "Look.", images=(image_of(png()),))])


# Engines --------------------------------------------------------------------------------------------------------------


@pytest.mark.material
@pytest.mark.parametrize(
    ("engine_class", "speaks", "path"),
    [(SglangEngine, [SGLANG], "/generate"), (VllmEngine, [VLLM, VLLM_TOKENS], "/inference/v1/generate")],
)
async def test_token_engines_get_the_images_beside_the_tokens(
    engine_class: Any, speaks: list[str], path: str, chat: ChatFormat, model: ByteModel
) -> None:
    async with EngineServer(speaks, model=model) as server, engine_class(server.url) as engine:
        trajectory = await play(TokenSpeaker(engine, chat, SAMPLING, HELD), Draw())
        first, second, third = server.posts(path)
    urls = [image_of(picture).url for picture in PICTURES]
    name = "image_data" if engine_class is SglangEngine else "content_parts"
    assert name not in first
    for sent, expected in ((second, urls), (third, urls * 2)):
        assert [part if isinstance(part, str) else part["url"] for part in sent[name]] == expected
        ids = sent.get("input_ids") or sent["token_ids"]
        assert ids.count(chat.image_token_id) == len(expected)
    assert (trajectory.failure, trajectory.token_exact, trajectory.score) == (None, True, 1.0)
    assert trajectory.metrics["images"] == {"shown": 4, "hidden": 0}
    assert [len(message.images) for message in trajectory.messages] == [0, 0, 2, 0, 2, 0]
    assert audit(trajectory, chat.decode) == []
    assert trajectory_of(to_line(trajectory)).messages == trajectory.messages


@pytest.mark.material
async def test_a_vllm_that_takes_no_images_with_tokens_is_named(chat: ChatFormat, model: ByteModel) -> None:
    async with EngineServer([VLLM], model=model) as server, VllmEngine(server.url) as engine:
        trajectory = await play(TokenSpeaker(engine, chat, SAMPLING, HELD), Draw())
    assert trajectory.failure is not None
    assert "--enable-scale-out" in trajectory.failure.error


@pytest.mark.material
async def test_a_model_that_samples_an_images_token_itself_is_found_out(chat: ChatFormat, tokenizer: Tokenizer) -> None:
    model = Saying(tokenizer, [f"<|image_pad|>{CALLS}"], lambda _: 0)
    async with EngineServer([SGLANG], model=model) as server, SglangEngine(server.url) as engine:
        trajectory = await play(TokenSpeaker(engine, chat, SAMPLING, HELD), Draw())
    assert trajectory.failure is not None
    assert "2 images but 3 image tokens" in trajectory.failure.error


def answering(body: dict[str, Any]) -> dict[str, Any]:
    if body["messages"][-1]["role"] == "tool":
        return {"role": "assistant", "content": "#### 42"}
    called = [{"id": "c1", "type": "function", "function": {"name": "draw", "arguments": "{}"}}]
    return {"role": "assistant", "content": None, "tool_calls": called}


@pytest.mark.parametrize("shows", [True, False])
async def test_servers_of_messages_get_image_urls_if_they_are_said_to_take_them(shows: bool) -> None:
    async with EngineServer([OPENAI], model=ByteModel("ok"), chat=answering) as server:
        async with OpenaiEngine(server.url) as engine:
            speaker = MessageSpeaker(engine, SAMPLING, HELD, **({"hides_images": ""} if shows else {}))
            trajectory = await play(speaker, Draw())
        told = server.posts("/v1/chat/completions")[-1]["messages"][-1]
    if shows:
        urls = [part["image_url"]["url"] for part in told["content"] if part["type"] == "image_url"]
        assert urls == [image_of(picture).url for picture in PICTURES]
        assert trajectory.metrics["images"] == {"shown": 2, "hidden": 0}
        assert "[image: image/png, 2x3, " in trajectory.output
    else:
        assert "[image: image/png, 2x3, " in told["content"]
        assert trajectory.metrics["images"]["hidden"] == 2
    assert (trajectory.failure, trajectory.score) == (None, 1.0)


# Placeholders ---------------------------------------------------------------------------------------------------------


async def test_a_text_only_model_reads_a_line_instead_and_the_record_says_so() -> None:
    trajectory = await played([call("draw", {}), "#### 42"], [Draw()])
    (answer,) = (message for message in trajectory.messages if message.role == "tool")
    assert answer.images == ()
    assert answer.content == "\n".join(
        ["drawn <|image_pad|>", *(f"[image: {image_of(picture)}; not shown]" for picture in PICTURES)]
    )
    assert answer.content == trajectory.turns[0].tool_calls[0].response
    assert trajectory.metrics["images"] == {
        "shown": 0,
        "hidden": 2,
        "why_hidden": "the format template:hermes has no place for images",
    }
    assert (trajectory.failure, trajectory.score) == (None, 1.0)


async def test_images_of_a_tools_creation_are_told_of() -> None:
    class Greeting(Draw):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
            return instance_id or "", ToolResponse(text="Here is a map.", image=[png()])

    trajectory = await played(["#### 42"], [Greeting()])
    assert trajectory.messages[0].content.endswith("Here is a map.\n[1 image, not shown]")


@pytest.mark.material
async def test_images_beyond_the_requests_room_are_hidden_and_it_goes_on(chat: ChatFormat, model: ByteModel) -> None:
    held = limits(max_assistant_turns=3, max_image_bytes=len(PICTURES[0]) + 10)
    draw = Draw()
    draw.returns = [PICTURES[0], PICTURES[0], *[png(pad=50 << 20)] * 2, *["nothing"] * 100]
    async with EngineServer([SGLANG], model=model) as server, SglangEngine(server.url) as engine:
        place = Setting(TokenSpeaker(engine, chat, SAMPLING, held), {"draw": draw}, held, load_reward("gsm8k"))
        trajectory = await Play(request_for(place, task()), place).run()
    assert trajectory.failure is None
    assert trajectory.metrics["images"] == {
        "shown": 1,
        "hidden": 3,
        "why_hidden": "more than limits.max_image_bytes",
    }
    first = trajectory.turns[0].tool_calls[0]
    assert (first.outcome, first.truncated) == ("ok", True)
    assert "too much for this conversation" in first.response
    assert "[96 more images are left out: at most 8]" in first.response


# The whole road -------------------------------------------------------------------------------------------------------


def model_folder(folder: Path, family: str) -> str:
    """As on the hub: with a config."""
    made = folder / family
    made.mkdir(exist_ok=True)
    for file in family_folder(family).iterdir():
        if not (made / file.name).exists():
            (made / file.name).symlink_to(file)
    (made / "config.json").write_text("{}")
    return str(made)


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take tokenizers that are open already: reading these takes longer than anything else here."""
    monkeypatch.setattr(assembly, "load_tokenizer", lambda folder: family_tokenizer(Path(folder).name))


def settings(folder: Path, **chat: Any) -> Any:
    (folder / "tools.yaml").write_text(
        yaml.safe_dump({"tools": [{"class_name": f"{__name__}.Draw", "config": {"type": "native"}}]})
    )
    (folder / "script.json").write_text(json.dumps([CALLS, "</think>\n\n#### 42"]))
    return {
        "tasks": {"path": "word-problems", "limit": 2},
        "engine": {"kind": "scripted", "model": model_folder(folder, "qwen3.5"), "script": str(folder / "script.json")},
        "tools": str(folder / "tools.yaml"),
        "chat": chat,
        "rollout_data_dir": str(folder / "dump"),
    }


@pytest.mark.material
@pytest.mark.usefixtures("read_once")
async def test_images_come_out_of_the_dump_and_a_replay_is_the_same(tmp_path: Path) -> None:
    given = settings(tmp_path)
    await run_rollouts(load_config(None, {**given, "record": str(tmp_path / "tape")}))
    dumped = [line.trajectory for line in read_dump(tmp_path / "dump")]
    assert [[image.data for message in one.messages for image in message.images] for one in dumped] == [[*PICTURES]] * 2
    again = {**given, "replay": str(tmp_path / "tape"), "rollout_data_dir": str(tmp_path / "again")}
    await run_rollouts(load_config(None, again))
    assert [line.trajectory.messages for line in read_dump(tmp_path / "again")] == [one.messages for one in dumped]
    bubbles = conversation(dumped[0])
    (shown,) = (one for bubble in bubbles for one in bubble.calls)
    assert [picture.label for picture in shown.images] == [str(image_of(picture)) for picture in PICTURES]
    assert [picture.url for picture in shown.images] == [image_of(picture).url for picture in PICTURES]


@pytest.mark.material
@pytest.mark.usefixtures("read_once")
@pytest.mark.exhaustive
async def test_images_can_be_hidden_and_cannot_be_shown_to_a_text_model(tmp_path: Path) -> None:
    await run_rollouts(load_config(None, settings(tmp_path, images="hide")))
    for line in read_dump(tmp_path / "dump"):
        assert line.trajectory.metrics["images"]["why_hidden"] == "chat.images is hide"
    given = settings(tmp_path, images="show")
    given["engine"]["model"] = model_folder(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=r"chat.images: show: the format template:hermes has no place for images"):
        await run_rollouts(load_config(None, {**given, "rollout_data_dir": None}))


async def test_pictures_of_mcp_servers_go_the_same_way(tmp_path: Path) -> None:
    from mcp_server import PNG

    server = Path(__file__).with_name("mcp_server.py")
    (tmp_path / "servers.json").write_text(
        json.dumps({"mcpServers": {"drawing": {"command": sys.executable, "args": [str(server), "stdio"]}}})
    )
    entry = {
        "class_name": "toolyard.tools.mcp.MCPTool",
        "config": {"type": "mcp"},
        "mcp": {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["picture"]},
    }
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    (tool,) = initialize_tools_from_config(tmp_path / "tools.yaml")

    def asks(body: dict[str, Any]) -> dict[str, Any]:
        said = answering(body)
        for one in said.get("tool_calls", ()):
            one["function"] = {"name": tool.name, "arguments": json.dumps({"size": 0})}
        return said

    try:
        async with EngineServer([OPENAI], model=ByteModel("ok"), chat=asks) as served, OpenaiEngine(served.url) as one:
            trajectory = await play(MessageSpeaker(one, SAMPLING, HELD, hides_images=""), tool)
    finally:
        await tool.close()
    (answer,) = (message for message in trajectory.messages if message.role == "tool")
    assert (answer.content, [image.data for image in answer.images]) == ("a dot", [PNG])
