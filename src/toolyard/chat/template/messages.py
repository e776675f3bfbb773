"""Convert conversations to what a template supports."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolyard.chat.protocol import CallSyntax, ParsedCall, Tools
from toolyard.chat.template.probe import SHORT_ID, Traits
from toolyard.messages import JSON, Message, developer_as_system

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Converts messages to the template's input."""

    traits: Traits
    syntax: CallSyntax
    native: bool
    """Whether the template presents tools and writes calls as `syntax` does."""
    tool_as_user: bool
    tool_wrapper: str

    def conversation(self, messages: Sequence[Message], tools: Tools) -> list[JSON]:
        """Convert a conversation from its start."""
        converted = list(messages) if self.traits.developer else developer_as_system(messages)
        introduction = "" if self.shows_tools else self.syntax.introduce(tools)
        if introduction:
            converted = _introduced(converted, introduction)
        if not self.traits.system and converted and converted[0].role == "system":
            converted = _system_as_user(converted)
        return self.following(converted)

    def following(self, messages: Sequence[Message]) -> list[JSON]:
        """Convert messages that follow others."""
        adapted: list[JSON] = []
        merging = False
        for message in messages:
            as_user = message.role == "tool" and self.tool_as_user
            one = self._one(message)
            before = adapted[-1]["role"] if adapted else None
            # Results of parallel calls go into one message, as in templates that support tools.
            if one["role"] == "user" == before and ((as_user and merging) or self.traits.alternates):
                adapted[-1]["content"] += ("\n" if as_user and merging else "\n\n") + one["content"]
                if "images" in one:
                    adapted[-1]["images"] = adapted[-1].get("images", 0) + one["images"]
            else:
                adapted.append(one)
            merging = as_user
        return adapted

    @property
    def shows_tools(self) -> bool:
        return self.native and self.traits.tools

    def _one(self, message: Message) -> JSON:
        if message.images:
            return {**self._one(replace(message, images=())), "images": len(message.images)}
        if message.role == "tool" and self.tool_as_user:
            return {"role": "user", "content": self.tool_wrapper.replace("{}", message.content)}
        if message.tool_calls and not (self.native and self.traits.calls):
            calls = [ParsedCall(call.name, call.arguments, call.id) for call in message.tool_calls]
            written = self.syntax.write(calls)
            content = f"{message.content}\n{written}" if message.content else written
            message = replace(message, content=content, tool_calls=())
        converted = message.as_openai(decoded=not self.traits.text_arguments)
        if "reasoning_content" in converted and self.traits.reasoning:
            converted[self.traits.reasoning] = converted.pop("reasoning_content")
        if self.traits.short_ids:
            _shorten(converted)
        return converted


def _introduced(messages: list[Message], introduction: str) -> list[Message]:
    if messages and messages[0].role == "system":
        content = messages[0].content
        introduced = replace(messages[0], content=f"{content}\n\n{introduction}" if content else introduction)
        return [introduced, *messages[1:]]
    return [Message("system", introduction), *messages]


def _system_as_user(messages: list[Message]) -> list[Message]:
    system, rest = messages[0], messages[1:]
    if rest and rest[0].role == "user":
        return [replace(rest[0], content=f"{system.content}\n\n{rest[0].content}"), *rest[1:]]
    return [Message("user", system.content), *rest]


def _shorten(converted: JSON) -> None:
    if "tool_call_id" in converted:
        converted["tool_call_id"] = short_id(converted["tool_call_id"])
    for call in converted.get("tool_calls", ()):
        call["id"] = short_id(call["id"])


def short_id(given: str) -> str:
    """Return nine letters and digits, always the same for one id."""
    if SHORT_ID.fullmatch(given):
        return given
    letters = given.encode("utf-8", "replace")
    number = zlib.crc32(letters) | zlib.adler32(letters) << 32
    digits = ""
    for _ in range(9):
        number, digit = divmod(number, 62)
        digits += _DIGITS[digit]
    return digits
