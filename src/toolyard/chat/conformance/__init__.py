"""The kit that checks any chat format against its contract; `toolyard chat check` runs it."""

from __future__ import annotations

from toolyard.chat.conformance.conversations import CODE_TOOL
from toolyard.chat.conformance.kit import check_format
from toolyard.chat.conformance.report import Check, ConformanceReport, Outcome

__all__ = ["CODE_TOOL", "Check", "ConformanceReport", "Outcome", "check_format"]
