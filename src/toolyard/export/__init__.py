"""Exports of trajectories as data sets for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.export.conversations import Conversation, LeftOut, conversation_of
    from toolyard.export.sft import SftRules, SftSummary, write_sft

__all__ = ["Conversation", "LeftOut", "SftRules", "SftSummary", "conversation_of", "write_sft"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.export.conversations": "Conversation LeftOut conversation_of",
        "toolyard.export.sft": "SftRules SftSummary write_sft",
    },
)
