"""Vocabularies as the `tokenizers` library has them, made from what packages carry: tiktoken files, GGUF, Tekken."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from material.packages import Package
from toolyard.gguf import header_of

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_HARMONY = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPECIAL = 1000
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens in GGUF."""


def of_file(package: Package, name: str) -> Tokenizer:
    return Tokenizer.from_file(str(package.path(name)))


def of_tiktoken(package: Package, name: str, pattern: str, *, nfc: bool = False) -> Tokenizer:
    ranks = _ranks(package.path(name))
    return _byte_level(ranks, _merges_of(package.path(name)), {}, pattern, nfc=nfc)


def of_tekken(package: Package, name: str, special: tuple[tuple[int, str], ...]) -> Tokenizer:
    told: Any = json.loads(package.path(name).read_text(encoding="utf-8"))
    size = told["config"]["default_vocab_size"] - _TEKKEN_SPECIAL
    ranks = {base64.b64decode(row["token_bytes"]): _TEKKEN_SPECIAL + row["rank"] for row in told["vocab"][:size]}
    return _byte_level(ranks, _merges(ranks), {text: number for number, text in special}, told["config"]["pattern"])


def of_command_r(package: Package, name: str) -> Tokenizer:
    tokens, merges, added = _gguf(package.path(name))
    made = Tokenizer(models.BPE(vocab=_by_text(tokens), merges=merges))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(added)
    return made


def of_gemma(package: Package, name: str) -> Tokenizer:
    tokens, merges, added = _gguf(package.path(name))
    made = Tokenizer(
        models.BPE(vocab=_by_text(tokens), merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(added)
    return made


def _byte_level(
    ranks: Mapping[bytes, int],
    parts: list[tuple[bytes, bytes]],
    special: Mapping[str, int],
    pattern: str,
    *,
    nfc: bool = False,
) -> Tokenizer:
    letters = _letters()
    texts = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [(texts[left], texts[right]) for left, right in parts]
    vocabulary = {texts[token]: number for token, number in ranks.items()} | dict(special)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    if nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


@cache
def _ranks(file: Path) -> dict[bytes, int]:
    rows = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in rows}


@cache
def _merges_of(file: Path) -> list[tuple[bytes, bytes]]:
    return _merges(_ranks(file))


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two tokens that each token is merged from: those that remain after all earlier merges."""
    found: list[tuple[bytes, bytes]] = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[at : at + 1] for at in range(len(token))]
        while len(parts) > 2:
            lowest, at = min((ranks.get(a + b, rank), at) for at, (a, b) in enumerate(pairwise(parts)))
            if lowest >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


@cache
def _letters() -> dict[int, str]:
    """GPT-2's letters for bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + index) for index, byte in enumerate(others)}


def _by_text(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _gguf(file: Path) -> tuple[list[str], list[tuple[str, str]], list[AddedToken]]:
    names = [f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "token_type")]
    fields = header_of(file, names)
    tokens, pairs, kinds = (fields[name] for name in names)
    merges: list[Any] = [tuple(pair.split(" ")) for pair in pairs]
    added = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and not token.startswith("[PAD")
    ]
    return tokens, merges, added
