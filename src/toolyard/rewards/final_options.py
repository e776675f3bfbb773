"""Options of a final reward, checked by the model that documents them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from toolyard.errors import ConfigError

T = TypeVar("T", bound=BaseModel)

_VALUE_CHARS = 80


def read_options(model: type[T], options: Mapping[str, Any], **fixed: Any) -> T:
    """The settings that `options` are; `fixed` ones are no options.

    Raises:
        ConfigError: an option is unknown or wrong; the message names it, and the known ones.
    """
    known = ", ".join(key for key in model.model_fields if key not in fixed)
    if taken := [key for key in options if key in fixed]:
        raise ConfigError(f"unknown option {taken[0]!r}; known: {known}")
    try:
        return model.model_validate({**options, **fixed})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            raise ConfigError(f"unknown option {where!r}; known: {known}") from None
        raise ConfigError(f"option {where!r}: {first['msg']}; given: {str(first['input'])[:_VALUE_CHARS]!r}") from None
