"""Formats of the `renderers` package, which supports many model families.

Its renderers encode contents together with the text around them, so a tool that prints `<|im_end|>` would end its own
turn. They are therefore given a tokenizer of ours: contents are hidden before, and encoded as text after (see `guard`).
By default, reasoning of earlier turns is kept: removing it would change what was sampled.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import renderers
import renderers.base
from renderers import ToolCallParseStatus as Status

from toolyard.chat.guard import Guard
from toolyard.chat.near_misses import with_near_misses
from toolyard.chat.protocol import ChatFormat, Ids, MalformedCall, ParsedCall, ParsedTurn, Tokenizer, Tools
from toolyard.errors import ChatError, ConfigError
from toolyard.messages import JSON, Message, ToolCall, decode_arguments, developer_as_system

_USER = Message("user", "Quokka")
_WHY = {
    Status.INVALID_JSON: "the call is not valid JSON",
    Status.UNCLOSED_BLOCK: "the call is not closed",
    Status.MISSING_NAME: "the call does not name a function",
    Status.MALFORMED_STRUCTURE: "the call is malformed",
}


def family_of(model: str) -> str | None:
    """Return the package's family for a model of that name; None if it is unknown."""
    return renderers.base.MODEL_RENDERER_MAP.get(model)


def families() -> list[str]:
    renderers.base._populate_registry()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - there is no other list
    return sorted(set(renderers.base.RENDERER_REGISTRY) - {"default"})


def open_renderer(
    tokenizer: Tokenizer, family: str | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> RendererFormat:
    """Open the format of `family`; by default, that of the tokenizer's model.

    Raises:
        ConfigError: there is no such family, or the tokenizer lacks tokens that it needs.
    """
    family = family or family_of(tokenizer.name)
    if family is None:
        raise ConfigError(
            f"renderers does not know the model {tokenizer.name!r}; name its family, as in "
            f"renderers:{families()[0]}; available: {', '.join(families())}"
        )
    if family not in families():
        raise ConfigError(f"renderers has no family {family!r}; available: {', '.join(families())}")
    try:
        config: Any = renderers.config_from_name(family)
        config = type(config)(thinking_retention="all")
        renderer: Any = renderers.create_renderer(
            _Encoder(tokenizer), config, chat_template_kwargs=dict(template_kwargs or {})
        )
        return RendererFormat(renderer, tokenizer, family=family)
    except Exception as error:  # assertions about tokens, mostly
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "download" in why or isinstance(error, OSError):
            raise ConfigError(
                f"renderers:{family} needs a file that it could not download: {why}; connect to the network once, or "
                "use format template, which needs none"
            ) from error
        raise ConfigError(
            f"the tokenizer of {tokenizer.name} does not fit renderers:{family}: {why}; format template uses "
            "its own chat template instead"
        ) from error


class RendererFormat(ChatFormat):
    """Renders with a renderer. A turn's cost grows slightly with the conversation, which is copied.

    Created by `open_renderer`: the renderer must use a tokenizer that keeps hidden text hidden.
    """

    def __init__(self, renderer: Any, tokenizer: Tokenizer, *, family: str) -> None:
        self.name = f"renderers:{family}"
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer)
        self.stop_token_ids = tuple(dict.fromkeys(renderer.get_stop_token_ids()))
        self.special_ids = frozenset(tokenizer.special_tokens.values())
        self.vocab_size = tokenizer.vocab_size
        self._stops = frozenset(self.stop_token_ids)
        # Parsers need to know whether the prompt already opened the reasoning.
        self._opening = self.render([_USER])

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        if not messages:
            raise ChatError("a conversation without messages cannot be rendered")
        try:
            return list(
                self._renderer.render_ids(self._convert(messages), tools=self._shown(tools), add_generation_prompt=True)
            )
        except Exception as error:  # of any kind, for roles and orders that the family does not support
            roles = ", ".join(message.role for message in messages)
            raise ChatError(f"{self.name} refuses a conversation of {roles}: {error}") from error

    def extension(
        self, prompt_ids: Ids, sampled_ids: Ids, new_messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        before = [*prompt_ids, *sampled_ids]
        roles = ", ".join(message.role for message in new_messages)
        try:
            bridge: Any = self._renderer.bridge_to_next_turn(
                list(prompt_ids), list(sampled_ids), self._convert(new_messages), tools=self._shown(tools)
            )
        except Exception as error:
            raise ChatError(f"{self.name} cannot continue with {roles}: {error}") from error
        if bridge is None:
            raise ChatError(
                f"{self.name} cannot continue with {roles or 'nothing'} after {self._end_of(before)!r} without "
                "changing what was sampled"
            )
        ids: list[int] = list(bridge.token_ids)
        if ids[: len(before)] != before:
            raise ChatError(f"{self.name} changes what was sampled: {self._difference(before, ids)}")
        return ids[len(before) :]

    def parse(self, sampled_ids: Ids, tools: Tools = ()) -> ParsedTurn:
        try:
            found: Any = self._renderer.parse_response(
                list(sampled_ids), tools=self._shown(tools, hide=False), prompt_ids=self._opening
            )
        except Exception as error:  # a parser that fails on sampled text has found no call
            text = self._tokenizer.decode(sampled_ids)
            return ParsedTurn(text, malformed=(MalformedCall(text, f"the turn cannot be parsed: {error}"),))
        calls: list[ParsedCall] = []
        malformed: list[MalformedCall] = []
        for one in found.tool_calls:
            call = _call_of(one)
            if isinstance(call, ParsedCall):
                calls.append(call)
            else:
                malformed.append(call)
        turn = ParsedTurn(found.content or "", found.reasoning_content or None, tuple(calls), tuple(malformed))
        return with_near_misses(turn, tools, self._write)

    def unoffered(self, tools: Tools) -> dict[str, str]:
        without = self.render([_USER])
        why = f"{self.name} does not show tools to the model; format template introduces them in the system message"
        return {tool.function.name: why for tool in tools if self.render([_USER], [tool]) == without}

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids)

    def count(self, text: str) -> int:
        return len(self._guard.encode(self._guard.hide(text)))

    def _write(self, call: ParsedCall) -> str:
        """Write the call as the family does in the history, without the reasoning before it."""
        made = ToolCall(f"functions.{call.name}:0", call.name, call.arguments)
        converted = self._convert([_USER, Message("assistant", "", tool_calls=(made,))])
        try:
            ids: list[int] = list(self._renderer.render_ids(converted, tools=None, add_generation_prompt=False))
        except Exception as error:
            raise ChatError(f"{self.name} cannot write a call of {call.name!r}: {error}") from error
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(ids, self._opening, strict=False))
        begin = sum(1 for _ in shared)
        end = next((at for at in range(begin, len(ids)) if ids[at] in self._stops), len(ids))
        return self._tokenizer.decode(ids[begin:end]).rpartition("</think>")[2].strip()

    def _convert(self, messages: Sequence[Message]) -> list[JSON]:
        # Most families refuse the developer role, or omit its messages.
        converted = developer_as_system(messages)
        return self._guard.hide_all([message.as_openai(decoded=True) for message in converted])

    def _shown(self, tools: Tools, *, hide: bool = True) -> list[JSON] | None:
        shown = [tool.model_dump(mode="json") for tool in tools]
        return (self._guard.hide_all(shown) if hide else shown) or None

    def _end_of(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids[-12:])

    def _difference(self, before: list[int], after: list[int]) -> str:
        at = next(
            (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
        )
        was, now = (self._tokenizer.decode(ids[at : at + 12]) for ids in (before, after))
        return f"at token {at}, {was!r} becomes {now!r}"


def _call_of(one: Any) -> ParsedCall | MalformedCall:
    # Whether the tool exists is not the parser's concern.
    if one.status not in (Status.OK, Status.UNKNOWN_TOOL):
        return MalformedCall(one.raw, _WHY.get(one.status, f"the call cannot be parsed: {one.status}"))
    if not isinstance(one.name, str) or not one.name:
        return MalformedCall(one.raw, _WHY[Status.MISSING_NAME])
    arguments: Any = {} if one.arguments is None else one.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    problem = decode_arguments(arguments)[1]
    return MalformedCall(one.raw, problem) if problem else ParsedCall(one.name, arguments, one.id)


class _Encoder:
    """The tokenizer given to renderers: it encodes hidden text as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name_or_path = tokenizer.name
        self.unk_token_id = -1
        """The id for what is not in the vocabulary; no token has it."""
        self.eos_token_id = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer)
        self._tokens: dict[str, int] = {**getattr(tokenizer, "added_tokens", {}), **tokenizer.special_tokens}

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._guard.encode(text)

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokens.get(tokens, self.unk_token_id)
        return [self.convert_tokens_to_ids(token) for token in tokens]
