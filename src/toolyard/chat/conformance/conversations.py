"""Conversations for the conformance kit: plausible and hostile messages of tasks, tools and models."""

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
class SampledTurn:
    """A turn as a model might sample it, and the messages that follow."""

    word: str
    """Occurs in this turn and nowhere else."""
    message: Message
    """The turn as a message, for rendering it again."""
    sampled: list[int]
    new: tuple[Message, ...]
    plain: bool
    """Whether a well-behaved model would sample it: no format may refuse to continue from there."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    turns: tuple[SampledTurn, ...]
    tools: Tools


@dataclass
class ConversationGenerator:
    """Generates conversations. `wild`: include text that looks like special tokens, and turns that are truncated or
    make no sense.

    `sample`: returns a turn with that word, as a well-behaved model would sample it before these messages, and the
    parts of the message that it contains.
    """

    tokenizer: Tokenizer
    stops: tuple[int, ...]
    sample: Callable[[str, Message, Sequence[Message]], tuple[list[int], Message]]
    rng: random.Random
    wild: bool

    def generate(self) -> Conversation:
        messages = [Message("user", self._text())]
        roles = self.rng.choice(((), (), ("system",), ("system",), ("developer",), ("system", "developer")))
        messages[:0] = [Message(role, self._text()) for role in roles]
        turns = tuple(self._turn(index) for index in range(self.rng.randint(1, 4)))
        return Conversation(tuple(messages), turns, (CODE_TOOL,) if self.rng.random() < 0.7 else ())

    def _text(self) -> str:
        phrases = self.rng.choices(_PHRASES, k=self.rng.randint(1, 3))
        if self.wild and self.tokenizer.special_tokens and self.rng.random() < 0.3:
            phrases += self.rng.choices(list(self.tokenizer.special_tokens), k=2)
            self.rng.shuffle(phrases)
        return "".join(phrases) or "Well?"

    def _turn(self, index: int) -> SampledTurn:
        word = f"Wombat{index}x{self.rng.randrange(10**6)}"
        text = f"Let me see, {word}."
        new = self._new(index)
        calls = tuple(
            ToolCall(message.tool_call_id or "", CODE_TOOL.function.name, self._arguments(word))
            for message in new
            if message.role == "tool"
        )
        thought = f"Hm, {word}?" if self.rng.random() < 0.3 else None
        message = Message("assistant", text if not calls or self.rng.random() < 0.2 else "", thought, calls)
        if not self.wild or self.rng.random() < 0.3:
            sampled, message = self.sample(word, message, new)
            return SampledTurn(word, message, sampled, new, plain=True)
        sampled = self._sampled_wildly(self.tokenizer.encode(text, special=False))
        return SampledTurn(word, message, sampled, new, plain=False)

    def _arguments(self, word: str) -> str:
        # Not always spelled as a template would.
        given = {"code": f"print({self.rng.randrange(99)}, 'é')  # {word}"}
        return json.dumps(given, ensure_ascii=False, separators=self.rng.choice(((",", ":"), None, None)))

    def _sampled_wildly(self, sampled: list[int]) -> list[int]:
        sampled = [*sampled, *self.tokenizer.encode(self._text(), special=self.rng.random() < 0.5)]
        if self.rng.random() < 0.3:
            self.rng.shuffle(sampled)
        sampled = [number for number in sampled if number not in self.stops]
        if self.rng.random() < 0.5:
            sampled = sampled[: self.rng.randint(0, len(sampled))]
        if self.rng.random() < 0.5:
            sampled.append(self.rng.choice(self.stops))
        return sampled

    def _new(self, index: int) -> tuple[Message, ...]:
        if self.rng.random() < 0.4:
            return (Message("user", self._text()),)
        return tuple(
            Message("tool", self._text(), tool_call_id=f"call{index:02}{call:03}", name=CODE_TOOL.function.name)
            for call in range(self.rng.choice((1, 1, 2, 3)))
        )


def _call(number: int, code: str = "print(6 * 7)") -> ToolCall:
    return ToolCall(f"call00{number:03}", CODE_TOOL.function.name, json.dumps({"code": code}))


def _answer(number: int, content: str = "42") -> Message:
    return Message("tool", content, tool_call_id=f"call00{number:03}", name=CODE_TOOL.function.name)


def cases(hostile: str) -> dict[str, tuple[Message, ...]]:
    """Return one conversation of each kind, by name. `hostile`: texts of special tokens."""
    user, done = Message("user", "What is six times seven?"), Message("assistant", "It is 42.")
    thanks = Message("user", "And one more?")
    calls, both = (Message("assistant", "", tool_calls=made) for made in ((_call(0),), (_call(0), _call(1, "1 < 2"))))
    return {
        "text": (user, done, thanks),
        "system": (Message("system", "Be brief."), user),
        "developer": (Message("developer", "Be brief."), user),
        "system and developer": (Message("system", "Be brief."), Message("developer", "Use tools."), user),
        "empty text": (Message("system", ""), Message("user", ""), Message("assistant", ""), Message("user", "")),
        "hostile text": (Message("user", hostile), calls, _answer(0, hostile)),
        "a call": (user, calls, _answer(0)),
        "parallel calls": (user, both, _answer(0), _answer(1, "True")),
        "text and a call": (user, Message("assistant", "I count.", tool_calls=(_call(0),)), _answer(0)),
        "several turns": (user, calls, _answer(0), done, thanks, calls, _answer(0), done, thanks),
        "thinking": (user, Message("assistant", "It is 42.", "Count first."), thanks),
        "thinking and a call": (user, Message("assistant", "", "Count first.", (_call(0),)), _answer(0)),
    }
