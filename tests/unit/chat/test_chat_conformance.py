"""The conformance kit finds the defects it is meant to find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from chat_models import TINY
from toolyard.chat.conformance import ConformanceReport, Outcome, check_format
from toolyard.chat.protocol import Ids, ParsedTurn, Tools
from toolyard.chat.template import TemplateFormat
from toolyard.messages import Message
from toolyard.testing.engine.byte_tokenizer import ByteTokenizer

MADE = ByteTokenizer()


class Good(TemplateFormat):
    def __init__(self) -> None:
        super().__init__(MADE, TINY)


def failed(chat: TemplateFormat, tokenizer: Any = MADE) -> set[str]:
    report = check_format(chat, tokenizer, conversations=20)
    return {check.name for check in report.checks if check.outcome is Outcome.FAILED}


def test_a_good_format_passes_every_check() -> None:
    report = check_format(Good(), MADE, conversations=20)
    outcomes = {check.name: check.outcome for check in report.checks}
    for name in ("thinking", "images"):  # the template has no place for them
        assert outcomes.pop(name) is Outcome.NOT_APPLICABLE
    assert set(outcomes.values()) == {Outcome.PASSED}
    assert all(check.claim and check.seen for check in report.checks)
    assert report.passed


def test_the_same_seed_gives_the_same_report() -> None:
    first, again = (check_format(Good(), MADE, seed=7, conversations=5) for _ in range(2))
    assert first == again


class RendersAgain(Good):
    """What most rollout code does: decode the sampled tokens, strip the text, render everything again."""

    def extend(
        self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        said = self.decode(sampled_ids).removesuffix("<|im_end|>").strip()
        return [*prompt_ids, *MADE.encode(said), *self.extension(prompt_ids, [], new_messages, tools)]


class Echoes(Good):
    def extension(self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Any, tools: Tools = ()) -> list[int]:
        return [*sampled_ids, *super().extension(prompt_ids, sampled_ids, new_messages, tools)]


class LosesMessages(Good):
    def extension(self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Any, tools: Tools = ()) -> list[int]:
        return super().extension(prompt_ids, sampled_ids, new_messages[-1:], tools)


class NeverCloses(Good):
    def extension(self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Any, tools: Tools = ()) -> list[int]:
        return super().extension(prompt_ids, self.stop_token_ids, new_messages, tools)


class Believes(Good):
    """Encodes contents as if they were the template's."""

    def __init__(self) -> None:
        super().__init__()
        self._guard.hide_message = lambda message: message  # type: ignore[method-assign]


class WrongStop(Good):
    def __init__(self) -> None:
        super().__init__()
        self.stop_token_ids = (256,)
        self._stops = frozenset(self.stop_token_ids)


class Deaf(Good):
    def parse(self, sampled_ids: Ids, tools: Tools = ()) -> ParsedTurn:
        return ParsedTurn(self.decode(sampled_ids))


@pytest.mark.parametrize(
    ("broken", "names"),
    [
        (RendersAgain, {"exact prefix"}),
        (Echoes, {"mask ownership", "closing", "template agreement"}),
        (LosesMessages, {"mask ownership", "template agreement"}),
        (NeverCloses, {"closing"}),
        (Believes, {"text stays text"}),
        (WrongStop, {"stop tokens"}),
        (Deaf, {"calls", "rendered calls"}),
    ],
)
def test_a_broken_format_fails_where_it_is_broken(broken: type[TemplateFormat], names: set[str]) -> None:
    assert names <= failed(broken())


def test_the_first_difference_is_shown_decoded() -> None:
    report: ConformanceReport = check_format(RendersAgain(), MADE, conversations=20)
    seen = next(check.seen for check in report.checks if check.name == "exact prefix")
    assert "the prompt does not extend the last, at token" in seen


def test_a_format_whose_turns_end_in_text_is_judged_by_the_rest() -> None:
    plain = ByteTokenizer(chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    report = check_format(TemplateFormat(plain, TINY), plain, conversations=5)
    assert report.passed
    assert "turns end in text" in next(check.seen for check in report.checks if check.name == "closing")


CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}ASSISTANT{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.mark.parametrize(
    ("assistant", "named"),
    [
        ("{{- m.content }}{%- if not last %}{{- '  ' }}{%- endif %}", "white space is added or stripped"),
        ("{%- if last %}{{- '<think>\n\n</think>' }}{%- endif %}{{- m.content }}", "thinking is cut or added"),
        ("{{- m.content if last else 'He spoke.' }}", "earlier messages are moved or left out"),
    ],
)
def test_what_a_template_rewrites_in_the_history_is_named_and_no_failure(assistant: str, named: str) -> None:
    last = "{%- set last = loop.index0 >= messages | length - 4 %}"
    made = ByteTokenizer(chat_template=CHATML.replace("ASSISTANT", last + assistant))
    report = check_format(TemplateFormat(made, TINY), made, conversations=5)
    agreement = next(check for check in report.checks if check.name == "template agreement")
    assert agreement.outcome is Outcome.REWRITES
    assert named in agreement.seen
    assert "for example, at token" in agreement.seen


def test_rendering_differently_from_transformers_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Good()
    encode = chat._guard.encode
    monkeypatch.setattr(chat._guard, "encode", lambda text: encode(text.replace("six", "five")))
    report = check_format(chat, MADE, conversations=1, only=["transformers"])
    assert report.checks[0].outcome is Outcome.FAILED
    assert "transformers renders it differently, at token" in report.checks[0].seen
