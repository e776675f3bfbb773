"""The tool interface, compatible with verl's.

A tool is one object for a whole run; an *instance* is its state for one trajectory, identified by `instance_id`. Every
trajectory calls `create` once, `execute` any number of times, possibly concurrently, then `calc_reward` and `release`
once each, whatever happened; `toolyard.tools.instance` guarantees this. Each method may run in its own task, so
anything that must be entered and left in one task (a `TaskGroup`, a timeout) cannot span two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, field_validator

from toolyard.errors import ConfigError
from toolyard.messages import OpenAIFunctionToolSchema


class ToolType(StrEnum):
    NATIVE = "native"
    """A Python class."""
    MCP = "mcp"
    """The tools of a Model Context Protocol server."""


class ToolResponse(BaseModel):
    """What the model sees of a call."""

    text: str | None = None
    """Always encodable: a lone surrogate would fail in the tokenizer, or when the trajectory is written."""
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("text")
    @classmethod
    def _is_encodable(cls, text: str | None) -> str | None:
        if text is None or text.isascii():
            return text
        return text.encode("utf-8", "backslashreplace").decode()

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"expected a list, even for a single item: [{type(value).__name__}]")
        return value  # pyright: ignore[reportUnknownVariableType]

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """Subclass it and override what the tool needs.

    `config` is the tool's section of the YAML file. `tool_schema` may be omitted if `get_openai_tool_schema` is
    overridden.
    """

    call_defaults: Mapping[str, Any] = {}
    """Defaults for the key `call` of its config (see `CallPolicy`), where this tool needs different ones."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema: OpenAIFunctionToolSchema = to_tool_schema(tool_schema) or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema shown to the model."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise ConfigError(f"{type(self).__name__} has no schema of its own: give it a tool_schema")
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Start a trajectory. A response that is not empty is added to the conversation."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run one call. Return what the model sees, a step reward or None, and metrics."""
        return ToolResponse(), None, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward for the trajectory's use of this tool."""
        return 0.0

    async def explain_reward(self, instance_id: str) -> Mapping[str, Any] | None:
        """Explain the result of `calc_reward`, which has just returned: `reason`, `extracted`, `expected`, each of them
        optional. Not part of verl's interface."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory: release everything that belongs to it."""

    async def close(self) -> None:
        """End the run: release what is shared between trajectories. Not part of verl's interface; optional."""


def to_tool_schema(schema: Any) -> OpenAIFunctionToolSchema | None:
    """Convert a schema made by another framework to our class."""
    if schema is None or isinstance(schema, OpenAIFunctionToolSchema):
        return schema
    if isinstance(schema, BaseModel):
        schema = schema.model_dump(exclude_unset=True)
    if not isinstance(schema, Mapping):
        raise ConfigError(f"tool_schema must be a mapping or a schema object, not {type(schema).__name__}")
    return OpenAIFunctionToolSchema.model_validate(schema)
