"""The interface of chat formats.

Sampled tokens are never rendered again: a conversation grows by *extending* its ids, so that a model is trained on
exactly the tokens that it sampled and saw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from toolyard.messages import Message, OpenAIFunctionToolSchema

Ids = Sequence[int]
Tools = Sequence[OpenAIFunctionToolSchema]

TOOL_WRAPPER = "<tool_response>\n{}\n</tool_response>"
"""Wraps a tool's answer if the template has no role for tools."""


class Tokenizer(Protocol):
    """The part of a tokenizer that formats need; see `toolyard.chat.tokenizers.opening`."""

    @property
    def name(self) -> str:
        """The model it belongs to: a hub id or a path."""
        ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_tokens(self) -> dict[str, int]:
        """Every token that text must not be able to forge, by its text."""
        ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encode `text`, adding nothing. `special`: the text of a special token becomes that token; otherwise it stays
        text."""
        ...

    def decode(self, ids: Ids) -> str:
        """Decode all ids; special tokens become their text."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A well-formed call. Whether the tool exists and takes these arguments is checked elsewhere."""

    name: str
    arguments: str
    """A JSON object."""
    id: str | None = None
    """The model's own id, if the format has one."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """An attempted call that cannot be parsed."""

    text: str
    why: str
    """The reason, in words that the model can act on."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The content of a sampled turn."""

    text: str
    """Without reasoning, calls and stop tokens."""
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    near_misses: tuple[MalformedCall, ...] = ()
    """Text that looks like a call but is not in this format; it is part of `text`. Only searched for if there are
    tools and the turn has neither calls nor malformed calls."""


class CallSyntax(Protocol):
    """How calls are written as text."""

    @property
    def name(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn, besides its stop tokens, because they complete a call."""
        ...

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        """Parse a whole turn, without its stop token. Never raises, and takes time linear in the text. `tools` give the
        types of values if the syntax writes all of them as text."""
        ...

    def introduce(self, tools: Tools) -> str:
        """Describe the tools for the system message, if the template does not; "" if there are none."""
        ...

    def unoffered(self, tools: Tools) -> dict[str, str]:
        """See `ChatFormat.unoffered`."""
        ...

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Write calls as the model would, so that `parse` finds them again.

        Raises:
            ChatError: the syntax cannot express them.
        """
        ...


class ChatFormat(ABC):
    """How to talk to one model. Created by `toolyard.chat.formats.open_format`; stateless, so requests share it."""

    name: str
    stop_token_ids: tuple[int, ...]
    """The tokens that end an assistant's turn."""
    special_ids: frozenset[int] = frozenset()
    """Tokens that are not text. An engine may stop at one that is not in `stop_token_ids`: the model's own end of
    text."""
    vocab_size: int | None = None
    """Every token id is below this."""
    stop: tuple[str, ...] = ()
    """Strings that also end a turn; they are sampled like any other text."""
    image_token_id: int | None = None
    """Placeholder for an image, one per image; a server's processor expands it to as many tokens as the image needs.
    None: the format does not support images and refuses messages that have some."""
    reads_prompt: bool = True
    """Whether `extension` uses the prompt. If not, callers may pass an empty one instead of copying it every turn."""

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of a whole conversation, up to where the assistant's turn starts.

        Raises:
            ChatError: the format cannot express it.
        """

    @abstractmethod
    def extension(
        self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        """Return the ids to append to `prompt_ids + sampled_ids` so that `new_messages` (from tools or users) follow
        and the next assistant turn starts. Closes the sampled turn first if it did not end with its stop token.

        The time depends on the new messages, not on the conversation, if the format allows it.

        Raises:
            ChatError: the format cannot express it without changing what was sampled.
        """

    def extend(
        self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        """Return the next prompt: it starts with exactly `prompt_ids + sampled_ids`."""
        return [*prompt_ids, *sampled_ids, *self.extension(prompt_ids, sampled_ids, new_messages, tools)]

    @abstractmethod
    def parse(self, sampled_ids: Ids, tools: Tools = ()) -> ParsedTurn:
        """Parse a sampled turn. Never raises for what a model sampled."""

    def unoffered(self, tools: Tools) -> dict[str, str]:
        """Return the tools that this format does not show to the model, or that the model cannot call, with the reason.
        A format that can call only one tool includes that tool if it is missing from `tools`. Empty if all tools can
        be called, or there are none."""
        return {}

    @abstractmethod
    def decode(self, ids: Ids) -> str:
        """Decode for people: special tokens become their text."""

    @abstractmethod
    def count(self, text: str) -> int:
        """Return the number of tokens in `text`, for limits."""
