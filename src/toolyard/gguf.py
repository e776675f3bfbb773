"""Complete tokenizers from GGUF files with the parts that `transformers` does not read.

A GGUF file has tokens and merges, and a keyword, `tokenizer.ggml.pre`, for how text is normalized and split before
tokenizing. transformers supports that keyword for some vocabularies, splits like GPT-2 for all others, and never
normalizes. Before about 5.20, it also takes other tokens for the special ones: a model would never end its answers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import normalizers, pre_tokenizers

from toolyard.errors import ConfigError

_NFC = frozenset({"qwen2", "qwen35", "command-r"})
_SPLIT_DIGITS = frozenset({"smollm", "command-r", "starcoder", "refact", "codeshell"})
"""Vocabularies where every digit is its own word; otherwise words are split like GPT-2's."""
_NUMBER, _TEXT, _LIST = 4, 8, 9
_SIZES = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)
"""Size in bytes of each GGUF value type."""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""How transformers and GGUF name the special tokens."""
_LIKE_GPT2 = frozenset({"gpt-2", "phi-2", "roberta-bpe", "jina-es", "jina-de"})


def fix_tokenizer(tokenizer: Any, file: Path) -> None:
    """Make `tokenizer`, which transformers built from `file`, the one that the model was trained with.

    Raises:
        ConfigError: the file does not say how text is split, or uses an unknown keyword.
    """
    fields = header_of(file)
    for name, named in _SPECIAL.items():
        token = fields.get(f"tokenizer.ggml.{named}_token_id")
        if token is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token))
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return
    pre = fields.get("tokenizer.ggml.pre")
    if pre in _SPLIT_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre not in _LIKE_GPT2 and pre not in _known_to_transformers():
        raise ConfigError(
            f"{file}: unknown pre-tokenizer (tokenizer.ggml.pre is {pre!r}); give a "
            "folder with the tokenizer.json of the original model"
        )
    if pre in _NFC:
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


def _known_to_transformers() -> frozenset[str]:
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping
    except ImportError:  # before about 5.20: none
        return frozenset()
    return frozenset(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS)


def header_of(file: Path, lists: Collection[str] = ()) -> dict[str, Any]:
    """Read the texts and numbers of the header, and the lists that are named. The `gguf` package takes 15 seconds for a
    file with its tokens."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        count, at = struct.unpack_from("<Q", data, 16)[0], 24
        found: dict[str, Any] = {}
        for _ in range(count):
            at, key = _text(data, at)
            kind = struct.unpack_from("<I", data, at)[0]
            at, value = _value(data, at + 4, kind, keep=key in lists)
            if kind in (_NUMBER, _TEXT) or key in lists:
                found[key] = value
        return found


def _value(data: mmap.mmap, at: int, kind: int, *, keep: bool) -> tuple[int, Any]:
    """Return where the value ends, and the value; of a list, nothing unless it is to be kept."""
    if kind == _TEXT:
        return _text(data, at)
    if kind != _LIST:
        end = at + _SIZES[kind]
        return end, int.from_bytes(data[at:end], "little")
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if not keep and kind not in (_TEXT, _LIST):
        return at + count * _SIZES[kind], []
    kept: list[Any] = []
    for _ in range(count):
        at, value = _value(data, at, kind, keep=keep)
        if keep:
            kept.append(value)
    return at, kept


def _text(data: mmap.mmap, at: int) -> tuple[int, str]:
    end = at + 8 + struct.unpack_from("<Q", data, at)[0]
    return end, data[at + 8 : end].decode("utf-8", "replace")
