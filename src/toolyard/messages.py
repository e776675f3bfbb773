"""What models and tools say to each other, in OpenAI's shapes and the seeds' names.

Schemas keep the whole of JSON Schema: what a field here does not know by name stays where it was, so nested objects,
`anyOf`, `$ref` and the rest reach the model and the validator as their author wrote them.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

JSON = dict[str, Any]


class _Schema(BaseModel):
    """Keeps unknown keys, and says nothing that was not said: a field that was left out is not written as null."""

    model_config = ConfigDict(extra="allow")

    @model_serializer(mode="wrap")
    def _as_given(self, serialise: SerializerFunctionWrapHandler) -> JSON:
        written: JSON = serialise(self)
        return {key: value for key, value in written.items() if value is not None or key in self.model_fields_set}


class OpenAIFunctionPropertySchema(_Schema):
    """One parameter: any JSON Schema."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    """All parameters: a JSON Schema of an object."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict[str, OpenAIFunctionPropertySchema])
    required: list[str] = Field(default_factory=list[str])


class OpenAIFunctionSchema(_Schema):
    name: str = Field(min_length=1)
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Schema):
    """A tool, as it is shown to a model."""

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as a parser found it: the arguments are still text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with its arguments decoded."""

    name: str
    arguments: JSON

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, and whether its arguments could not be decoded: then they are empty."""
        arguments, problem = decode_arguments(parsed_schema.arguments)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments), problem is not None


class OpenAIFunctionToolCall(BaseModel):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


def decode_arguments(text: str) -> tuple[JSON, str | None]:
    """A call's arguments, and what is wrong with them if they are not a JSON object, in words a model can act on."""
    try:
        found: Any = json.loads(text, parse_constant=_not_json)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        return {}, f"the arguments are not valid JSON: {error.msg} (character {error.pos}, near {near!r})"
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        return {}, f"the arguments are not valid JSON: {error}"
    if not isinstance(found, dict):
        return {}, f"the arguments are not a JSON object, but {_kind(found)}"
    return found, None  # pyright: ignore[reportUnknownVariableType]


def _not_json(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return "a string" if isinstance(value, str) else "an array" if isinstance(value, list) else "a number"
