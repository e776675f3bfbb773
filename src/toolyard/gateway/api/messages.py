"""Anthropic's messages: `POST /v1/messages`.

A message is a list of blocks. Results of tools are blocks of a user's message; they become messages of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from toolyard.engines.protocol import Finish
from toolyard.gateway.api.chat_completions import chooses_tools, refuse_what_is_not_enforced
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
    stop_texts,
    text_field,
    tool_schema,
    unsupported,
    whole_number,
)
from toolyard.gateway.api.responses import string_in
from toolyard.messages import JSON, Message, OpenAIFunctionToolSchema, ToolCall, decode_arguments

_NOT_ENFORCED: dict[str, tuple[Any, ...]] = {
    "output_format": (None,),
    "mcp_servers": (None, []),
    "container": (None,),
}
_TOO_LONG = "prompt is too long"
"""Clients recognize an exceeded context by these words, and shorten the conversation."""


class Messages:
    path = "/messages"
    ping = event({"type": "ping"}, "ping")

    def read(self, body: JSON) -> Question:
        refuse_what_is_not_enforced(body, _NOT_ENFORCED)
        if an_object(body.get("output_config") or {}, "output_config").get("format") is not None:
            raise unsupported("output_config.format", "the gateway cannot enforce it; omit it")
        tools = [_tool(index, raw) for index, raw in enumerate(a_list(body.get("tools") or [], "tools"))]
        choice: Any = body.get("tool_choice")
        most = whole_number(body, "max_tokens", least=1)
        if most is None:
            raise invalid("max_tokens", "required")
        sampling = numbers(body, {"temperature": (0.0, 1.0), "top_p": (0.0, 1.0)}) | {"max_tokens": most}
        if (top_k := whole_number(body, "top_k", least=0)) is not None:
            sampling["top_k"] = top_k
        if stop := stop_texts(body, "stop_sequences"):
            sampling["stop"] = stop
        return Question(
            model=text_field(body, "model", "default"),
            messages=tuple(_conversation(body)),
            tools=tuple(tools),
            sampling=sampling,
            stream=flag(body, "stream"),
            reads_calls=choice is None or chooses_tools(an_object(choice, "tool_choice").get("type")),
        )

    def answer(self, question: Question, reply: Reply) -> JSON:
        (said,) = reply.said
        reason = _stop_reason(said)
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": question.model,
            "content": _content(said.message),
            "stop_reason": reason,
            "stop_sequence": said.stop_text if reason == "stop_sequence" else None,
            "usage": _usage(said),
        }

    def events(self, question: Question, reply: Reply) -> Iterator[bytes]:
        def tell(kind: str, **fields: Any) -> bytes:
            return event({"type": kind, **fields}, kind)

        whole = self.answer(question, reply)
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        begun: JSON = {**whole, "content": [], **dict.fromkeys(ended), "usage": {**whole["usage"], "output_tokens": 0}}
        yield tell("message_start", message=begun)
        for index, block in enumerate(whole["content"]):
            empty, deltas = _as_deltas(block)
            yield tell("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield tell("content_block_delta", index=index, delta=delta)
            yield tell("content_block_stop", index=index)
        yield tell("message_delta", delta=ended, usage=whole["usage"])
        yield tell("message_stop")

    def error(self, error: ApiError) -> JSON:
        message = str(error)
        if error.code == "context_length_exceeded" and not message.startswith(_TOO_LONG):
            message = f"{_TOO_LONG}: {message}"
        return {"type": "error", "error": {"type": error.type, "message": message}}

    def error_event(self, error: ApiError) -> bytes:
        return event(self.error(error), "error")


# Reading --------------------------------------------------------------------------------------------------------------


def _conversation(body: JSON) -> Iterator[Message]:
    if (system := body.get("system")) is not None and (text := _text(system, "system")):
        yield Message("system", text)
    given = a_list(body.get("messages"), "messages")
    if not given:
        raise invalid("messages", "expected at least one message")
    for index, raw in enumerate(given):
        param, message = f"messages[{index}]", an_object(raw, f"messages[{index}]")
        match message.get("role"):
            case "user":
                yield from _from_user(message.get("content"), f"{param}.content")
            case "assistant" if index == len(given) - 1:
                raise invalid(param, "the gateway cannot continue an assistant's message; end with a user's")
            case "assistant":
                yield _from_assistant(message.get("content"), f"{param}.content")
            case "system":
                yield Message("system", _text(message.get("content"), f"{param}.content"))
            case _:
                raise invalid(f"{param}.role", "expected user, assistant or system")


def _from_user(content: Any, param: str) -> Iterator[Message]:
    """The results of tools, then the text."""
    texts: list[str] = []
    results = False
    for where, kind, block in _blocks(content, param):
        match kind:
            case "text":
                texts.append(string_in(block, "text", where))
            case "tool_result":
                results, given = True, block.get("content")
                # A failure, `is_error`, is told to the model by its text alone, as in the other APIs.
                text = "" if given is None else _text(given, f"{where}.content")
                yield Message("tool", text, tool_call_id=string_in(block, "tool_use_id", where))
            case _:
                raise _unknown(where, kind, "text and tool_result")
    if texts or not results:
        yield Message("user", "\n".join(texts))


def _from_assistant(content: Any, param: str) -> Message:
    text, thoughts, calls = "", list[str](), list[ToolCall]()
    for where, kind, block in _blocks(content, param):
        match kind:
            case "text":
                text += string_in(block, "text", where)
            case "thinking":
                thoughts.append(string_in(block, "thinking", where))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = _arguments(an_object(block.get("input"), f"{where}.input"), f"{where}.input")
                calls.append(ToolCall(string_in(block, "id", where), string_in(block, "name", where), arguments))
            case _:
                raise _unknown(where, kind, "text, thinking and tool_use")
    return Message("assistant", text, reasoning_content="".join(thoughts) or None, tool_calls=tuple(calls))


def _arguments(given: JSON, param: str) -> str:
    try:
        return json.dumps(given, ensure_ascii=False)
    except RecursionError:
        raise invalid(param, "nested too deeply") from None


def _text(content: Any, param: str) -> str:
    """What is only text: one, or several blocks."""
    texts: list[str] = []
    for where, kind, block in _blocks(content, param):
        if kind != "text":
            raise _unknown(where, kind, "text")
        texts.append(string_in(block, "text", where))
    return "\n".join(texts)


def _blocks(content: Any, param: str) -> Iterator[tuple[str, str, JSON]]:
    """Where each block is, its type, and itself."""
    listed = [{"type": "text", "text": content}] if isinstance(content, str) else a_list(content, param)
    for index, raw in enumerate(listed):
        block = an_object(raw, f"{param}[{index}]")
        yield f"{param}[{index}]", string_in(block, "type", f"{param}[{index}]"), block


def _unknown(where: str, kind: str, known: str) -> ApiError:
    return unsupported(f"{where}.type", f"only {known}, not {kind[:40]!r}")


def _tool(index: int, raw: Any) -> OpenAIFunctionToolSchema:
    given, param = an_object(raw, f"tools[{index}]"), f"tools[{index}]"
    if given.get("type") is not None and (kind := string_in(given, "type", param)) != "custom":
        raise unsupported(f"{param}.type", f"only custom, not {kind[:40]!r}")
    schema = an_object(given.get("input_schema"), f"{param}.input_schema")
    return tool_schema({**given, "parameters": schema}, param)


# Writing --------------------------------------------------------------------------------------------------------------


def _stop_reason(said: Said) -> str:
    if said.finish is Finish.LENGTH:
        return "max_tokens"
    if said.message.tool_calls:
        return "tool_use"
    return "end_turn" if said.stop_text is None else "stop_sequence"


def _content(message: Message) -> list[JSON]:
    blocks: list[JSON] = []
    if message.reasoning_content:
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += (
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in message.tool_calls
    )
    return blocks


def _input(call: ToolCall) -> JSON:
    """The call's arguments, or {} if they are not a JSON object: this API cannot express anything else. The client then
    sends back {}, not what the model wrote."""
    found, _ = decode_arguments(call.arguments)
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # 1e999, half of a surrogate pair, or too deep: clients could not read it
        return {}
    return found


def _as_deltas(block: JSON) -> tuple[JSON, list[JSON]]:
    """The block as it starts, and what fills it."""
    match block["type"]:
        case "thinking":
            filling = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
            return {**block, "thinking": ""}, [*filling, {"type": "signature_delta", "signature": block["signature"]}]
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        case _:
            text = json.dumps(block["input"], ensure_ascii=False)
            filling = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(text)]
            return {**block, "input": {}}, filling


def _usage(said: Said) -> JSON:
    # Here, unlike in OpenAI's APIs, the prompt's cached tokens are not counted as input.
    return {
        "input_tokens": said.prompt_tokens - said.cached_tokens,
        "output_tokens": said.completion_tokens,
        "cache_read_input_tokens": said.cached_tokens,
        "cache_creation_input_tokens": 0,
    }
