"""Convert a GGUF file to an ordinary Hugging Face folder, which loads in a second instead of half a minute.

`python -m toolyard.engines.transformers.gguf GGUF FOLDER`: a separate process, because reading GGUF takes several times
the model's memory, and prints progress bars that cannot be disabled.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from toolyard.gguf import fix_tokenizer

_models: Any = transformers.AutoModelForCausalLM
_tokenizers: Any = transformers.AutoTokenizer


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (float32, exactly the numbers in `gguf`), generation_config.json and the
    tokenizer's files into `folder`.

    Raises whatever transformers raises for an invalid GGUF file or an architecture that it cannot read.
    """
    _save_tokenizer(gguf, folder, context=_save_model(gguf, folder))


def _save_model(gguf: Path, folder: Path) -> int:
    """Save the model and return its context length, keeping nothing that holds its weights in memory."""
    model = _plain_model(gguf)
    model.save_pretrained(folder)
    return model.config.max_position_embeddings


def _plain_model(gguf: Path) -> Any:
    """Return the dequantized model, unmarked as such: transformers refuses to save a model that was quantized."""
    loaded = _models.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    with torch.device("meta"):
        plain = _models.from_config(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain


def _save_tokenizer(gguf: Path, folder: Path, context: int) -> None:
    tokenizer = _tokenizers.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fix_tokenizer(tokenizer, gguf)
    tokenizer.model_max_length = context
    tokenizer.save_pretrained(folder)


def _read_once() -> None:
    """Cache the header of the file, which transformers reads four times, and the table of names, which it rebuilds for
    each module of a model. Together they took most of the time; this process is for one file."""
    import gguf

    class Reader(gguf.GGUFReader):
        """Stores its views, several per listed token, as plain arrays: cheaper to make and keep than memmaps."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(type(mapped).__base__)  # from a memmap to the plain array

    patched: Any = gguf
    patched.GGUFReader = functools.cache(Reader)
    patched.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


if __name__ == "__main__":
    _read_once()
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
