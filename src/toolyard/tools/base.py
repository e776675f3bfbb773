"""The interface of a tool, as the seeds have it.

A tool is one object for a whole run; an *instance* is its state for one trajectory, known by `instance_id`. Who runs
trajectories calls `create` once, `execute` any number of times, also at the same time, then `calc_reward` and `release`
once each, whatever happened: see `toolyard.tools.instance`, which makes sure of it. Each may run in a task of its own,
so what must be entered and left in one task (a `TaskGroup`, a time-out) cannot span two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import BaseModel, field_validator

from toolyard.errors import ConfigError
from toolyard.messages import OpenAIFunctionToolSchema


class ToolType(StrEnum):
    NATIVE = "native"
    """A class of Python."""
    MCP = "mcp"
    """Tools of a server that speaks the Model Context Protocol."""


class ToolResponse(BaseModel):
    """What the model gets to see of a call."""

    text: str | None = None
    """Always encodable: half an emoji would end a trajectory in its tokenizer, or its record in the file."""
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
            raise ValueError(f"expected a list, also for a single one: [{type(value).__name__}]")
        return value  # pyright: ignore[reportUnknownVariableType]

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """Inherit, and override what the tool needs.

    `config` is the tool's part of the YAML file. `tool_schema` may be left out where `get_openai_tool_schema` is
    overridden to make one.
    """

    call_defaults: ClassVar[Mapping[str, Any]] = {}
    """Of the key `call` of its config (see `CallPolicy`), where a tool needs others than most."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema: OpenAIFunctionToolSchema = own_schema(tool_schema) or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """How the tool is shown to a model."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise ConfigError(f"{type(self).__name__} has no schema of its own: give it a tool_schema")
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a trajectory. What is returned besides the id reaches the conversation, if it is not empty."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """One call: what the model sees, a step reward or None, and metrics."""
        return ToolResponse(), None, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the trajectory's use of this tool was worth in the end."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory: let go of everything that belongs to it."""

    async def close(self) -> None:
        """End of the run: let go of what belongs to no trajectory. Not of the seeds; tools without it are fine."""


def own_schema(schema: Any) -> OpenAIFunctionToolSchema | None:
    """Ours, whatever class a framework made it with."""
    if schema is None or isinstance(schema, OpenAIFunctionToolSchema):
        return schema
    if isinstance(schema, BaseModel):
        schema = schema.model_dump(exclude_unset=True)
    if not isinstance(schema, Mapping):
        raise ConfigError(f"a tool_schema is a mapping or a schema object, not {type(schema).__name__}")
    return OpenAIFunctionToolSchema.model_validate(schema)
