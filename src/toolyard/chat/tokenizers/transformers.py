"""Tokenizers that only `transformers` can find or build: on the hub, in GGUF files, or written in Python.

Also renders with its `apply_chat_template`, for comparison.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import re
import socket
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import transformers

from toolyard.chat.protocol import Ids, Tokenizer
from toolyard.chat.tokenizers.fast import FastTokenizer, choose_templates, named_tokens, stop_tokens_of
from toolyard.errors import ConfigError
from toolyard.messages import JSON

_HUB = "huggingface.co"


def load(model: str, *, name: str, gguf_file: str | None = None) -> Tokenizer:
    """Load from a folder or a hub id; with `gguf_file`, from that file in it, whose conversion takes seconds.

    Code that a model brings along is not run.
    """
    # Offline, use the cache only: retrying would take most of a minute.
    more: JSON = {"gguf_file": gguf_file} if gguf_file else {"local_files_only": Path(model).exists() or not _online()}
    # For a GGUF file, AutoTokenizer would first read the model's config: slow, and not supported for every model.
    finder: Any = transformers.PreTrainedTokenizerFast if gguf_file else transformers.AutoTokenizer
    try:
        found: Any = finder.from_pretrained(model, trust_remote_code=False, **more)
    except Exception as error:  # dozens of types; each means that the tokenizer is unavailable
        raise ConfigError(_why(name, error)) from error
    if gguf_file:
        from toolyard.gguf import fix_tokenizer

        fix_tokenizer(found, Path(model) / gguf_file)
    variables = named_tokens({key: str(value) for key, value in found.special_tokens_map.items()})
    template, plain = choose_templates(found.chat_template)
    if getattr(found, "is_fast", False):
        return FastTokenizer(
            found.backend_tokenizer,
            name=name,
            chat_template=template,
            plain_template=plain,
            variables=variables,
            stop_token_ids=_stop_tokens(model),
        )
    return PythonTokenizer(found, name=name, chat_template=template, variables=variables)


def render_template(source: str, messages: list[JSON], tools: list[JSON] | None, variables: JSON) -> str | None:
    """Render like `apply_chat_template`, up to where the assistant's turn starts; None if the template refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    try:
        rendered: Any = render([messages], tools, None, source, add_generation_prompt=True, **variables)
    except Exception:  # a template can raise anything that Python can
        return None
    return rendered[0][0]


def _online() -> bool:
    if urllib.request.getproxies():
        return True
    try:
        socket.create_connection((_HUB, 443), timeout=5).close()
    except OSError:
        return False
    return True


def _why(name: str, error: Exception) -> str:
    if not Path(name).exists():
        return (
            f"the tokenizer of {name!r} is neither a local folder nor available from the hub: {_first_line(error)} "
            "(offline, give the path of a folder with tokenizer.json and tokenizer_config.json)"
        )
    return f"{name}: its tokenizer cannot be read: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _stop_tokens(model: str) -> tuple[int, ...]:
    try:
        file: Any = transformers.utils.hub.cached_file(model, "generation_config.json")
    except OSError:  # no generation_config.json
        return ()
    return stop_tokens_of(Path(file)) if file else ()


class PythonTokenizer:
    """A `Tokenizer` over one written in Python."""

    def __init__(self, found: Any, *, name: str, chat_template: str | None, variables: dict[str, str]) -> None:
        self.name = name
        self.chat_template = chat_template
        self.template_variables = variables
        self._found = found
        self.special_tokens: dict[str, int] = {
            token.content: number for number, token in found.added_tokens_decoder.items()
        }
        self.eos_token_id: int | None = found.eos_token_id
        self.vocab_size = 1 + max(found.get_vocab().values(), default=-1)
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if special:
            return list(self._found.encode(text, add_special_tokens=False))
        # Split inside every special text, so that no part matches it. The tokenizer's state is not changed.
        cuts = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        return [number for start, end in pairwise(cuts) for number in self.encode(text[start:end])]

    def decode(self, ids: Ids) -> str:
        return self._found.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
