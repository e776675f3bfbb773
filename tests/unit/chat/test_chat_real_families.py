"""Real vocabularies with their real templates: stops, calls, answers, and conversations that grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drift import drift
from material import FAMILIES, family_tokenizer
from toolyard.chat.conformance import CODE_TOOL, Outcome, check_format
from toolyard.chat.formats import open_format
from toolyard.chat.protocol import ChatFormat, Tokenizer
from toolyard.errors import ChatError
from toolyard.messages import Message

pytestmark = pytest.mark.material
REWRITTEN = {
    "mistral-nemo": "earlier messages are moved or left out",
    "deepseek-v3.2": "thinking is cut or added",
    "gpt-oss": "turns end with another token",
    "gemma-4": "thinking is cut or added",
}
"""What their templates make of the history, which is no fault of ours."""
ANSWER = Message("tool", "42", tool_call_id="call_0", name="code_interpreter")


QUICK = ("smollm2", "qwen3")


def marked(name: str) -> Any:
    if name in QUICK:
        return name
    return pytest.param(name, marks=pytest.mark.slow if name == min(REWRITTEN) else pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=[marked(name) for name in [*FAMILIES, "smollm2"]])
def family(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    return request.param, family_tokenizer(request.param)


def opened(name: str) -> tuple[Tokenizer, ChatFormat]:
    made = family_tokenizer(name)
    return made, open_format(made)


def test_a_family_is_exact_with_what_it_has_on_the_hub(family: tuple[str, Tokenizer]) -> None:
    name, made = family
    chat = open_format(made)
    if name in FAMILIES and name != "smollm3":  # its template knows of no tools
        assert chat.name == f"template:{FAMILIES[name].syntax}"
    report = check_format(chat, made, conversations=2, seed=len(name))
    assert report.passed, [check for check in report.checks if check.outcome is Outcome.FAILED]
    if name in REWRITTEN:
        (agreement,) = check_format(chat, made, conversations=8, only=["template agreement"]).checks
        assert agreement.outcome is Outcome.REWRITES
        assert REWRITTEN[name] in agreement.seen


@pytest.mark.exhaustive
def test_a_template_with_a_place_for_images_of_tools_is_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, chat = opened("qwen3.5")
    (images,) = check_format(chat, made, only=["images"]).checks
    assert images.outcome is Outcome.PASSED
    extension = chat.extension
    monkeypatch.setattr(
        chat,
        "extension",
        lambda prompt, sampled, new, tools=(): extension(
            prompt, sampled, [replace(message, images=message.images[1:]) for message in new], tools
        ),
    )
    (images,) = check_format(chat, made, only=["images"]).checks
    assert images.outcome is Outcome.FAILED
    assert "1 images with '42' became" in images.seen


def test_hostile_text_forges_and_loses_nothing(family: tuple[str, Tokenizer]) -> None:
    """In `make test`, with the quick families alone, a tenth of a percent of `make drift`."""
    found = drift(*family, turns=100 // len(QUICK) + 1, seed=1)
    assert found.clean, found


@pytest.mark.slow
def test_a_turn_of_gpt_oss_thinks_and_calls_before_it_stops() -> None:
    made, chat = opened("gpt-oss")
    assert [made.decode([number]) for number in chat.stop_token_ids] == ["<|return|>", "<|call|>", "<|endoftext|>"]
    sampled = made.encode(
        "<|channel|>analysis<|message|>Count.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.code_interpreter <|constrain|>json<|message|>{"code": "1"}<|call|>'
    )
    assert not set(sampled[:-1]) & set(chat.stop_token_ids)
    turn = chat.parse(sampled, [CODE_TOOL])
    assert (turn.reasoning, [(call.name, call.arguments) for call in turn.calls]) == (
        "Count.",
        [("code_interpreter", '{"code": "1"}')],
    )
    added = chat.decode(chat.extension([], sampled, [ANSWER], [CODE_TOOL]))
    assert added == (
        '<|start|>functions.code_interpreter to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant'
    )
    cut_off = chat.decode(chat.extension([], sampled[:-1], [ANSWER], [CODE_TOOL]))
    assert cut_off == f"<|call|>{added}"


@pytest.mark.slow
def test_an_answer_of_gpt_oss_needs_the_name_of_its_tool() -> None:
    _, chat = opened("gpt-oss")
    with pytest.raises(ChatError, match="needs the name of the tool that answered"):
        chat.extension([], [], [Message("tool", "42", tool_call_id="call_0")])


@pytest.mark.slow
def test_a_call_of_gemma_stops_where_the_answer_begins() -> None:
    made, chat = opened("gemma-4")
    assert made.special_tokens["<|tool_response>"] in chat.stop_token_ids
    sampled = made.encode('<|tool_call>call:code_interpreter{code:<|"|>1<|"|>}<tool_call|><|tool_response>')
    assert [call.arguments for call in chat.parse(sampled, [CODE_TOOL]).calls] == ['{"code":"1"}']
    added = chat.decode(chat.extension([], sampled, [ANSWER], [CODE_TOOL]))
    assert added.startswith("response:code_interpreter{")
