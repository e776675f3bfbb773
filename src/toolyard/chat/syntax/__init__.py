"""The syntaxes in which models write calls, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from toolyard.chat.syntax.base import TextSyntax
from toolyard.chat.syntax.code_block import CodeBlock
from toolyard.chat.syntax.harmony import Harmony
from toolyard.chat.syntax.listed import (
    Apertus,
    Apriel,
    Command7B,
    CommandR,
    GigaChat,
    Granite3,
    MiniMaxM1,
    NemotronNano2,
)
from toolyard.chat.syntax.pythonic import Lfm2
from toolyard.chat.syntax.tagged import DeepSeekV3, Functionary31, Gemma4, Hermes, KimiK2, SolarOpen
from toolyard.chat.syntax.untagged import Llama3, Mistral
from toolyard.chat.syntax.xml import (
    Atem,
    Dsml,
    DsmlV4,
    Glm45,
    Hy3,
    KimiK3,
    MiniCpm5,
    MiniMaxM2,
    MiniMaxM3,
    Qwen3Coder,
    SeedOss,
)
from toolyard.errors import ConfigError

_ROWS: tuple[type[TextSyntax], ...] = (
    Hermes, Qwen3Coder, Llama3, Mistral, DeepSeekV3, Glm45, KimiK2, MiniMaxM2, Harmony, CodeBlock, Dsml, DsmlV4, Gemma4,
    SeedOss, Lfm2, Command7B, CommandR, MiniMaxM1, MiniMaxM3, Apriel, NemotronNano2, Granite3, GigaChat, Apertus,
    Functionary31, SolarOpen, Hy3, Atem, MiniCpm5, KimiK3,
)  # fmt: skip
SYNTAXES: Mapping[str, Callable[..., TextSyntax]] = MappingProxyType({row.name: row for row in _ROWS})
SIGNED_SYNTAXES = tuple(syntax for syntax in (make() for make in SYNTAXES.values()) if syntax.sign)
"""Those that can be recognized in a turn of another format."""
CALL_NAME = re.compile(r"[\w.:/-]{1,64}")
"""A syntax that finds other names is not the one the model calls in."""


def syntax_of(name: str, **options: Any) -> TextSyntax:
    """Return the syntax named `name`. `code_block` takes `tool` and `argument`; all but `harmony` take
    `calls_end_thinking`.

    Raises:
        ConfigError: the name or an option is unknown.
    """
    make = SYNTAXES.get(name)
    if make is None:
        raise ConfigError(f"unknown tool-call syntax {name!r}; expected one of {', '.join(SYNTAXES)}")
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"tool-call syntax {name!r}: {error}") from None
