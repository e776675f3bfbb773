"""A branch of a session as a record: the path from an opening to one leaf, in the form of a trajectory's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolyard.chat.protocol import ChatFormat
from toolyard.gateway.conversation import SampledTurn
from toolyard.messages import Message
from toolyard.records.trajectory import CallRecord, Tokens, Turn
from toolyard.tokens import ids_crc


@dataclass(frozen=True, slots=True)
class Branch:
    """One leaf of a session, and everything before it. All of it can be written as JSON."""

    messages: tuple[Message, ...]
    tokens: Tokens
    turns: tuple[Turn, ...]
    prompt_text: str
    response_text: str
    shared_tokens: int
    """How many tokens of the response an earlier branch of the session has, too."""
    shared_turns: int
    why: str
    """Why it does not continue another conversation of the session; empty for the first."""


def branches_of(leaves: Sequence[SampledTurn], chat: ChatFormat) -> list[Branch]:
    """The branches that end with `leaves`, in this order."""
    seen: set[int] = set()
    branches: list[Branch] = []
    for leaf in leaves:
        path = leaf.path
        shared = sum(turn.number in seen for turn in path)  # always a beginning of the path
        seen.update(turn.number for turn in path)
        branches.append(_branch(path, chat, shared))
    return branches


def _branch(path: Sequence[SampledTurn], chat: ChatFormat, shared: int) -> Branch:
    opening = path[0].opening
    messages = list(opening.messages)
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] | None = []
    turns: list[Turn] = []
    crc = ids_crc(opening.prompt_ids)
    shared_tokens = 0
    for index, turn in enumerate(path):
        messages += turn.given
        generation = turn.answer.generation
        start = len(ids) + len(turn.given_ids)
        ids += [*turn.given_ids, *generation.token_ids]
        mask += [*[0] * len(turn.given_ids), *[1] * len(generation.token_ids)]
        if generation.logprobs is None or logprobs is None:
            logprobs = None
        else:
            logprobs += [*[0.0] * len(turn.given_ids), *generation.logprobs]
        crc = ids_crc(turn.given_ids, crc)
        sampled = turn.answer.sampled(start, len(ids), chat.decode(generation.token_ids), crc, turn.stopped_by)
        crc = ids_crc(generation.token_ids, crc)
        following = path[index + 1] if index + 1 < len(path) else None
        timings = {"started": turn.started, "generating": turn.seconds}
        if following is not None:
            timings["tool_calling"] = round(max(0.0, following.started - turn.started - turn.seconds), 6)
        turns.append(Turn(sampled, _calls(turn, following, timings.get("tool_calling", 0.0)), timings))
        messages.append(turn.message)
        if index < shared:
            shared_tokens = len(ids)
    return Branch(
        messages=tuple(messages),
        tokens=Tokens(opening.prompt_ids, ids, mask, logprobs),
        turns=tuple(turns),
        prompt_text=chat.decode(opening.prompt_ids),
        response_text=chat.decode(ids),
        shared_tokens=shared_tokens,
        shared_turns=shared,
        why=opening.why,
    )


def _calls(turn: SampledTurn, following: SampledTurn | None, seconds: float) -> tuple[CallRecord, ...]:
    """The calls of a turn that were answered, in that order. The agent made them: little is known of them."""
    made = {call.id: call for call in turn.message.tool_calls}
    answers = () if following is None else (one for one in following.given if one.tool_call_id in made)
    records = [
        CallRecord(call.id, call.name, call.arguments, "ok", answer.content, seconds=seconds, attempts=1)
        for answer in answers
        if (call := made.pop(answer.tool_call_id or "", None)) is not None
    ]
    records += [
        CallRecord(f"m{turn.number}x{index}", "", bad.text, "malformed", "", error=bad.why)
        for index, bad in enumerate(turn.parsed.malformed)
    ]
    return tuple(records)
