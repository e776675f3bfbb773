"""What all APIs of the gateway have in common: a question, its reply, and the errors in between.

An API is a pure translation: it reads a request's JSON as a `Question`, and writes a `Reply` as JSON or as the events
of a stream. None of them knows sessions or engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from toolyard.engines.protocol import Finish
from toolyard.messages import JSON, Message, OpenAIFunctionToolSchema


class ApiError(Exception):
    """The request is answered with an error, in the form that the API's clients expect.

    Clients repeat a request that failed with 408, 409, 429 or 5xx. A limit must therefore have another status.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """For programs, such as `context_length_exceeded`."""
        self.param = param
        """The field of the request that it is about."""
        self.type = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""OpenAI and Anthropic name them alike; their SDKs go by the status."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request for one assistant turn, whatever API it came by."""

    model: str
    """The name that the client gave. Any name is accepted, and repeated in the reply."""
    messages: tuple[Message, ...] = ()
    tools: tuple[OpenAIFunctionToolSchema, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The fields of `Sampling` that the request sets."""
    stream: bool = False
    n: int = 1
    """How many turns to sample; each is a branch."""
    reads_calls: bool = True
    """False: the answer is text, even if it looks like calls (`tool_choice: none`)."""
    prompt: str | list[int] | None = None
    """Instead of messages: text or tokens to continue, without a chat template."""
    previous: str | None = None
    """The id of a reply in the same session whose conversation `messages` continue."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What only its API needs to write the reply."""


@dataclass(frozen=True, slots=True)
class Said:
    """One sampled turn, as the client gets it."""

    message: Message
    finish: Finish
    """STOP or LENGTH."""
    stop_text: str | None = None
    """The client's stop text that ended it; it is not in the message."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    token_ids: Sequence[int] = ()
    token_texts: Sequence[str] = ()
    """For clients that ask for logprobs; otherwise empty."""
    logprobs: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    id: str
    """Unique; without the prefix that an API puts before it."""
    created: int
    """Unix seconds."""
    said: tuple[Said, ...]
    """One, or `Question.n`."""


class Api(Protocol):
    """One API of the gateway."""

    path: str
    """Below `/v1`."""
    ping: bytes
    """An event of a stream that clients ignore: it shows that the gateway is still there."""

    def read(self, body: JSON) -> Question:
        """Raises ApiError: the request is invalid, or asks for something that the gateway does not do."""
        ...

    def answer(self, question: Question, reply: Reply) -> JSON: ...

    def events(self, question: Question, reply: Reply) -> Iterator[bytes]:
        """The reply as a stream of server-sent events."""
        ...

    def error(self, error: ApiError) -> JSON: ...

    def error_event(self, error: ApiError) -> bytes:
        """The error, in a stream that has begun."""
        ...


# Writing --------------------------------------------------------------------------------------------------------------


def event(data: JSON, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {written(data)}\n\n".encode()


def written(data: JSON) -> str:
    """As JSON, in ASCII: a model may sample half of a surrogate pair, which UTF-8 cannot express."""
    return json.dumps(data, separators=(",", ":"))


def pieces(text: str) -> Iterator[str]:
    """`text` as a stream delivers it. A turn is sampled and parsed as a whole before it is sent."""
    for start in range(0, len(text), 64):
        yield text[start : start + 64]


# Reading --------------------------------------------------------------------------------------------------------------


def unsupported(param: str, what: str) -> ApiError:
    return ApiError(400, f"{param}: {what}", code="unsupported_parameter", param=param)


def invalid(param: str, what: str) -> ApiError:
    return ApiError(400, f"{param}: {what}", code="invalid_value", param=param)


def an_object(value: Any, param: str) -> JSON:
    if not isinstance(value, dict):
        raise invalid(param, "expected an object")
    return cast("JSON", value)


def a_list(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(param, "expected a list")
    return cast("list[Any]", value)


def text_field(body: JSON, name: str, default: str = "") -> str:
    value: Any = body.get(name, default)
    if not isinstance(value, str):
        raise invalid(name, "expected a string")
    return value


def flag(body: JSON, name: str) -> bool:
    value: Any = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, "expected true or false")
    return bool(value)


def whole_number(body: JSON, name: str, *, least: int, default: int | None = None) -> int | None:
    value: Any = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise invalid(name, f"expected an integer of at least {least}")
    return value


def numbers(body: JSON, names: Mapping[str, tuple[float, float]]) -> JSON:
    """The fields of `body` that are set, checked to be numbers within their bounds."""
    found: JSON = {}
    for name, (least, most) in names.items():
        value: Any = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise invalid(name, f"expected a number from {least:g} to {most:g}")
        found[name] = value
    return found


def stop_texts(body: JSON, name: str) -> tuple[str, ...]:
    value: Any = body.get(name)
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else a_list(value, name)
    if not all(isinstance(text, str) and text for text in listed):
        raise invalid(name, "expected a string, or a list of strings")
    return tuple(listed)


def tool_schema(function: JSON, param: str) -> OpenAIFunctionToolSchema:
    """A tool from OpenAI's function object: name, description, parameters."""
    given = {key: value for key, value in function.items() if key in ("name", "description", "parameters") and value}
    try:
        tool = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": given})
        tool.model_dump_json()
    except ValidationError as error:
        first = error.errors()[0]
        raise invalid(f"{param}.{'.'.join(map(str, first['loc'][1:]))}", first["msg"]) from None
    except (PydanticSerializationError, RecursionError, ValueError):  # half of a surrogate pair; nested too deeply
        raise invalid(param, "it cannot be written as JSON") from None
    return tool
