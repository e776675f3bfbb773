"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolyard.engines.protocol import Finish
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
from toolyard.messages import JSON, Message, OpenAIFunctionToolSchema

NOT_ENFORCED: Mapping[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "functions": (None, []),
}
"""Parameters that would change what the model samples and that engines do not apply, with the values that change
nothing. Anything else is refused: an agent that relies on them would be trained on something else than it asked for."""
_BOUNDS = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}
MOST_SAMPLES = 128


class ChatCompletions:
    path = "/chat/completions"
    ping = b": ping\n\n"

    def read(self, body: JSON) -> Question:
        refuse_what_is_not_enforced(body, NOT_ENFORCED)
        messages = [_message(index, raw) for index, raw in enumerate(a_list(body.get("messages"), "messages"))]
        tools = [_tool(index, raw) for index, raw in enumerate(a_list(body.get("tools") or [], "tools"))]
        most = whole_number(body, "max_completion_tokens", least=1) or whole_number(body, "max_tokens", least=1)
        sampling = numbers(body, _BOUNDS) | ({} if most is None else {"max_tokens": most})
        if (seed := whole_number(body, "seed", least=-(1 << 63))) is not None:
            sampling["seed"] = seed
        if (top_k := whole_number(body, "top_k", least=-1)) is not None:
            sampling["top_k"] = top_k
        if stop := stop_texts(body, "stop"):
            sampling["stop"] = stop
        n = whole_number(body, "n", least=1, default=1) or 1
        if n > MOST_SAMPLES:
            raise invalid("n", f"expected at most {MOST_SAMPLES}")
        streaming: Any = body.get("stream_options") or {}
        return Question(
            model=text_field(body, "model", "default"),
            messages=tuple(messages),
            tools=tuple(tools),
            sampling=sampling,
            stream=flag(body, "stream"),
            n=n,
            reads_calls=chooses_tools(body.get("tool_choice")),
            options={
                "logprobs": flag(body, "logprobs"),
                "usage": bool(an_object(streaming, "stream_options").get("include_usage")),
            },
        )

    def answer(self, question: Question, reply: Reply) -> JSON:
        choices = [
            {
                "index": index,
                "message": _written(said.message),
                "finish_reason": finish_reason(said),
                "logprobs": _logprobs(said) if question.options["logprobs"] else None,
            }
            for index, said in enumerate(reply.said)
        ]
        return {**_head(question, reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}

    def events(self, question: Question, reply: Reply) -> Iterator[bytes]:
        head = _head(question, reply, "chat.completion.chunk")

        def chunk(index: int, delta: JSON, reason: str | None = None, logprobs: JSON | None = None) -> bytes:
            choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
            return event({**head, "choices": [choice]})

        for index, said in enumerate(reply.said):
            message = said.message
            yield chunk(index, {"role": "assistant", "content": ""})
            for piece in pieces(message.reasoning_content or ""):
                yield chunk(index, {"reasoning_content": piece})
            for piece in pieces(message.content):
                yield chunk(index, {"content": piece})
            for number, call in enumerate(message.tool_calls):
                opening = {"name": call.name, "arguments": ""}
                begun = {"index": number, "id": call.id, "type": "function", "function": opening}
                yield chunk(index, {"tool_calls": [begun]})
                for piece in pieces(call.arguments):
                    yield chunk(index, {"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
            yield chunk(index, {}, finish_reason(said), _logprobs(said) if question.options["logprobs"] else None)
        if question.options["usage"]:
            yield event({**head, "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> JSON:
        return {"error": {"message": str(error), "type": error.type, "param": error.param, "code": error.code}}

    def error_event(self, error: ApiError) -> bytes:
        return event(self.error(error))


def refuse_what_is_not_enforced(body: JSON, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in harmless.items():
        if name in body and body[name] not in values:
            raise unsupported(name, "the gateway cannot enforce it; omit it")


def chooses_tools(choice: Any) -> bool:
    """Whether the model may call tools.

    Raises:
        ApiError: it must call one: sampling cannot be forced to.
    """
    if choice in (None, "auto", "none"):
        return choice != "none"
    raise unsupported("tool_choice", "only auto and none: the gateway cannot make the model call a tool")


def finish_reason(said: Said) -> str:
    if said.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if said.message.tool_calls else "stop"


def _message(index: int, raw: Any) -> Message:
    given = an_object(raw, f"messages[{index}]")
    for name in ("tool_call_id", "name", "reasoning_content"):
        if not isinstance(given.get(name, ""), str | None):
            raise invalid(f"messages[{index}].{name}", "expected a string")
    try:
        return Message.from_openai(given)
    except (ValueError, TypeError) as error:
        raise invalid(f"messages[{index}]", str(error)) from None


def _tool(index: int, raw: Any) -> OpenAIFunctionToolSchema:
    given, param = an_object(raw, f"tools[{index}]"), f"tools[{index}].function"
    if given.get("type", "function") != "function":
        raise unsupported(f"tools[{index}].type", f"only function, not {given['type']!r}")
    return tool_schema(an_object(given.get("function"), param), param)


def _head(question: Question, reply: Reply, kind: str) -> JSON:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": question.model}


def _written(message: Message) -> JSON:
    written: JSON = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    if message.reasoning_content is not None:
        written["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        written["tool_calls"] = message.as_openai()["tool_calls"]
    return written


def _logprobs(said: Said) -> JSON | None:
    if said.logprobs is None:
        return None
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(said.token_texts, said.logprobs, strict=True)
        ]
    }


def _usage(reply: Reply) -> JSON:
    prompt, completion = reply.said[0].prompt_tokens, sum(said.completion_tokens for said in reply.said)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reply.said[0].cached_tokens},
    }
