"""Chat formats from a tokenizer's own chat template."""

from __future__ import annotations

from toolyard.chat.template.format import TemplateFormat, native_syntax

__all__ = ["TemplateFormat", "native_syntax"]
