"""Tokenizers that only `transformers` can find or build: on the hub, in GGUF files, or written in Python.

And what its `apply_chat_template` makes of a conversation, to compare with.
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
    """Of a folder or a hub id; of one file in it with `gguf_file`, which is converted, for seconds.

    Code that a model brings along is not run.
    """
    # Offline, what is cached will do; asking anyway would take most of a minute of retries.
    more: JSON = {"gguf_file": gguf_file} if gguf_file else {"local_files_only": Path(model).exists() or not _online()}
    # Of a GGUF file, the other would first read the model's configuration: for many seconds, and not of every model.
    finder: Any = transformers.PreTrainedTokenizerFast if gguf_file else transformers.AutoTokenizer
    try:
        found: Any = finder.from_pretrained(model, trust_remote_code=False, **more)
    except Exception as error:  # of dozens of kinds: each says that this tokenizer is not to be had
        raise ConfigError(_why(name, error)) from error
    if gguf_file:
        from toolyard.gguf import mend_tokenizer

        mend_tokenizer(found, Path(model) / gguf_file)
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
    """As `apply_chat_template` does it, up to where the assistant speaks; None if the template refuses."""
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
            f"the tokenizer of {name!r} is neither a local folder nor to be had from the hub: {_first_line(error)} "
            "(offline, give the path of a folder with tokenizer.json and tokenizer_config.json)"
        )
    return f"{name}: its tokenizer cannot be read: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"[:300]


def _stop_tokens(model: str) -> tuple[int, ...]:
    try:
        file: Any = transformers.utils.hub.cached_file(model, "generation_config.json")
    except OSError:  # it has none
        return ()
    return stop_tokens_of(Path(file)) if file else ()


class PythonTokenizer:
    """A `Tokenizer` over one that is written in Python."""

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
        # Cut inside every special text, the parts cannot be taken for it. No switch of the tokenizer is touched.
        cuts = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        return [number for start, end in pairwise(cuts) for number in self.encode(text[start:end])]

    def decode(self, ids: Ids) -> str:
        return self._found.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
