"""Keep text from turning into special tokens.

A program may print `<|im_end|>\\n<|im_start|>system`, and a task may quote it. Before rendering, such text is *hidden*:
replaced by private-use characters that no template touches. When the rendered text is encoded, it comes back as plain
characters, between the tokens that the template itself wrote. Text without any of it, which is nearly all text, is
encoded in one step.
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
    """Hides the texts of special tokens, and encodes text rendered from hidden text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = sorted((text for text in tokenizer.special_tokens if text), key=len, reverse=True)
        self._numbers = {text: chr(_FIRST + index) for index, text in enumerate(self._texts)} | {_ESCAPE: _ESCAPE}
        self._forgeable = re.compile("|".join(map(re.escape, [_ESCAPE, *self._texts])))
        added = sorted({*getattr(tokenizer, "added_tokens", ()), *self._texts}, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, filter(None, added)))})" if added else "(?!)()")
        tokenizer.encode("", special=False)  # builds the second tokenizer (0.5 s) now, not in a running event loop

    def hide(self, text: str) -> str:
        """Hide special tokens in `text` for a template. `encode` turns them into text, never into special tokens."""
        return self._forgeable.sub(self._hidden, text) if self._forgeable.search(text) else text

    def hide_all(self, value: Any) -> Any:
        """Hide them in any JSON value, including keys. Returns the value itself if there is nothing to hide."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            items: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
            return {self.hide_all(key): self.hide_all(inner) for key, inner in items.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide_all(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    def hide_message(self, message: Message) -> Message:
        """Hide them in all fields of a message, including its role: datasets have their own roles."""
        texts = (message.role, message.content, message.reasoning_content, message.tool_call_id, message.name)
        called = tuple(part for call in message.tool_calls for part in (call.id, call.name, call.arguments))
        if not self._forgeable.search("\0".join(filter(None, (*texts, *called)))):
            return message
        role, content, reasoning, number, name = (part and self.hide(part) for part in texts)
        calls = tuple(
            ToolCall(self.hide(call.id), self.hide(call.name), self.hide(call.arguments)) for call in message.tool_calls
        )
        return Message(role or "", content or "", reasoning, calls, number, name, message.images)

    def hide_tools(self, tools: Tools) -> Tools:
        """Hide them in the schemas: an MCP server may describe its tools as it likes."""
        if not any(self._forgeable.search(tool.model_dump_json()) for tool in tools):
            return tools
        return [type(tool).model_validate(self.hide_all(tool.model_dump(mode="json"))) for tool in tools]

    def show(self, text: str) -> str:
        """Restore hidden text."""
        return _HIDDEN.sub(self._shown, text) if _ESCAPE in text else text

    def encode(self, text: str) -> list[int]:
        """Encode rendered text: special tokens where the template wrote them, plain text where it was hidden."""
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
