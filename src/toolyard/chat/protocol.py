"""What a chat format is.

Sampled tokens are never rendered again: a conversation grows by *extending* the ids it has, so that what a model is
trained on is what it sampled and what it saw, to the token.
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
"""Around what a tool answered, where a template has no role for tools."""


class Tokenizer(Protocol):
    """The part of a tokenizer that formats need; see `toolyard.chat.tokenizers.opening`."""

    @property
    def name(self) -> str:
        """The model it belongs to: a hub id, or a path."""
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
        """Ids of `text`, with nothing added. `special`: the text of a special token becomes that token; without, it
        stays text, whatever it looks like."""
        ...

    def decode(self, ids: Ids) -> str:
        """All of it, special tokens as their text."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that can be made. Whether the tool and its arguments make sense is the tool's to say."""

    name: str
    arguments: str
    """JSON of an object."""
    id: str | None = None
    """The model's own, where the format has one."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """The model meant to call something, and nobody can tell what."""

    text: str
    why: str
    """In words that the model can act on."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What the sampled tokens say."""

    text: str
    """Without reasoning, calls and stop tokens."""
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    near_misses: tuple[MalformedCall, ...] = ()
    """Looks like a call, but is not written as this format writes calls; it is part of the text. Only looked for in
    turns with neither calls nor malformed ones, and if there are tools."""


class CallSyntax(Protocol):
    """How calls are written in text, for formats that are read as text."""

    @property
    def name(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts at which a turn ends besides its stop tokens, because a call is complete there."""
        ...

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        """Of a whole turn, without its stop token. Total: it never raises, and takes time linear in the text. `tools`
        tell values apart where the syntax writes all of them as text."""
        ...

    def introduce(self, tools: Tools) -> str:
        """For the system message, where the tokenizer's template says nothing about tools; "" if there are none."""
        ...

    def unoffered(self, tools: Tools) -> dict[str, str]:
        """See `ChatFormat.unoffered`."""
        ...

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Calls as the model would write them, such that `parse` finds them again.

        Raises:
            ChatError: the syntax cannot express them.
        """
        ...


class ChatFormat(ABC):
    """How one model is spoken to. Made by `toolyard.chat.formats.open_format`; without state, so shared by requests."""

    name: str
    stop_token_ids: tuple[int, ...]
    """The tokens that end an assistant's turn."""
    special_ids: frozenset[int] = frozenset()
    """Tokens that are no text. An engine may stop at one that is not in `stop_token_ids`: the model's own end of
    text."""
    vocab_size: int | None = None
    """Every token is below this."""
    stop: tuple[str, ...] = ()
    """Texts that end it as well; they are sampled like any other."""
    image_token_id: int | None = None
    """Stands for an image, once for each; a server's processor puts as many in its place as the image needs. None: the
    format has no place for images, and refuses messages that have some."""
    reads_prompt: bool = True
    """Whether `extension` looks at the prompt. If not, callers may pass none, and need not copy it for every turn."""

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a whole conversation, up to where the assistant begins to speak.

        Raises:
            ChatError: the format cannot say this.
        """

    @abstractmethod
    def extension(
        self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        """The ids to append to `prompt_ids + sampled_ids` so that `new_messages` (of tools or users) follow, and the
        assistant begins to speak again. Closes the sampled turn first if it did not end with its stop token.

        The time it takes depends on the new messages, not on the conversation, where the format allows it.

        Raises:
            ChatError: the format cannot say this without changing what was sampled.
        """

    def extend(
        self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        """The next prompt: it starts with `prompt_ids + sampled_ids`, exactly."""
        return [*prompt_ids, *sampled_ids, *self.extension(prompt_ids, sampled_ids, new_messages, tools)]

    @abstractmethod
    def parse(self, sampled_ids: Ids, tools: Tools = ()) -> ParsedTurn:
        """What a sampled turn says. Never raises for what a model sampled."""

    def unoffered(self, tools: Tools) -> dict[str, str]:
        """The tools that a model is not told of, or cannot call, when it is spoken to in this format with `tools`: the
        name of each, and why. A format that can call only one tool names that one as well, if it is not among `tools`.
        Empty if all is well, or there are no tools."""
        return {}

    @abstractmethod
    def decode(self, ids: Ids) -> str:
        """For people: special tokens as their text."""

    @abstractmethod
    def count(self, text: str) -> int:
        """How many tokens `text` is; for limits."""
