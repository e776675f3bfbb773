"""Grow conversations with hostile text in every family, and count tokens that are forged, lost or different.

`make drift`, or `python tests/drift.py --turns 1000 --family gpt-oss`. Exits with 1 if there is any. With `--table`, it
holds every family to the conformance kit instead, and prints the table in docs/rollouts.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from material import FAMILIES, family_folder
from toolyard.chat.conformance import CODE_TOOL, check_format
from toolyard.chat.formats import open_format
from toolyard.chat.protocol import Tokenizer
from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.messages import Message

_TURNS = 100_000
_PLAIN = ("42", "", " ", "\n\na\n", "é漢😀\t", '{"a": [1, null]}', "Traceback: <stdin>", "a\r\nb", "C:\\new", "e\u0301")
_GROWN = 6
"""Turns of a conversation."""


@dataclass
class Drift:
    family: str
    turns: int = 0
    hostile: int = 0
    forged: int = 0
    lost: int = 0
    differing: int = 0
    """Prompts that do not begin with the last prompt and what was sampled, or that come out otherwise a second time."""

    @property
    def clean(self) -> bool:
        return not (self.forged or self.lost or self.differing)


def drift(family: str, tokenizer: Tokenizer, turns: int, seed: int) -> Drift:
    chat, again = open_format(tokenizer), open_format(tokenizer)
    chance, found = random.Random(seed), Drift(family)
    specials = list(tokenizer.special_tokens)
    ids_of = frozenset(tokenizer.special_tokens.values())
    frames: dict[str, int] = {}
    ids: list[int] = []
    for turn in range(turns):
        if turn % _GROWN == 0:
            ids = chat.render([Message("user", "Hello")], [CODE_TOOL])
        hostile = chance.random() < 0.5
        parts = chance.choices(_PLAIN, k=3) + (chance.choices(specials, k=3) if hostile else [])
        chance.shuffle(parts)
        content = "x" + "".join(parts) + "x"
        role = chance.choice(("tool", "user"))
        new = _message(role, content)
        sampled = [*tokenizer.encode(f"Well {turn}", special=False), chat.stop_token_ids[0]]
        if role not in frames:
            harmless = chat.extension(ids, sampled, [_message(role, "x")], [CODE_TOOL])
            frames[role] = sum(number in ids_of for number in harmless)
        grown = chat.extend(ids, sampled, [new], [CODE_TOOL])
        added = grown[len(ids) + len(sampled) :]
        text = chat.decode(added)
        found.turns += 1
        found.hostile += hostile
        found.forged += sum(number in ids_of for number in added) != frames[role]
        told = (content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1])
        found.lost += not any(_composed(form) in _composed(text) for form in told)
        same = grown[: len(ids) + len(sampled)] == [*ids, *sampled]
        found.differing += not same or added != again.extension([], sampled, [new], [CODE_TOOL])
        ids = grown
    return found


def table(families: Sequence[str], seed: int) -> bool:
    """Print families and checks as Markdown; whether none failed."""
    passed = True
    for index, family in enumerate(families):
        tokenizer = load_tokenizer(family_folder(family))
        chat = open_format(tokenizer)
        report = check_format(chat, tokenizer, conversations=20, seed=seed)
        if index == 0:
            print("|".join(("", "family", "calls in", *(check.name for check in report.checks), "")))
            print("|".join(("", *["---"] * (2 + len(report.checks)), "")))
        outcomes = (check.outcome.value for check in report.checks)
        print("|".join(("", family, chat.name.removeprefix("template:"), *outcomes, "")), flush=True)
        passed &= report.passed
    return passed


def _message(role: str, content: str) -> Message:
    if role == "user":
        return Message("user", content)
    return Message("tool", content, tool_call_id="call_0", name=CODE_TOOL.function.name)


def _composed(text: str) -> str:
    """Some vocabularies compose accents: that is their reading of the text."""
    return unicodedata.normalize("NFC", text)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=_TURNS, help="turns over all families")
    options.add_argument("--family", action="append", choices=[*FAMILIES, "smollm2"], help="only this one; repeatable")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--table", action="store_true", help="print the outcomes of the conformance kit")
    given = options.parse_args()
    families = given.family or [*FAMILIES, "smollm2"]
    if given.table:
        return 0 if table(families, given.seed) else 1
    print(f"{'family':<18}{'turns':>8}{'hostile':>9}{'forged':>8}{'lost':>6}{'differing':>11}{'seconds':>9}")
    clean = True
    for family in families:
        began = time.monotonic()
        row = drift(family, load_tokenizer(family_folder(family)), -(-given.turns // len(families)), given.seed)
        clean &= row.clean
        seconds = time.monotonic() - began
        counts = f"{row.turns:>8}{row.hostile:>9}{row.forged:>8}{row.lost:>6}{row.differing:>11}"
        print(f"{row.family:<18}{counts}{seconds:>9.1f}", flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
