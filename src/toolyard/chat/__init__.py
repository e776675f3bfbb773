"""Convert between messages and tokens: render, extend, parse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.chat.formats import open_format
    from toolyard.chat.protocol import ChatFormat, MalformedCall, ParsedCall, ParsedTurn, Tokenizer
    from toolyard.chat.tokenizers.opening import load_tokenizer

__all__ = ["ChatFormat", "MalformedCall", "ParsedCall", "ParsedTurn", "Tokenizer", "load_tokenizer", "open_format"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.chat.formats": "open_format",
        "toolyard.chat.protocol": "ChatFormat MalformedCall ParsedCall ParsedTurn Tokenizer",
        "toolyard.chat.tokenizers.opening": "load_tokenizer",
    },
)
