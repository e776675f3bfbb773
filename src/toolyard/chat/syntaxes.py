"""The ways in which calls are written, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from toolyard.chat.syntax_base import TextSyntax
from toolyard.chat.syntax_code_block import CodeBlock
from toolyard.chat.syntax_harmony import Harmony
from toolyard.chat.syntax_tagged import DeepSeekV3, Hermes, KimiK2
from toolyard.chat.syntax_untagged import Llama3, Mistral
from toolyard.chat.syntax_xml import Glm45, MiniMaxM2, Qwen3Coder
from toolyard.errors import ConfigError

SYNTAXES: Mapping[str, Callable[..., TextSyntax]] = MappingProxyType(
    {
        "hermes": Hermes,
        "qwen3_coder": Qwen3Coder,
        "llama3": Llama3,
        "mistral": Mistral,
        "deepseek_v3": DeepSeekV3,
        "glm45": Glm45,
        "kimi_k2": KimiK2,
        "minimax_m2": MiniMaxM2,
        "harmony": Harmony,
        "code_block": CodeBlock,
    }
)


def syntax_of(name: str, **options: Any) -> TextSyntax:
    """The syntax called `name`. `code_block` takes `tool` and `argument`; all but `harmony` take `calls_end_thinking`.

    Raises:
        ConfigError: there is none of that name, or it has no such option.
    """
    make = SYNTAXES.get(name)
    if make is None:
        raise ConfigError(f"unknown tool-call syntax {name!r}; expected one of {', '.join(SYNTAXES)}")
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"tool-call syntax {name!r}: {error}") from None
