"""A tokenizer that needs no download: one token per byte, plus ChatML's special tokens.

For tests and benchmarks: it is exact, fast, and the same everywhere. Its template is that of many small models: all
roles are rendered the same way, and tools are not mentioned.
"""

from __future__ import annotations

import re

from toolyard.chat.protocol import Ids

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
_PATTERN = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ByteTokenizer:
    """A `toolyard.chat.protocol.Tokenizer`: ids 0 to 255 are bytes, 256 and up the special tokens."""

    def __init__(self, *, name: str = "bytes", chat_template: str | None = CHATML) -> None:
        self.name = name
        self.chat_template = chat_template
        self.added_tokens = {token: 256 + index for index, token in enumerate(SPECIALS)}
        self.special_tokens = {token: number for token, number in self.added_tokens.items() if "|" in token}
        self.template_variables = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
        self.eos_token_id: int | None = self.added_tokens["<|im_end|>"]
        self._bytes = [bytes([number]) for number in range(256)] + [token.encode() for token in SPECIALS]

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if not special or "<" not in text:
            return list(text.encode("utf-8", "replace"))
        ids: list[int] = []
        for index, piece in enumerate(_PATTERN.split(text)):
            ids.extend([self.added_tokens[piece]] if index % 2 else piece.encode("utf-8", "replace"))
        return ids

    def decode(self, ids: Ids) -> str:
        """Invalid UTF-8 becomes U+FFFD; unknown ids are skipped."""
        known = self._bytes
        return b"".join([known[number] for number in ids if 0 <= number < len(known)]).decode("utf-8", "replace")
