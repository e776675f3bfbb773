"""Text stays text.

A program may print `<|im_end|>\\n<|im_start|>system`, and a task may quote it. Such text is *hidden* before a template
gets it, that is replaced by private characters that no template touches, and comes back when the rendered text is
encoded: as the letters it is made of, between tokens that the template itself wrote. Text without any of it, nearly
all, is encoded in one go.
"""

from __future__ import annotations

import re
from typing import Any

from toolyard.chat.protocol import Tokenizer, Tools
from toolyard.messages import Message, ToolCall

_ESCAPE = "\U000ffffd"
_FIRST = 0xF0000
_HIDDEN = re.compile(f"{_ESCAPE}(.)", re.DOTALL)


class Guard:
    """Hides the texts of special tokens, and encodes what was rendered from hidden text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = sorted((text for text in tokenizer.special_tokens if text), key=len, reverse=True)
        self._numbers = {text: chr(_FIRST + index) for index, text in enumerate(self._texts)} | {_ESCAPE: _ESCAPE}
        self._forgeable = re.compile("|".join(map(re.escape, [_ESCAPE, *self._texts])))
        added = sorted({*getattr(tokenizer, "added_tokens", ()), *self._texts}, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, filter(None, added)))})" if added else "(?!)()")
        tokenizer.encode("", special=False)  # makes a second tokenizer: half a second now, or of a running event loop

    def hide(self, text: str) -> str:
        """For a template. What comes back from `encode` is the text, never a special token."""
        return self._forgeable.sub(self._hidden, text) if self._forgeable.search(text) else text

    def hide_all(self, value: Any) -> Any:
        """The same in everything that JSON can hold, keys included. Returns the value itself if nothing is to hide."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            items: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
            return {self.hide_all(key): self.hide_all(inner) for key, inner in items.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide_all(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    def hide_message(self, message: Message) -> Message:
        """In everything that it says, its role included: data sets bring their own."""
        said = (message.role, message.content, message.reasoning_content, message.tool_call_id, message.name)
        called = tuple(part for call in message.tool_calls for part in (call.id, call.name, call.arguments))
        if not self._forgeable.search("\0".join(filter(None, (*said, *called)))):
            return message
        role, content, reasoning, number, name = (part and self.hide(part) for part in said)
        calls = tuple(
            ToolCall(self.hide(call.id), self.hide(call.name), self.hide(call.arguments)) for call in message.tool_calls
        )
        return Message(role or "", content or "", reasoning, calls, number, name, message.images)

    def hide_tools(self, tools: Tools) -> Tools:
        """In their schemas: an MCP server describes its tools as it likes."""
        if not any(self._forgeable.search(tool.model_dump_json()) for tool in tools):
            return tools
        return [type(tool).model_validate(self.hide_all(tool.model_dump(mode="json"))) for tool in tools]

    def show(self, text: str) -> str:
        """The text that was hidden."""
        return _HIDDEN.sub(self._shown, text) if _ESCAPE in text else text

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text: special tokens where the template wrote them, text where it was hidden."""
        if _ESCAPE not in text:
            return self._tokenizer.encode(text)
        ids: list[int] = []
        tokens = ""
        for piece in self._tokens.split(text):
            if _ESCAPE not in piece:
                tokens += piece
                continue
            ids.extend(self._tokenizer.encode(tokens) if tokens else ())
            ids.extend(self._tokenizer.encode(self.show(piece), special=False))
            tokens = ""
        ids.extend(self._tokenizer.encode(tokens) if tokens else ())
        return ids

    def _hidden(self, match: re.Match[str]) -> str:
        return _ESCAPE + self._numbers[match[0]]

    def _shown(self, match: re.Match[str]) -> str:
        index = ord(match[1]) - _FIRST
        return self._texts[index] if 0 <= index < len(self._texts) else match[1]
