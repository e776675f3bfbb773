"""Tokenizers of the `tokenizers` library, which covers nearly all models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel

from toolyard.chat.protocol import Ids
from toolyard.errors import ChatError, ConfigError
from toolyard.messages import JSON

_LOOKS_SPECIAL = re.compile(r"<[|｜].*>|<.*[|｜]>", re.DOTALL)
"""Matches added tokens that are not declared special but start turns or calls: DeepSeek's `<｜User｜>`, Gemma's
`<|tool_call>` and `<tool_call|>`. Plain tags, such as `<think>` and `<tool_call>`, stay as declared: ordinary text."""

_SURROGATES = re.compile("[\ud800-\udfff]")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(sorted(set(range(0x100)) - set(_PRINTABLE)))
}
"""GPT-2's characters for bytes, in which byte-level tokenizers write their tokens."""
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FastTokenizer:
    """A `Tokenizer` over the library's, which it does not modify: safe to share."""

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        chat_template: str | None = None,
        plain_template: str | None = None,
        variables: Mapping[str, str] | None = None,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.chat_template = chat_template
        self.plain_template = plain_template
        """For conversations without tools, if the model has separate templates."""
        self.template_variables = dict(variables or {})
        """Variables for chat templates: bos_token, eos_token and the like."""
        self.stop_token_ids = stop_token_ids
        """Stop tokens of the model's generation_config.json."""
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: number for number, token in added.items()}
        """All tokens matched before text is split into words; more than the special ones."""
        self.special_tokens: dict[str, int] = {
            token.content: number
            for number, token in added.items()
            if token.special or _LOOKS_SPECIAL.fullmatch(token.content)
        }
        self._pieces = _Pieces(backend) if isinstance(backend.decoder, ByteLevel) else None
        self._unknown = {self.added_tokens.get(self.template_variables.get("unk_token", ""))}
        eos = self.template_variables.get("eos_token")
        self.eos_token_id: int | None = backend.token_to_id(eos) if eos else None
        self.vocab_size = 1 + max(backend.get_vocab().values(), default=-1)  # not their number: there may be gaps

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if special:
            return _ids(self.backend, text)
        ids = _ids(self._plain, text)
        if not self._forged(text, ids):
            return ids
        # The vocabulary itself contains these. Encoded one by one, their characters stay characters.
        pattern = "|".join(map(re.escape, sorted(self.special_tokens, key=len, reverse=True)))
        pieces: list[str] = []
        for index, piece in enumerate(re.split(f"({pattern})", text)):
            pieces.extend(piece if index % 2 else [piece])
        ids = [number for piece in pieces for number in _ids(self._plain, piece)]
        if forged := self._forged(text, ids):
            raise ChatError(f"the tokenizer of {self.name} can only encode {forged!r} as the special token")
        return ids

    def decode(self, ids: Ids) -> str:
        try:
            if self._pieces is None:
                return self.backend.decode(ids, skip_special_tokens=False)
            # The library's decode does the same in five times the time. Every sampled token is decoded three times.
            return b"".join(map(self._pieces.__getitem__, ids)).decode("utf-8", "replace")
        except (OverflowError, TypeError):  # ids that no vocabulary has
            return self.decode([int(number) for number in ids if 0 <= number < 2**32])

    def _forged(self, text: str, ids: list[int]) -> str | None:
        # Characters may be unknown and become the unknown token, which is harmless.
        present = set(ids) - self._unknown
        return next(
            (token for token, number in self.special_tokens.items() if number in present and token in text), None
        )

    @cached_property
    def _plain(self) -> Backend:
        """The same vocabulary without added tokens. A second tokenizer, because the library's `encode_special_tokens`
        is a switch on the shared one, and only affects tokens that are declared special."""
        state: JSON = json.loads(self.backend.to_str())
        state.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        for part in ("normalizer", "pre_tokenizer"):
            state[part] = _without_prefix(state.get(part))
        return Backend.from_str(json.dumps(state))


class _Pieces(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, number: int) -> bytes:
        token: str | None = self._backend.id_to_token(number)
        if token is None:
            return b""
        # Added tokens are stored as they are, not in these characters.
        known = all(letter in _BYTES for letter in token)
        self[number] = piece = bytes([_BYTES[letter] for letter in token]) if known else token.encode()
        return piece


def _ids(backend: Backend, text: str) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except TypeError:  # lone surrogates, from output that was decoded carelessly; UTF-8 has none
        return backend.encode(_SURROGATES.sub("�", text), add_special_tokens=False).ids


def _without_prefix(step: Any) -> Any:
    """SentencePiece's space before the first word belongs at the start of a text, not in the middle."""
    if isinstance(step, list):
        kept = [_without_prefix(one) for one in step]  # pyright: ignore[reportUnknownVariableType]
        return [one for one in kept if one is not None]
    if not isinstance(step, dict):
        return step
    converted: JSON = {key: _without_prefix(value) if isinstance(value, list) else value for key, value in step.items()}  # pyright: ignore[reportUnknownVariableType]
    if converted.get("type") == "Prepend":
        return None
    if "prepend_scheme" in converted:
        converted["prepend_scheme"] = "never"
    if converted.get("type") == "ByteLevel":
        converted["add_prefix_space"] = False
    return converted


# Folders --------------------------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> FastTokenizer | None:
    """Read a folder with a tokenizer.json; None if its tokenizer_config.json adds tokens that only `transformers` can
    combine with it."""
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{folder / 'tokenizer.json'}: cannot be read: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    config = _read(folder / "tokenizer_config.json")
    added: JSON = config.get("added_tokens_decoder") or {}
    for number, token in added.items():
        if backend.token_to_id(_content(token) or "") != int(number):
            return None
    variables = named_tokens({**_read(folder / "special_tokens_map.json"), **config})
    if any(backend.token_to_id(token) is None for token in variables.values()):
        return None
    template, plain = _templates_of(folder, config)
    return FastTokenizer(
        backend,
        name=str(folder),
        chat_template=template,
        plain_template=plain,
        variables=variables,
        stop_token_ids=stop_tokens_of(folder / "generation_config.json"),
    )


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token and the like, by their names in templates."""
    return {name: content for name in _NAMED if (content := _content(config.get(name)))}


def stop_tokens_of(file: Path) -> tuple[int, ...]:
    """Read the stop tokens of a generation_config.json, if it exists."""
    found = _read(file).get("eos_token_id")
    return tuple(number for number in (found if isinstance(found, list) else [found]) if isinstance(number, int))  # pyright: ignore[reportUnknownVariableType]


def choose_templates(given: Any) -> tuple[str | None, str | None]:
    """Choose from one or several named templates: the one for tools, and the one for conversations without, if any."""
    if isinstance(given, list):
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    named: JSON = given if isinstance(given, dict) else {"default": given}  # pyright: ignore[reportUnknownVariableType]
    plain, tool_use = (
        named.get(name) if isinstance(named.get(name), str) else None for name in ("default", "tool_use")
    )
    return (tool_use, plain) if tool_use is not None else (plain, None)


def _templates_of(folder: Path, config: JSON) -> tuple[str | None, str | None]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        named = {"default": _text(file)}
        if (more := folder / "additional_chat_templates" / "tool_use.jinja").is_file():
            named["tool_use"] = _text(more)
        return choose_templates(named)
    return choose_templates(_read(folder / "chat_template.json").get("chat_template") or config.get("chat_template"))


def _content(token: Any) -> str | None:
    content: Any = token.get("content") if isinstance(token, dict) else token  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return content if isinstance(content, str) else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def _read(file: Path) -> JSON:
    if not file.is_file():
        return {}
    try:
        found: Any = json.loads(_text(file))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object")
    return found  # pyright: ignore[reportUnknownVariableType]
