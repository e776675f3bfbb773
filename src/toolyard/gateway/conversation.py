"""The conversations of one session: a tree whose nodes are sampled turns.

A request whose messages continue a turn that was sampled here extends the ids of that turn. Anything else begins a
conversation of its own, and says why: an agent that compacted its history, a sub-agent, an edited message. Nothing that
was sampled is ever rendered again.

Agents do not send messages back exactly as they got them. What counts as the same message: text that differs only in
the white space around it, arguments that are equal as JSON, a missing or empty content, reasoning left out. The ids are
always those that were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from toolyard.chat.protocol import ChatFormat, ParsedTurn
from toolyard.errors import ChatError
from toolyard.gateway.api.exchange import ApiError
from toolyard.messages import Message, OpenAIFunctionToolSchema, ToolCall, decode_arguments
from toolyard.turns import EngineAnswer

_ROLES = ("system", "developer", "user", "assistant", "tool")
Tools = tuple[OpenAIFunctionToolSchema, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """How a conversation begins."""

    messages: tuple[Message, ...]
    tools: Tools
    prompt_ids: list[int]
    why: str
    """Why it does not continue a conversation of the session; empty for the first one."""


@dataclass(slots=True, eq=False)
class SampledTurn:
    """A turn in the tree. What follows it are its `children`."""

    number: int
    """In the session, by the time of its answer."""
    engine_id: str
    """The engine's name for the request that sampled it."""
    parent: SampledTurn | None
    opening: Opening
    given: tuple[Message, ...]
    """The messages between the parent and this turn."""
    given_ids: list[int]
    answer: EngineAnswer
    parsed: ParsedTurn
    message: Message
    """As the client got it."""
    stopped_by: int | str | None
    started: float
    """Seconds since the session began."""
    seconds: float
    delivered: bool = False
    """The client got all of it. A turn that nobody has seen is no part of any branch."""
    children: list[SampledTurn] = field(default_factory=list["SampledTurn"])

    @property
    def path(self) -> list[SampledTurn]:
        """The turns from the opening to this one."""
        path: list[SampledTurn] = []
        turn: SampledTurn | None = self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    @property
    def messages(self) -> list[Message]:
        """The whole conversation up to this turn's message."""
        messages = list(self.opening.messages)
        for turn in self.path:
            messages += (*turn.given, turn.message)
        return messages

    @property
    def ids(self) -> list[int]:
        """The whole conversation up to the end of this turn."""
        ids = list(self.opening.prompt_ids)
        for turn in self.path:
            ids += turn.given_ids
            ids += turn.answer.generation.token_ids
        return ids


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the tree a request belongs."""

    parent: SampledTurn | None
    """None: it begins a conversation."""
    opening: Opening
    given: tuple[Message, ...]
    given_ids: list[int]
    prompt_ids: list[int]
    """What the engine gets."""
    history: bytes
    """Identifies the messages and tools of the request."""


class Conversations:
    """The tree of a session."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._known: dict[bytes, list[SampledTurn]] = {}
        """Turns by the history that ends with them."""
        self.turns: list[SampledTurn] = []

    def place(self, messages: Sequence[Message], tools: Tools) -> Place:
        """Find where a request continues.

        Raises:
            ApiError: the messages cannot be rendered.
        """
        _check(messages)
        histories = list(_histories(messages, tools))
        parent, end, why = self._longest(messages, histories)
        if parent is not None:
            given = _named(tuple(messages[end:]), messages)
            before, sampled = _split(parent)
            prompt: list[int] = before if self._chat.reads_prompt else []
            try:
                ids = self._chat.extension(prompt, sampled, given, tools)
            except ChatError as error:
                why = f"the turn before cannot be continued: {error}"
            else:
                return Place(parent, parent.opening, given, ids, [*before, *sampled, *ids], histories[-1])
        opening_messages = _named(tuple(messages), messages)
        try:
            prompt_ids = self._chat.render(opening_messages, tools)
        except ChatError as error:
            raise ApiError(400, f"messages: {error}", code="invalid_value", param="messages") from None
        opening = Opening(opening_messages, tools, prompt_ids, why if self.turns else "")
        return Place(None, opening, (), [], prompt_ids, histories[-1])

    def place_tokens(self, prompt_ids: list[int], text: str) -> Place:
        """Find where a prompt of tokens continues: after the longest conversation that it begins with."""
        history = blake2b(repr(prompt_ids).encode(), digest_size=16).digest()
        known = [turn for turn in self.turns if not turn.opening.tools]
        for turn in sorted(known, key=lambda one: one.number, reverse=True):
            ids = turn.ids
            if len(ids) < len(prompt_ids) and prompt_ids[: len(ids)] == ids:
                rest = prompt_ids[len(ids) :]
                given = (Message("user", self._chat.decode(rest)),)
                return Place(turn, turn.opening, given, rest, prompt_ids, history)
        why = "the prompt does not begin with a conversation of this session" if self.turns else ""
        return Place(None, Opening((Message("user", text),), (), prompt_ids, why), (), [], prompt_ids, history)

    def add(self, place: Place, turn: SampledTurn) -> None:
        """Enter a turn that was sampled at `place`."""
        self.turns.append(turn)
        if turn.parent is not None:
            turn.parent.delivered = True  # whoever continues it has got it
            turn.parent.children.append(turn)
        after = _extended(place.history, turn.message)
        self._known.setdefault(after, []).append(turn)

    def leaves(self) -> list[SampledTurn]:
        """The last turn of every branch, in the order in which they were sampled. The last one is the main branch: an
        agent speaks last where it ends."""
        return [turn for turn in self.turns if turn.delivered and not any(one.delivered for one in turn.children)]

    def _longest(self, messages: Sequence[Message], histories: Sequence[bytes]) -> tuple[SampledTurn | None, int, str]:
        """The turn with the longest history that the messages begin with, how long it is, and, if there is none to
        continue, why."""
        unknown = 0
        for end in range(len(messages), 0, -1):
            if messages[end - 1].role != "assistant":
                continue
            found = self._known.get(histories[end])
            if not found:
                unknown = end
            elif unknown:
                return None, 0, f"message {unknown - 1} (assistant) was not sampled here as it is now"
            else:
                # Equal answers to equal questions cannot be told apart: their texts are the same.
                return next((turn for turn in reversed(found) if turn.delivered), found[-1]), end, ""
        if unknown:
            return None, 0, f"message {unknown - 1} (assistant) was not sampled here as it is now"
        return None, 0, "it contains no answer of this session"


def call_ids(turn: int, parsed: ParsedTurn) -> tuple[ToolCall, ...]:
    """The calls of a turn. Ids are unique in the session; they have nine letters and digits, the only form that all
    templates accept."""
    return tuple(
        ToolCall(call.id or f"t{turn % 100_000:05}c{index % 100:02}", call.name, call.arguments)
        for index, call in enumerate(parsed.calls)
    )


def _split(turn: SampledTurn) -> tuple[list[int], list[int]]:
    sampled = turn.answer.generation.token_ids
    ids = turn.ids
    return ids[: len(ids) - len(sampled)], sampled


def _check(messages: Sequence[Message]) -> None:
    """Refuse what OpenAI refuses as well, since no template could express it."""
    if not messages:
        raise ApiError(400, "messages: expected at least one message", code="invalid_value", param="messages")
    if messages[-1].role == "assistant":
        raise ApiError(
            400,
            "messages: the last message is the assistant's, and the gateway cannot continue it; end with another",
            code="invalid_value",
            param="messages",
        )
    waiting: dict[str, int] = {}
    for index, message in enumerate(messages):
        if message.role not in _ROLES:
            told = f"messages[{index}].role: expected one of {', '.join(_ROLES)}, not {message.role[:40]!r}"
            raise ApiError(400, told, code="invalid_value", param=f"messages[{index}].role")
        if message.role == "tool":
            if message.tool_call_id not in waiting:
                raise ApiError(
                    400,
                    f"messages[{index}]: tool_call_id {message.tool_call_id!r} matches no call in the last message",
                    code="invalid_value",
                    param=f"messages[{index}].tool_call_id",
                )
            del waiting[message.tool_call_id]
            continue
        if waiting:
            raise ApiError(
                400,
                f"messages[{index}]: the calls {', '.join(waiting)} of the assistant's message have no results: "
                "every call needs a message of role tool",
                code="invalid_value",
                param=f"messages[{index}]",
            )
        waiting = dict.fromkeys((call.id for call in message.tool_calls), index)


def _named(given: tuple[Message, ...], messages: Sequence[Message]) -> tuple[Message, ...]:
    """Tool messages with the name of their tool, which clients leave out and some templates need."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return tuple(
        Message("tool", one.content, tool_call_id=one.tool_call_id, name=names.get(one.tool_call_id or ""))
        if one.role == "tool" and one.name is None
        else one
        for one in given
    )


# The same message ---------------------------------------------------------------------------------------------------


def _histories(messages: Sequence[Message], tools: Tools) -> Iterator[bytes]:
    """What identifies the first 0, 1, 2, … messages, with the tools."""
    shown = [tool.model_dump(mode="json") for tool in tools]
    history = blake2b(json.dumps(shown, sort_keys=True).encode(), digest_size=16).digest()
    yield history
    for message in messages:
        history = _extended(history, message)
        yield history


def _extended(history: bytes, message: Message) -> bytes:
    said = [message.role, message.content.strip(), message.tool_call_id or "", str(len(message.tool_calls))]
    for call in message.tool_calls:
        said += (call.id, call.name, _canonical(call.arguments))
    said += (image.url for image in message.images)
    # Each part with its length before it, so that no two messages are written alike.
    text = "".join([f"{len(part)}:{part}" for part in said])
    return blake2b(history + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _canonical(arguments: str) -> str:
    decoded, problem = decode_arguments(arguments)
    return arguments.strip() if problem else json.dumps(decoded, sort_keys=True)
