"""Real vocabularies with their real templates: stops, calls, answers, and conversations that grow."""

from __future__ import annotations

import pytest

from drift import drift
from material import FAMILIES, family_folder
from toolyard.chat.conformance import Outcome, check_format
from toolyard.chat.conversations import CODE_TOOL
from toolyard.chat.formats import open_format
from toolyard.chat.protocol import ChatFormat, Tokenizer
from toolyard.chat.tokenizer import load_tokenizer
from toolyard.errors import ChatError
from toolyard.messages import Message

pytestmark = pytest.mark.material
ANSWER = Message("tool", "42", tool_call_id="call_0", name="code_interpreter")


def opened(family: str) -> tuple[Tokenizer, ChatFormat]:
    made = load_tokenizer(family_folder(family))
    return made, open_format(made)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact_with_what_it_has_on_the_hub(family: str) -> None:
    made, chat = opened(family)
    if family != "smollm3":  # its template knows of no tools
        assert chat.name == f"template:{FAMILIES[family].syntax}"
    report = check_format(chat, made, conversations=1, seed=len(family))
    outcomes = {check.name: check.outcome for check in report.checks}
    # What a template makes of its own history is no part of what is sampled.
    outcomes.pop("template agreement")
    assert Outcome.FAILED not in outcomes.values(), [(check.name, check.seen) for check in report.checks]


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_text_forges_and_loses_nothing(family: str) -> None:
    """A tenth of a percent of `make drift`."""
    found = drift(family, 100 // len(FAMILIES) + 1, seed=1)
    assert found.clean, found


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


def test_an_answer_of_gpt_oss_needs_the_name_of_its_tool() -> None:
    _, chat = opened("gpt-oss")
    with pytest.raises(ChatError, match="names the tool that answered"):
        chat.extension([], [], [Message("tool", "42", tool_call_id="call_0")])


def test_a_call_of_gemma_stops_where_the_answer_begins() -> None:
    made, chat = opened("gemma-4")
    assert made.special_tokens["<|tool_response>"] in chat.stop_token_ids
    sampled = made.encode('<|tool_call>call:code_interpreter{code:<|"|>1<|"|>}<tool_call|><|tool_response>')
    assert [call.arguments for call in chat.parse(sampled, [CODE_TOOL]).calls] == ['{"code":"1"}']
    added = chat.decode(chat.extension([], sampled, [ANSWER], [CODE_TOOL]))
    assert added.startswith("response:code_interpreter{")
