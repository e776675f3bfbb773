"""Messages, tool schemas and tool calls, in OpenAI's shapes and with verl's names.

Schemas keep all of JSON Schema: keys without a field here are kept, so nested objects, `anyOf`, `$ref` and the rest
reach the model and the validator as written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from toolyard.images import Image, image_of

JSON = dict[str, Any]


class _Schema(BaseModel):
    """Keeps unknown keys, and does not write omitted fields as null."""

    model_config = ConfigDict(extra="allow")

    @model_serializer(mode="wrap")
    def _as_given(self, serialize: SerializerFunctionWrapHandler) -> JSON:
        written: JSON = serialize(self)
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
    strict: bool | None = None
    """Shown to a model only if set."""


class OpenAIFunctionToolSchema(_Schema):
    """A tool, as shown to a model."""

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
        """Return the call, and whether its arguments could not be decoded; they are empty then."""
        arguments, problem = decode_arguments(parsed_schema.arguments)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments), problem is not None


class OpenAIFunctionToolCall(BaseModel):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in a conversation. The arguments are the model's text and may not be valid JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """For a tool's message: the name of the tool."""
    images: tuple[Image, ...] = ()
    """Shown after the content."""

    def as_openai(self, *, decoded: bool = False) -> JSON:
        """Convert to OpenAI's JSON. `decoded`: arguments become objects if they are valid, as most templates expect."""
        fields: JSON = {"role": self.role, "content": self.content}
        if self.images:
            pictures = [{"type": "image_url", "image_url": {"url": image.url}} for image in self.images]
            fields["content"] = [*([{"type": "text", "text": self.content}] if self.content else ()), *pictures]
        if self.reasoning_content is not None:
            fields["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call, decoded)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            fields["name"] = self.name
        return fields

    @classmethod
    def from_openai(cls, given: Mapping[str, Any], *, max_image_bytes: int = 0) -> Message:
        """Convert from OpenAI's JSON; parts of the content are joined. `max_image_bytes`: limit per image; 0 refuses
        images.

        Raises:
            ValueError: it is not a message, or has parts that are neither text nor acceptable images.
        """
        role, content = given.get("role"), given.get("content")
        images: tuple[Image, ...] = ()
        if not isinstance(role, str) or not role:
            raise ValueError(f"a message needs a role: {str(given)[:80]}")
        if isinstance(content, list):
            parts = cast("list[Any]", content)
            if max_image_bytes:
                images = tuple(image_of(part, max_image_bytes) for part in parts if _is_image(part))
                parts = [part for part in parts if not _is_image(part)]
            content = "".join(map(_text_of_part, parts))
        if content is not None and not isinstance(content, str):
            raise ValueError(f"the content of a message must be text or a list of parts, not {_kind(content)}")
        return cls(
            role=role,
            content=content or "",
            reasoning_content=given.get("reasoning_content"),
            tool_calls=tuple(_call_of(index, call) for index, call in enumerate(given.get("tool_calls") or ())),
            tool_call_id=given.get("tool_call_id"),
            name=given.get("name"),
            images=images,
        )


def developer_as_system(messages: Sequence[Message]) -> list[Message]:
    """Convert developer messages to system messages, for models without that role; one that follows a system message
    is merged into it."""
    converted: list[Message] = []
    for message in messages:
        if message.role == "developer" and converted and converted[-1].role == "system":
            converted[-1] = replace(converted[-1], content=f"{converted[-1].content}\n\n{message.content}")
        else:
            converted.append(replace(message, role="system") if message.role == "developer" else message)
    return converted


def _call_of(index: int, raw: Any) -> ToolCall:
    call = _object(raw)
    function = _object(call.get("function", raw))
    name, given = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str):
        raise ValueError(f"tool_calls[{index}] is not a function call: {str(raw)[:80]}")
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return ToolCall(str(call.get("id") or f"call_{index}"), name, arguments)


def _object(value: Any) -> JSON:
    return cast("JSON", value) if isinstance(value, dict) else {}


def _arguments(call: ToolCall, decoded: bool) -> Any:
    if not decoded:
        return call.arguments
    arguments, problem = decode_arguments(call.arguments)
    return call.arguments if problem else arguments


def _is_image(part: Any) -> bool:
    return _object(part).get("type") == "image_url"


def _text_of_part(part: Any) -> str:
    text = part if isinstance(part, str) else _object(part).get("text")
    if not isinstance(text, str):
        raise ValueError(f"unsupported part of a message (not text): {str(part)[:80]}")
    return text


def decode_arguments(text: str) -> tuple[JSON, str | None]:
    """Decode a call's arguments. The second value says why they are not a JSON object, in words a model can act on."""
    try:
        found: Any = _STRICT.decode(text)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        return {}, f"the arguments are not valid JSON: {error.msg} (character {error.pos}, near {near!r})"
    except RecursionError:  # how deep that is, and its message, depends on the version of Python
        return {}, "the arguments are not valid JSON: nested too deeply"
    except ValueError as error:  # a number of thousands of digits
        return {}, f"the arguments are not valid JSON: {error}"
    if not isinstance(found, dict):
        return {}, f"the arguments are not a JSON object, but {_kind(found)}"
    return found, None  # pyright: ignore[reportUnknownVariableType]


def _not_json(word: str) -> float:
    raise ValueError(f"{word} is not a valid JSON number")


_STRICT = json.JSONDecoder(parse_constant=_not_json)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return "a string" if isinstance(value, str) else "an array" if isinstance(value, list) else "a number"
