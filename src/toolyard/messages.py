"""What models and tools say to each other, in OpenAI's shapes and the seeds' names.

Schemas keep the whole of JSON Schema: what a field here does not know by name stays where it was, so nested objects,
`anyOf`, `$ref` and the rest reach the model and the validator as their author wrote them.
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
    strict: bool | None = None
    """Not shown to a model unless it was said."""


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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in a conversation. The arguments are text, as the model wrote them: they may be no JSON."""

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
    """Of a tool's message: which tool it was."""
    images: tuple[Image, ...] = ()
    """They follow the content."""

    def as_openai(self, *, decoded: bool = False) -> JSON:
        """OpenAI's JSON. `decoded`: arguments as objects where they are objects, as most chat templates want them."""
        said: JSON = {"role": self.role, "content": self.content}
        if self.images:
            pictures = [{"type": "image_url", "image_url": {"url": image.url}} for image in self.images]
            said["content"] = [*([{"type": "text", "text": self.content}] if self.content else ()), *pictures]
        if self.reasoning_content is not None:
            said["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _told(call, decoded)}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            said["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            said["name"] = self.name
        return said

    @classmethod
    def from_openai(cls, said: Mapping[str, Any], *, most_image_bytes: int = 0) -> Message:
        """Of OpenAI's JSON; content in parts is joined. `most_image_bytes`: of an image in it; 0 takes none.

        Raises:
            ValueError: it is no message, or has parts that are not text, nor images that are wanted.
        """
        role, content = said.get("role"), said.get("content")
        images: tuple[Image, ...] = ()
        if not isinstance(role, str) or not role:
            raise ValueError(f"a message needs a role: {str(said)[:80]}")
        if isinstance(content, list):
            parts = cast("list[Any]", content)
            if most_image_bytes:
                images = tuple(image_of(part, most_image_bytes) for part in parts if _is_image(part))
                parts = [part for part in parts if not _is_image(part)]
            content = "".join(map(_text_of_part, parts))
        if content is not None and not isinstance(content, str):
            raise ValueError(f"the content of a message is text, or a list of parts, not {_kind(content)}")
        return cls(
            role=role,
            content=content or "",
            reasoning_content=said.get("reasoning_content"),
            tool_calls=tuple(_call_of(index, call) for index, call in enumerate(said.get("tool_calls") or ())),
            tool_call_id=said.get("tool_call_id"),
            name=said.get("name"),
            images=images,
        )


def developer_as_system(messages: Sequence[Message]) -> list[Message]:
    """For who does not know that role: what the developer says is said by the system, in one message with what it
    said just before."""
    said: list[Message] = []
    for message in messages:
        if message.role == "developer" and said and said[-1].role == "system":
            said[-1] = replace(said[-1], content=f"{said[-1].content}\n\n{message.content}")
        else:
            said.append(replace(message, role="system") if message.role == "developer" else message)
    return said


def _call_of(index: int, said: Any) -> ToolCall:
    call = _object(said)
    function = _object(call.get("function", said))
    name, given = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str):
        raise ValueError(f"tool_calls[{index}] is no call of a function: {str(said)[:80]}")
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return ToolCall(str(call.get("id") or f"call_{index}"), name, arguments)


def _object(value: Any) -> JSON:
    return cast("JSON", value) if isinstance(value, dict) else {}


def _told(call: ToolCall, decoded: bool) -> Any:
    if not decoded:
        return call.arguments
    arguments, problem = decode_arguments(call.arguments)
    return call.arguments if problem else arguments


def _is_image(part: Any) -> bool:
    return _object(part).get("type") == "image_url"


def _text_of_part(part: Any) -> str:
    text = part if isinstance(part, str) else _object(part).get("text")
    if not isinstance(text, str):
        raise ValueError(f"a part of a message that is not text: {str(part)[:80]}")
    return text


def decode_arguments(text: str) -> tuple[JSON, str | None]:
    """A call's arguments, and what is wrong with them if they are not a JSON object, in words a model can act on."""
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
    raise ValueError(f"{word} is not a number of JSON")


_STRICT = json.JSONDecoder(parse_constant=_not_json)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return "a string" if isinstance(value, str) else "an array" if isinstance(value, list) else "a number"
