"""The chat templates of 70 real models: which open, in which syntax they call, and whether their calls are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat_models import open_template
from material import missing, template_files
from toolyard.chat.conformance import Outcome, check_format
from toolyard.errors import ToolyardError

pytestmark = pytest.mark.material

NO_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip
"""They know of no tools: these are introduced in the system message, in hermes' syntax."""
REFUSED = {
    "GigaChat3-10B-A1.8B": "in no known syntax",
    "meetkai-functionary-medium-v3.2": "in no known syntax",
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "upstage-Solar-Open-100B": "also occurs within turns",
}
LOSSY = {"LFM2.5-8B-A1B"}
"""They write texts in quotes without escaping what is in them."""


def names() -> list[str]:
    return [Path(file).stem for file in template_files()] if missing() is None else ["none"]


@pytest.mark.parametrize("name", names())
def test_a_real_template_opens_and_its_calls_are_read(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(ToolyardError, match=REFUSED[name]):
            open_template(name)
        return
    made, chat = open_template(name)
    if name in NO_TOOLS:
        assert not chat.traits.tools
        assert not chat.traits.calls
        assert chat.name == "template:hermes"
    report = check_format(chat, made, conversations=1, only=("calls", "rendered calls"))
    outcomes = {check.name: (check.outcome, check.seen) for check in report.checks}
    assert outcomes["calls"][0] is Outcome.PASSED, outcomes["calls"]
    if name not in LOSSY:
        assert outcomes["rendered calls"][0] is Outcome.PASSED, outcomes["rendered calls"]


def test_at_least_sixty_are_opened_and_read() -> None:
    assert len(names()) == 70
    assert len(names()) - len(REFUSED) - len(NO_TOOLS) >= 60
