"""A user simulator: who answers when the assistant has stopped calling tools."""

from __future__ import annotations

import importlib
from typing import Any

from toolyard.errors import ConfigError
from toolyard.messages import JSON


class BaseInteraction:
    """Inherit, and override what the simulator needs. One object for a whole run; `instance_id` is the request's id.

    `kwargs` are the task's `interaction_kwargs`.
    """

    def __init__(self, config: JSON | None = None) -> None:
        self.config = config or {}

    async def start(self, instance_id: str, **kwargs: Any) -> None:
        """Begin a request."""

    async def generate_response(
        self, instance_id: str, messages: list[JSON], **kwargs: Any
    ) -> tuple[bool, str, float | None, JSON]:
        """Answer the assistant's last message (OpenAI's JSON): whether the conversation is over, what the user says,
        a reward for this turn or None, and metrics."""
        return True, "", None, {}

    async def score(self, instance_id: str, **kwargs: Any) -> float | None:
        """What the whole conversation was worth, or None. Asked once, at the end."""
        return None

    async def finalize(self, instance_id: str, **kwargs: Any) -> None:
        """End a request: always, also after failures."""


def load_interaction(class_name: str, config: JSON) -> BaseInteraction:
    """Of a dotted name, `module.Class`.

    Raises:
        ConfigError: there is no such class, or it refuses the config.
    """
    module_name, _, name = class_name.rpartition(".")
    try:
        made: Any = getattr(importlib.import_module(module_name), name)(config)
    except Exception as error:
        raise ConfigError(f"interaction {class_name!r}: {type(error).__name__}: {error}") from error
    if not isinstance(made, BaseInteraction):
        raise ConfigError(f"interaction {class_name!r}: expected a class that inherits from BaseInteraction")
    return made
