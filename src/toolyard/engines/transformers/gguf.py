"""A GGUF file as an ordinary Hugging Face folder, which loads in a second instead of half a minute.

`python -m toolyard.engines.transformers.gguf GGUF FOLDER`: a process of its own, because reading GGUF takes several
times the model's memory, and prints progress bars that nobody can turn off.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from toolyard.gguf import mend_tokenizer

_models: Any = transformers.AutoModelForCausalLM
_tokenizers: Any = transformers.AutoTokenizer


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (float32, exactly the numbers in `gguf`), generation_config.json and the
    tokenizer's files into `folder`.

    Raises whatever transformers does, if it is no GGUF file or one of an architecture that transformers cannot read.
    """
    _save_tokenizer(gguf, folder, context=_save_model(gguf, folder))


def _save_model(gguf: Path, folder: Path) -> int:
    """Returns the model's context, and nothing that would keep its weights in memory."""
    model = _plain_model(gguf)
    model.save_pretrained(folder)
    return model.config.max_position_embeddings


def _plain_model(gguf: Path) -> Any:
    """The dequantised model. A model that knows that it was quantised refuses to be saved: this one never heard."""
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
    mend_tokenizer(tokenizer, gguf)
    tokenizer.model_max_length = context
    tokenizer.save_pretrained(folder)


def _read_once() -> None:
    """Keep the header of the file, which transformers reads four times, and the table of names, which it makes anew for
    each module of a model. Together they took most of the time; this process is for one file."""
    import gguf

    class Reader(gguf.GGUFReader):
        """Its views, several for each token it lists, are plain arrays: cheaper to make and keep than memmaps."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(type(mapped).__base__)  # of a memmap: the plain array

    patched: Any = gguf
    patched.GGUFReader = functools.cache(Reader)
    patched.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


if __name__ == "__main__":
    _read_once()
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
