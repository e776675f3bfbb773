"""The kit that holds any chat format to its contract; `toolyard chat check` runs it."""

from __future__ import annotations

from toolyard.chat.conformance.conversations import CODE_TOOL
from toolyard.chat.conformance.kit import check_format
from toolyard.chat.conformance.report import Check, Outcome, Report

__all__ = ["CODE_TOOL", "Check", "Outcome", "Report", "check_format"]
