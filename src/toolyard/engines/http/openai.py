"""Any server with OpenAI's chat completions: messages in, a message out.

The server renders messages to tokens and parses calls in its own way. vLLM and SGLang return these tokens on request;
answers of other servers can be evaluated and distilled from, but not trained on exactly.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Unpack
from urllib.parse import urlsplit

from toolyard.engines.http.client import HttpEngine, HttpOptions
from toolyard.engines.http.exchange import (
    RefusedError,
    ServerFailedError,
    a_list,
    an_object,
    base_url,
    permanent,
    routing_headers,
)
from toolyard.engines.http.wire import integers, log_probabilities, wire_seed
from toolyard.engines.protocol import ChatGeneration, Finish, Sampling
from toolyard.errors import EngineRequestError
from toolyard.messages import JSON, Message, OpenAIFunctionToolSchema

_FINISHES = {
    "stop": Finish.STOP,
    "tool_calls": Finish.STOP,
    "function_call": Finish.STOP,
    "length": Finish.LENGTH,
    "abort": Finish.ABORT,
}
_BAD_FIELD = frozenset({400, 422})


class OpenaiEngine(HttpEngine):
    """`OpenaiEngine("http://host:8000")`, or `https://api.example.com/v1`: a URL with a path is used unchanged.

    Fields that only some servers support are tried, and omitted from then on for a server that refuses them. Settings
    that were requested explicitly, such as `top_k`, are never omitted: a server without support refuses the request.

    An aborted request ends with its connection; what the server had sampled is lost.
    """

    _models_path = "/models"
    _health_path = "/models"

    def __init__(
        self,
        urls: Sequence[str] | str,
        *,
        model: str | None = None,
        returns_tokens: bool = True,
        **options: Unpack[HttpOptions],
    ) -> None:
        """Args:
        model: Its name on the server; by default the first that the server lists.
        returns_tokens: Ask for token ids and log-probabilities.
        """
        super().__init__(urls, **options)
        self._model = model
        self._returns_tokens = returns_tokens
        self._refused: dict[str, frozenset[str]] = {}
        """Fields that a server is known to refuse; `max_tokens` means that it needs the newer name."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[OpenAIFunctionToolSchema],
        sampling: Sampling,
        *,
        request_id: str,
    ) -> ChatGeneration:
        if not messages:
            raise EngineRequestError("the conversation is empty")
        needed: JSON = {"messages": [message.as_openai() for message in messages], **_asked(sampling)}
        if tools:
            needed["tools"] = [tool.model_dump() for tool in tools]
            needed["tool_choice"] = "auto"
        extras = _extras(sampling, bool(tools), self._returns_tokens)

        async def attempt(base: str, _: str) -> ChatGeneration:
            model = self._model or (await self._model_at(base)).name
            if model is None:
                raise permanent(f"{base}{self._models_path} lists no model; set `model`")
            return await self._chat(base, needed | {"model": model}, extras, request_id)

        prefix = f"{len(messages)} {zlib.crc32(str(needed['messages'][-1]).encode('utf-8', 'surrogatepass'))}"
        found = await self._perform(request_id, prefix, attempt)
        return found or ChatGeneration(Message("assistant", ""), Finish.ABORT)

    async def _chat(self, base: str, needed: JSON, extras: JSON, request_id: str) -> ChatGeneration:
        where, headers = f"{base}/chat/completions", routing_headers(request_id)
        refused = self._refused.get(base, frozenset())
        while True:
            body = needed | {name: value for name, value in extras.items() if name not in refused}
            if "max_tokens" in refused:
                body["max_completion_tokens"] = body.pop("max_tokens")
            try:
                answer = await self._exchanges.ask(where, body, headers=headers)
            except RefusedError as error:
                more = _to_leave_out(error, body, extras)
                if not more:
                    raise
                refused |= more
            else:
                # Only now is it known that the fields were the problem, not the request.
                self._refused[base] = self._refused.get(base, frozenset()) | refused
                return _answer(where, answer)

    def _base_of(self, url: str) -> str:
        return openai_base(url)


def openai_base(url: str) -> str:
    """The URL with `/v1` if it has no path. Raises ConfigError if it is invalid."""
    base = base_url(url)
    return base if urlsplit(base).path else f"{base}/v1"


def _asked(sampling: Sampling) -> JSON:
    """Settings that must be respected."""
    asked: JSON = {"max_tokens": sampling.max_tokens}
    for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if getattr(sampling, name) != neutral:
            asked[name] = getattr(sampling, name)
    if sampling.top_k > 0:
        asked["top_k"] = sampling.top_k
    if sampling.stop:
        asked["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        asked["stop_token_ids"] = list(sampling.stop_token_ids)
    return asked


def _extras(sampling: Sampling, has_tools: bool, returns_tokens: bool) -> JSON:
    """Optional fields."""
    extras: JSON = {"logprobs": True, "return_token_ids": True} if returns_tokens else {}
    # Sent although it is the default: vLLM takes its defaults from the model's own files.
    extras |= {name: 1.0 for name in ("temperature", "top_p") if getattr(sampling, name) == 1.0}
    if has_tools:
        extras["parallel_tool_calls"] = True
    if sampling.seed is not None:
        extras["seed"] = wire_seed(sampling.seed)
    return extras


def _to_leave_out(error: RefusedError, body: JSON, extras: JSON) -> frozenset[str]:
    """Return the fields to omit after this refusal: those that the server names, otherwise all optional ones."""
    if error.status not in _BAD_FIELD:
        return frozenset()
    if "max_tokens" in body and "max_completion_tokens" in error.words:
        return frozenset({"max_tokens"})
    sent = extras.keys() & body.keys()
    return frozenset(name for name in sent if name in error.words) or frozenset(sent)


def _answer(where: str, answer: JSON) -> ChatGeneration:
    choices = a_list(answer.get("choices")) or []
    choice = an_object(choices[0]) if choices else None
    raw = an_object(choice.get("message")) if choice is not None else None
    if choice is None or raw is None:
        raise ServerFailedError(f"{where}: no choices[0].message in the answer: {str(answer)[:200]}")
    finish = choice.get("finish_reason")
    if finish == "content_filter":
        raise EngineRequestError(f"{where}: the server withheld the answer (content_filter)")
    ended = _FINISHES.get(finish) if isinstance(finish, str) else None
    if ended is None:
        raise ServerFailedError(f"{where}: an unknown finish_reason: {finish!r}")
    prompt_ids = _ids(where, "prompt_token_ids", answer.get("prompt_token_ids"), choice.get("prompt_token_ids"))
    token_ids = _ids(where, "token_ids", choice.get("token_ids"), choice.get("response_token_ids"))
    usage = an_object(answer.get("usage")) or {}
    version = (an_object(answer.get("metadata")) or {}).get("weight_version")
    return ChatGeneration(
        message=_message(where, raw),
        finish=ended,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=_logprobs(where, choice, token_ids),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        weight_version=None if version is None else str(version),
    )


def _message(where: str, raw: JSON) -> Message:
    # vLLM names it `reasoning`, SGLang and DeepSeek `reasoning_content`.
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    whole = {
        "role": "assistant",
        "content": raw.get("content"),
        "reasoning_content": reasoning if isinstance(reasoning, str) else None,
        "tool_calls": raw.get("tool_calls"),
    }
    try:
        return Message.from_openai(whole)
    except (ValueError, TypeError, AttributeError) as error:
        raise ServerFailedError(f"{where}: the message is invalid: {error}") from error


def _ids(where: str, name: str, *places: Any) -> list[int] | None:
    found = next((place for place in places if place is not None), None)
    return None if found is None else integers(where, name, found)


def _logprobs(where: str, choice: JSON, token_ids: list[int] | None) -> list[float] | None:
    """Return the tokens' log-probabilities; None if there are not as many as tokens."""
    content = a_list((an_object(choice.get("logprobs")) or {}).get("content"))
    if not content or (token_ids is not None and len(content) != len(token_ids)):
        return None
    return log_probabilities(where, [(an_object(entry) or {}).get("logprob") for entry in content])


def _count(found: Any) -> int | None:
    return found if type(found) is int else None
