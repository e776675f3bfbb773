"""Tokenizers, from a folder or by a model's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.chat.tokenizers.opening import load_tokenizer

__all__ = ["load_tokenizer"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.chat.tokenizers.opening": "load_tokenizer",
    },
)
