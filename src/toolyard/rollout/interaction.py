"""User simulators: they answer the assistant's messages that call no tools."""

from __future__ import annotations

import importlib
from typing import Any

from toolyard.errors import ConfigError
from toolyard.messages import JSON


class BaseInteraction:
    """Subclass it and override what you need. One object serves a whole run; `instance_id` is the request's id.

    `kwargs` are the task's `interaction_kwargs`.
    """

    def __init__(self, config: JSON | None = None) -> None:
        self.config = config or {}

    async def start(self, instance_id: str, **kwargs: Any) -> None:
        """Start a request."""

    async def generate_response(
        self, instance_id: str, messages: list[JSON], **kwargs: Any
    ) -> tuple[bool, str, float | None, JSON]:
        """Answer the assistant's last message. `messages` are in OpenAI's JSON.

        Returns:
            Whether the conversation is over, the user's message, a reward for this turn or None, and metrics.
        """
        return True, "", None, {}

    async def score(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return a reward for the whole conversation, or None. Called once, at the end."""
        return None

    async def finalize(self, instance_id: str, **kwargs: Any) -> None:
        """End a request. Always called, even after failures."""


def load_interaction(class_name: str, config: JSON) -> BaseInteraction:
    """Create a simulator from a dotted name, `module.Class`.

    Raises:
        ConfigError: the class does not exist, or rejects the config.
    """
    module_name, _, name = class_name.rpartition(".")
    try:
        made: Any = getattr(importlib.import_module(module_name), name)(config)
    except Exception as error:
        raise ConfigError(f"interaction {class_name!r}: {type(error).__name__}: {error}") from error
    if not isinstance(made, BaseInteraction):
        raise ConfigError(f"interaction {class_name!r}: expected a subclass of BaseInteraction")
    return made
