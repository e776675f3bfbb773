"""Conversations for the conformance kit: what tasks, tools and models say, and what they should not."""

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
    said: Message
    """The turn as a message, for rendering it again."""
    sampled: list[int]
    new: tuple[Message, ...]
    plain: bool
    """What a well-behaved model samples: no format may refuse to go on from there."""


@dataclass(frozen=True, slots=True)
class Talk:
    messages: tuple[Message, ...]
    turns: tuple[TurnTaken, ...]
    tools: Tools


@dataclass
class Conversation:
    """Makes them up. `wild`: with text that looks like special tokens, and turns that are cut off or make no sense.

    `sample`: a turn with that word in it, as a well-behaved model would sample it before these messages; and what of
    the message is in it.
    """

    tokenizer: Tokenizer
    stops: tuple[int, ...]
    sample: Callable[[str, Message, Sequence[Message]], tuple[list[int], Message]]
    chance: random.Random
    wild: bool

    def talk(self) -> Talk:
        messages = [Message("user", self._said())]
        roles = self.chance.choice(((), (), ("system",), ("system",), ("developer",), ("system", "developer")))
        messages[:0] = [Message(role, self._said()) for role in roles]
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
        new = self._new(index)
        calls = tuple(
            ToolCall(message.tool_call_id or "", CODE_TOOL.function.name, self._arguments(word))
            for message in new
            if message.role == "tool"
        )
        thought = f"Hm, {word}?" if self.chance.random() < 0.3 else None
        said = Message("assistant", text if not calls or self.chance.random() < 0.2 else "", thought, calls)
        if not self.wild or self.chance.random() < 0.3:
            sampled, said = self.sample(word, said, new)
            return TurnTaken(word, said, sampled, new, plain=True)
        sampled = self._sampled_wildly(self.tokenizer.encode(text, special=False))
        return TurnTaken(word, said, sampled, new, plain=False)

    def _arguments(self, word: str) -> str:
        # Not always as a template would write them.
        given = {"code": f"print({self.chance.randrange(99)}, 'é')  # {word}"}
        return json.dumps(given, ensure_ascii=False, separators=self.chance.choice(((",", ":"), None, None)))

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


def _call(number: int, code: str = "print(6 * 7)") -> ToolCall:
    return ToolCall(f"call00{number:03}", CODE_TOOL.function.name, json.dumps({"code": code}))


def _answer(number: int, content: str = "42") -> Message:
    return Message("tool", content, tool_call_id=f"call00{number:03}", name=CODE_TOOL.function.name)


def cases(hostile: str) -> dict[str, tuple[Message, ...]]:
    """One conversation of each kind, by name. `hostile`: texts of special tokens."""
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
