"""OpenAI's responses: `POST /v1/responses`.

Here a conversation is a list of items, and one assistant turn is several of them: its reasoning, its text, and one item
per call. Reading joins them into one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

from toolyard.engines.protocol import Finish
from toolyard.gateway.api.chat_completions import (
    NOT_ENFORCED,
    ChatCompletions,
    chooses_tools,
    refuse_what_is_not_enforced,
)
from toolyard.gateway.api.exchange import (
    ApiError,
    Question,
    Reply,
    Said,
    a_list,
    an_object,
    event,
    flag,
    invalid,
    numbers,
    pieces,
    text_field,
    tool_schema,
    unsupported,
    whole_number,
)
from toolyard.messages import JSON, Message, OpenAIFunctionToolSchema, ToolCall

_REFUSED = {
    "background": "every request is answered at once; leave it out",
    "conversation": "the gateway stores no conversations; send all items as input, or previous_response_id",
    "prompt": "the gateway stores no prompt templates; send instructions and input",
}
_ECHOED: JSON = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that the response repeats, with their values if they are not set."""
_ROLES = ("user", "assistant", "system", "developer")


class Responses:
    path = "/responses"
    ping = ChatCompletions.ping

    def read(self, body: JSON) -> Question:
        for name, why in _REFUSED.items():
            if body.get(name):
                raise unsupported(name, why)
        refuse_what_is_not_enforced(body, NOT_ENFORCED)
        _only_text(body.get("text"))
        messages = _conversation(body.get("input"))
        if instructions := _text_or_null(body, "instructions"):
            messages.insert(0, Message("system", instructions))
        tools = [_tool(index, raw) for index, raw in enumerate(a_list(body.get("tools") or [], "tools"))]
        sampling = numbers(body, {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)})
        if (most := whole_number(body, "max_output_tokens", least=1)) is not None:
            sampling["max_tokens"] = most
        previous = _text_or_null(body, "previous_response_id")
        return Question(
            model=text_field(body, "model", "default"),
            messages=tuple(messages),
            tools=tuple(tools),
            sampling=sampling,
            stream=flag(body, "stream"),
            reads_calls=chooses_tools(body.get("tool_choice")),
            previous=previous.removeprefix("resp_") if previous else None,
            options={name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()},
        )

    def answer(self, question: Question, reply: Reply) -> JSON:
        (said,) = reply.said
        cut = said.finish is Finish.LENGTH
        return {
            "id": f"resp_{reply.id}",
            "object": "response",
            "created_at": reply.created,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": question.model,
            "output": _output(reply.id, said),
            "usage": _usage(said),
            **question.options,
        }

    def events(self, question: Question, reply: Reply) -> Iterator[bytes]:
        numbered = count()

        def tell(kind: str, **fields: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(numbered), **fields}, kind)

        whole = self.answer(question, reply)
        begun: JSON = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield tell("response.created", response=begun)
        yield tell("response.in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            calls = item["type"] == "function_call"
            empty: JSON = {**item, "status": "in_progress", **({"arguments": ""} if calls else {"content": []})}
            yield tell("response.output_item.added", output_index=index, item=empty)
            yield from _call_events(tell, index, item) if calls else _text_events(tell, index, item)
            yield tell("response.output_item.done", output_index=index, item=item)
        yield tell(f"response.{whole['status']}", response=whole)

    def error(self, error: ApiError) -> JSON:
        return ChatCompletions().error(error)

    def error_event(self, error: ApiError) -> bytes:
        # The documented event has its fields at the top level. OpenAI's SDK raises an exception only for an event with
        # an `error` object, so not for that one, nor for `response.failed`.
        flat = {"type": "error", "sequence_number": 0, "code": error.code, "message": str(error), "param": error.param}
        return event({**flat, **self.error(error)}, "error")


# Reading --------------------------------------------------------------------------------------------------------------


def _conversation(given: Any) -> list[Message]:
    if isinstance(given, str):
        return [Message("user", given)]
    messages: list[Message] = []
    for index, raw in enumerate(a_list(given, "input")):
        part = _item(an_object(raw, f"input[{index}]"), f"input[{index}]")
        if part is None:
            continue
        if messages and _continues(messages[-1], part):
            messages[-1] = _joined(messages[-1], part)
        else:
            messages.append(part)
    return messages


def _item(given: JSON, param: str) -> Message | None:
    """A message, or the part of an assistant's message that the item holds; None if it holds nothing for the model."""
    kind = "message" if given.get("type") is None else string_in(given, "type", param)
    match kind:
        case "message":
            role: Any = given.get("role")
            if role not in _ROLES:
                raise invalid(f"{param}.role", f"expected one of {', '.join(_ROLES)}")
            return Message(role, _text(given.get("content"), f"{param}.content"))
        case "function_call":
            call = ToolCall(*(string_in(given, name, param) for name in ("call_id", "name", "arguments")))
            return Message("assistant", "", tool_calls=(call,))
        case "function_call_output":
            text = _text(given.get("output"), f"{param}.output")
            return Message("tool", text, tool_call_id=string_in(given, "call_id", param))
        case "reasoning":
            # Only what `answer` wrote has content. Reasoning of other servers is encrypted or a summary.
            thought = _text(given.get("content") or "", f"{param}.content", ("reasoning_text",))
            return Message("assistant", "", reasoning_content=thought) if thought else None
        case _:
            raise unsupported(f"{param}.type", f"the gateway has no items of type {kind[:40]!r}")


def _continues(message: Message, part: Message) -> bool:
    """Whether both belong to one turn: reasoning, then at most one text, then calls."""
    if message.role != "assistant" or part.role != "assistant":
        return False
    if part.tool_calls:
        return True
    if part.reasoning_content is not None:
        return not message.content and not message.tool_calls
    return not message.content


def _joined(message: Message, part: Message) -> Message:
    return replace(
        message,
        content=message.content + part.content,
        reasoning_content=(message.reasoning_content or "") + (part.reasoning_content or "") or None,
        tool_calls=message.tool_calls + part.tool_calls,
    )


def _text(content: Any, param: str, kinds: tuple[str, ...] = ("input_text", "output_text")) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, raw in enumerate(a_list(content, param)):
        part = an_object(raw, f"{param}[{index}]")
        if part.get("type") not in kinds:
            raise unsupported(f"{param}[{index}].type", f"only {' and '.join(kinds)}")
        texts.append(string_in(part, "text", f"{param}[{index}]"))
    return "".join(texts)


def string_in(given: JSON, name: str, param: str) -> str:
    value: Any = given.get(name)
    if not isinstance(value, str):
        raise invalid(f"{param}.{name}", "expected a string")
    return value


def _text_or_null(body: JSON, name: str) -> str | None:
    return None if body.get(name) is None else text_field(body, name)


def _only_text(text: Any) -> None:
    if text is None:
        return
    wanted: Any = an_object(text, "text").get("format")
    if wanted is not None and an_object(wanted, "text.format").get("type") != "text":
        raise unsupported("text.format", "the gateway cannot enforce it; omit it")


def _tool(index: int, raw: Any) -> OpenAIFunctionToolSchema:
    given = an_object(raw, f"tools[{index}]")
    if (kind := string_in(given, "type", f"tools[{index}]")) != "function":
        raise unsupported(f"tools[{index}].type", f"only function, not {kind[:40]!r}")
    return tool_schema(given, f"tools[{index}]")


# Writing --------------------------------------------------------------------------------------------------------------


def _output(reply_id: str, said: Said) -> list[JSON]:
    message, items = said.message, list[JSON]()
    if message.reasoning_content:
        thought = {"type": "reasoning_text", "text": message.reasoning_content}
        empty: JSON = {"type": "reasoning", "id": f"rs_{reply_id}", "summary": []}
        items.append({**empty, "content": [thought], "status": "completed"})
    if message.content or not message.tool_calls:
        cut = said.finish is Finish.LENGTH and not message.tool_calls
        part: JSON = {"type": "output_text", "text": message.content, "annotations": []}
        empty = {"type": "message", "id": f"msg_{reply_id}", "role": "assistant"}
        items.append({**empty, "content": [part], "status": "incomplete" if cut else "completed"})
    for number, call in enumerate(message.tool_calls):
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", "id": f"fc_{reply_id}_{number}", **named, "status": "completed"})
    return items


class _Tell(Protocol):
    def __call__(self, kind: str, **fields: Any) -> bytes: ...


def _call_events(tell: _Tell, index: int, item: JSON) -> Iterator[bytes]:
    kind, place = "response.function_call_arguments", {"item_id": item["id"], "output_index": index}
    for piece in pieces(item["arguments"]):
        yield tell(f"{kind}.delta", **place, delta=piece)
    yield tell(f"{kind}.done", **place, name=item["name"], arguments=item["arguments"])


def _text_events(tell: _Tell, index: int, item: JSON) -> Iterator[bytes]:
    """The only part of a message, or of reasoning."""
    (part,) = item["content"]
    kind = f"response.{part['type']}"
    place = {"item_id": item["id"], "output_index": index, "content_index": 0}
    logprobs: JSON = {"logprobs": []} if part["type"] == "output_text" else {}
    yield tell("response.content_part.added", **place, part={**part, "text": ""})
    for piece in pieces(part["text"]):
        yield tell(f"{kind}.delta", **place, delta=piece, **logprobs)
    yield tell(f"{kind}.done", **place, text=part["text"], **logprobs)
    yield tell("response.content_part.done", **place, part=part)


def _usage(said: Said) -> JSON:
    return {
        "input_tokens": said.prompt_tokens,
        "input_tokens_details": {"cached_tokens": said.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": said.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.prompt_tokens + said.completion_tokens,
    }
