"""OpenAI's completions: `POST /v1/completions`. Text or tokens in, text out; no chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from toolyard.gateway.api.chat_completions import (
    MOST_SAMPLES,
    ChatCompletions,
    finish_reason,
    refuse_what_is_not_enforced,
)
from toolyard.gateway.api.exchange import (
    ApiError,
    Question,
    Reply,
    Said,
    event,
    flag,
    invalid,
    numbers,
    pieces,
    stop_texts,
    text_field,
    whole_number,
)
from toolyard.messages import JSON

_NOT_ENFORCED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "echo": (None, False),
    "best_of": (None, 1),
}


class Completions:
    path = "/completions"
    ping = ChatCompletions.ping

    def read(self, body: JSON) -> Question:
        refuse_what_is_not_enforced(body, _NOT_ENFORCED)
        sampling = numbers(body, {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)})
        for name, least in (("max_tokens", 1), ("seed", -(1 << 63)), ("top_k", -1)):
            if (value := whole_number(body, name, least=least)) is not None:
                sampling[name] = value
        if stop := stop_texts(body, "stop"):
            sampling["stop"] = stop
        n = whole_number(body, "n", least=1, default=1) or 1
        if n > MOST_SAMPLES:
            raise invalid("n", f"expected at most {MOST_SAMPLES}")
        return Question(
            model=text_field(body, "model", "default"),
            prompt=_prompt(body.get("prompt")),
            sampling=sampling,
            stream=flag(body, "stream"),
            n=n,
            reads_calls=False,
            options={"logprobs": whole_number(body, "logprobs", least=0) is not None},
        )

    def answer(self, question: Question, reply: Reply) -> JSON:
        choices = [_choice(question, index, said, said.message.content) for index, said in enumerate(reply.said)]
        prompt, completion = reply.said[0].prompt_tokens, sum(said.completion_tokens for said in reply.said)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**_head(question, reply), "choices": choices, "usage": usage}

    def events(self, question: Question, reply: Reply) -> Iterator[bytes]:
        for index, said in enumerate(reply.said):
            for piece in pieces(said.message.content):
                choice = {"index": index, "text": piece, "finish_reason": None, "logprobs": None}
                yield event({**_head(question, reply), "choices": [choice]})
            yield event({**_head(question, reply), "choices": [_choice(question, index, said, "")]})
        yield b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> JSON:
        return ChatCompletions().error(error)

    def error_event(self, error: ApiError) -> bytes:
        return ChatCompletions().error_event(error)


def _prompt(given: Any) -> str | list[int]:
    if isinstance(given, list):
        listed = cast("list[Any]", given)
        if len(listed) == 1 and isinstance(listed[0], str | list):
            return _prompt(listed[0])
        if listed and all(type(one) is int for one in listed):
            return listed
        raise invalid("prompt", "expected a string, a list of token ids, or a list with one of these")
    if not isinstance(given, str) or not given:
        raise invalid("prompt", "expected a string that is not empty, or a list of token ids")
    return given


def _head(question: Question, reply: Reply) -> JSON:
    return {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": reply.created, "model": question.model}


def _choice(question: Question, index: int, said: Said, text: str) -> JSON:
    logprobs = None
    if question.options["logprobs"] and said.logprobs is not None:
        logprobs = {"tokens": list(said.token_texts), "token_logprobs": list(said.logprobs), "top_logprobs": None}
    return {"index": index, "text": text, "finish_reason": finish_reason(said), "logprobs": logprobs}
