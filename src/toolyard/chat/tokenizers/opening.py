"""Find a model's tokenizer.

A folder with a `tokenizer.json` is read by the `tokenizers` library alone, in a fraction of the time it takes to import
`transformers`. Everything else (hub ids, GGUF files, tokenizers written in Python) goes through `transformers`.
"""

from __future__ import annotations

import re
from pathlib import Path

from toolyard.chat.protocol import Tokenizer
from toolyard.errors import ConfigError, MissingDependencyError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_tokenizer(model: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder, a .gguf file, or a model on the Hugging Face hub. Threads may share it.

    Raises:
        ConfigError: there is none, or it cannot be read; the message says where it was expected.
    """
    path = Path(model).expanduser()
    if path.name == "tokenizer.json" and path.is_file():
        path = path.parent
    if path.is_dir():
        return _of_folder(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return _by_transformers(str(path.parent), name=str(path), gguf_file=path.name)
        raise ConfigError(f"{path}: no tokenizer: expected a folder with a tokenizer.json, a .gguf file, or a hub id")
    if not _HUB_ID.fullmatch(str(model)) or str(model).endswith(".gguf"):
        raise ConfigError(f"{model}: no such file or folder, and not a valid hub id")
    return _by_transformers(str(model), name=str(model))


def _of_folder(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _by_transformers(str(folder), name=str(ggufs[0]), gguf_file=ggufs[0].name)
        if not (folder / "tokenizer_config.json").is_file():
            seen = f"{len(ggufs)} .gguf files: name one of them" if ggufs else "neither it nor a tokenizer_config.json"
            raise ConfigError(f"{folder}: no tokenizer: looked for tokenizer.json, found {seen}")
        return _by_transformers(str(folder), name=str(folder))
    try:
        from toolyard.chat.tokenizers.fast import read_folder
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return read_folder(folder) or _by_transformers(str(folder), name=str(folder))


def _by_transformers(model: str, *, name: str, gguf_file: str | None = None) -> Tokenizer:
    try:
        from toolyard.chat.tokenizers.transformers import load
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    return load(model, name=name, gguf_file=gguf_file)


def _missing(error: ModuleNotFoundError) -> MissingDependencyError:
    return MissingDependencyError(error.name or "tokenizers", "chat", "reading a tokenizer")
