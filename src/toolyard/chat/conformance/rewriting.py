"""Names for what a chat template rewrites in the history."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from toolyard.chat.protocol import ChatFormat
from toolyard.messages import Message

Normaliser = Callable[[str], str]

OTHER_TOKENS = "the same text in other tokens"
MOVED = "earlier messages are moved or left out"


def thinking_tags(chat: ChatFormat) -> tuple[tuple[str, str], ...]:
    """Pairs of tags around the reasoning of a turn."""
    return getattr(getattr(chat, "syntax", None), "thinking", (("<think>", "</think>"),))


def normalisers(chat: ChatFormat, messages: Sequence[Message]) -> dict[str, Normaliser]:
    """By the name of what each takes away from a decoded conversation. `messages`: what was said in it."""
    pairs = (*thinking_tags(chat), ("<|channel|>analysis", "<|start|>assistant"))
    blocks = "|".join(f"{re.escape(opening)}.*?{re.escape(closing)}" for opening, closing in pairs)
    tags = "|".join(re.escape(tag) for pair in thinking_tags(chat) for tag in pair)
    thinking = re.compile(rf"\s*(?:{blocks}|{tags})\s*", re.DOTALL)
    ends = {chat.decode([number]) for number in chat.stop_token_ids} | {getattr(chat, "rewritten_end", "")}
    ending = re.compile("|".join(map(re.escape, filter(None, ends))))
    raw = {call.arguments for message in messages for call in message.tool_calls}

    def arguments(text: str) -> str:
        for given in raw:
            for form in spellings(given):
                text = text.replace(form, given)
        return text

    return {
        "arguments of calls are written anew": arguments,
        "white space is added or stripped": lambda text: re.sub(r"\s+", "", text),
        "thinking is cut or added": lambda text: thinking.sub("", text),
        "turns end with another token": lambda text: ending.sub("", text),
    }


def name_rewriting(ours: str, theirs: str, steps: Mapping[str, Normaliser]) -> str:
    """The fewest of `steps` that make two renderings of a conversation equal; `MOVED` if all of them do not."""
    if ours == theirs:
        return OTHER_TOKENS
    for count in range(1, len(steps) + 1):
        for chosen in combinations(steps.items(), count):
            one, other = ours, theirs
            for _, step in chosen:
                one, other = step(one), step(other)
            if one == other:
                return "; ".join(name for name, _ in chosen)
    return MOVED


def spellings(arguments: str) -> list[str]:
    """How templates write the arguments of a call in JSON."""
    decoded = json.loads(arguments)
    return [json.dumps(decoded, ensure_ascii=ascii_only) for ascii_only in (False, True)]
