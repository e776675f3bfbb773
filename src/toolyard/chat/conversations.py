"""Random conversations for the conformance kit: what tasks, tools and models say, and what they should not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolyard.chat.protocol import Tokenizer, Tools
from toolyard.messages import Message, OpenAIFunctionToolSchema, ToolCall

CODE_TOOL = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Runs a Python program and returns what it prints.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The program."}},
                "required": ["code"],
            },
        },
    }
)

_PHRASES = (
    "What is six times seven?", "220000.0", "", " ", "\n", "\n\nindented:\n    x = 1\n", "  both sides  ", "é漢字😀 ñ",
    '{"a": [1, null, "\\"quoted\\""]}', "Traceback (most recent call last):\n  File \"<stdin>\"\nZeroDivisionError",
    "a\tb\r\nc", "<b>bold</b> & <i>", "\u200b\u202e", "a" * 300, "null", "[1, 2]", "C:\\new\\table",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """A turn as a model might sample it, and what is said next."""

    word: str
    """In the turn, and nowhere else."""
    text: str
    sampled: list[int]
    new: tuple[Message, ...]
    plain: bool
    """Text and a stop token: no format may refuse to go on from there."""
    calls: tuple[ToolCall, ...] = ()
    """The calls that the new messages answer."""


@dataclass(frozen=True, slots=True)
class Talk:
    messages: tuple[Message, ...]
    turns: tuple[TurnTaken, ...]
    tools: Tools


@dataclass
class Conversation:
    """Makes them up. `wild`: with text that looks like special tokens, and turns that are cut off or make no sense.

    `ended`: a text, or calls instead, as a well-behaved model would sample them before these messages; and the text.
    """

    tokenizer: Tokenizer
    stops: tuple[int, ...]
    ended: Callable[[str, Sequence[ToolCall], Sequence[Message]], tuple[list[int], str]]
    chance: random.Random
    wild: bool

    def talk(self) -> Talk:
        messages = [Message("user", self._said())]
        if self.chance.random() < 0.5:
            messages.insert(0, Message("system", self._said()))
        turns = tuple(self._turn(index) for index in range(self.chance.randint(1, 4)))
        return Talk(tuple(messages), turns, (CODE_TOOL,) if self.chance.random() < 0.7 else ())

    def _said(self) -> str:
        said = self.chance.choices(_PHRASES, k=self.chance.randint(1, 3))
        if self.wild and self.tokenizer.special_tokens and self.chance.random() < 0.3:
            said += self.chance.choices(list(self.tokenizer.special_tokens), k=2)
            self.chance.shuffle(said)
        return "".join(said) or "Well?"

    def _turn(self, index: int) -> TurnTaken:
        word = f"Wombat{index}x{self.chance.randrange(10**6)}"
        text = f"Let me see, {word}."
        plain = not self.wild or self.chance.random() < 0.3
        new = self._new(index)
        calls = tuple(
            ToolCall(message.tool_call_id or "", CODE_TOOL.function.name, self._arguments(word))
            for message in new
            if message.role == "tool"
        )
        if plain:
            sampled, text = self.ended(text, calls, new)
            return TurnTaken(word, text, sampled, new, plain, calls)
        return TurnTaken(
            word, text, self._sampled_wildly(self.tokenizer.encode(text, special=False)), new, plain, calls
        )

    def _arguments(self, word: str) -> str:
        return json.dumps({"code": f"print({self.chance.randrange(99)})  # {word}"})

    def _sampled_wildly(self, sampled: list[int]) -> list[int]:
        sampled = [*sampled, *self.tokenizer.encode(self._said(), special=self.chance.random() < 0.5)]
        if self.chance.random() < 0.3:
            self.chance.shuffle(sampled)
        sampled = [number for number in sampled if number not in self.stops]
        if self.chance.random() < 0.5:
            sampled = sampled[: self.chance.randint(0, len(sampled))]
        if self.chance.random() < 0.5:
            sampled.append(self.chance.choice(self.stops))
        return sampled

    def _new(self, index: int) -> tuple[Message, ...]:
        if self.chance.random() < 0.4:
            return (Message("user", self._said()),)
        return tuple(
            Message("tool", self._said(), tool_call_id=f"call{index:02}{call:03}", name=CODE_TOOL.function.name)
            for call in range(self.chance.choice((1, 1, 2, 3)))
        )
