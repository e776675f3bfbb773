"""vLLM: token ids in, token ids and log-probabilities out.

Servers started with `--enable-scale-out` or `--tokens-only` have a route for this, which also returns the version of
the weights; the first request shows whether a server has it. Otherwise `/v1/completions` is used. Such servers cannot
be told to abort, unless they run in development mode: an abort closes the connection, and what was sampled is lost.

Log-probabilities are those of vLLM's `--logprobs-mode`, by default of the model's own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from toolyard.engines.http.client import HttpEngine, HttpOptions
from toolyard.engines.http.exchange import RefusedError, ServerFailedError, a_list, an_object, routing_headers
from toolyard.engines.http.wire import (
    aborted,
    checked_prompt,
    common_params,
    generation,
    integers,
    log_probabilities,
    prefix_of,
    room_for,
    spanned_version,
    wire_seed,
)
from toolyard.engines.protocol import Generation, Ids, Sampling
from toolyard.errors import EngineRequestError
from toolyard.images import Image
from toolyard.messages import JSON

_TOKENS, _COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_ABORTS = ("/inference/v1/abort_requests", "/abort_requests")
_NO_SUCH_ROUTE = frozenset({403, 404, 405, 501})
"""vLLM 0.32 answers 403 for disabled routes; older versions do not have them."""


class VllmEngine(HttpEngine):
    """`VllmEngine("http://host:8000")`, or several URLs."""

    def __init__(self, urls: Sequence[str] | str, *, model: str | None = None, **options: Unpack[HttpOptions]) -> None:
        """`model`: its name on the server; by default the first that the server lists."""
        super().__init__(urls, **options)
        self._model = model
        self._lacks: set[str] = set()
        """URLs of routes that do not exist."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        return await self.generate_with_images(prompt_ids, (), sampling, request_id=request_id)

    async def generate_with_images(
        self, prompt_ids: Ids, images: Sequence[Image], sampling: Sampling, *, request_id: str
    ) -> Generation:
        """Like `generate`; images need the route for tokens.

        Raises:
            EngineRequestError: this server does not have it.
        """
        ids = checked_prompt(prompt_ids)
        headers = routing_headers(request_id)

        async def attempt(base: str, rid: str) -> Generation:
            served = await self._model_at(base)
            most = room_for(ids, sampling, served.context)
            params = _sampling_params(sampling, most)
            where = f"{base}{_TOKENS}"
            if where not in self._lacks:
                body: JSON = {"request_id": rid, "token_ids": ids, "sampling_params": params}
                if self._model is not None:
                    body["model"] = self._model
                if images:
                    body["content_parts"] = [{"type": "image_url", "url": image.url} for image in images]
                try:
                    return _of_tokens(where, await self._exchanges.ask(where, body, headers=headers), sampling, most)
                except RefusedError as refused:
                    if refused.status not in _NO_SUCH_ROUTE or (self._model is not None and "model" in refused.words):
                        raise
                    self._lacks.add(where)
            if images:
                raise EngineRequestError(
                    f"{base}{_COMPLETIONS} takes no images with token ids: start vLLM with --enable-scale-out, or "
                    "set chat.images to hide"
                )
            body = {"request_id": rid, "prompt": ids, "return_token_ids": True, **params}
            body["model"] = self._model or served.name
            answer = await self._exchanges.ask(f"{base}{_COMPLETIONS}", body, headers=headers)
            return _of_completion(f"{base}{_COMPLETIONS}", answer, sampling, most)

        return await self._perform(request_id, prefix_of(ids), attempt) or aborted()

    async def _abort_at(self, base: str, rid: str) -> bool:
        # vLLM adds its own prefix and suffix to the id it was given.
        names = [f"generate-tokens-{rid}", f"cmpl-{rid}-0"]
        for path in _ABORTS:
            if f"{base}{path}" in self._lacks:
                continue
            try:
                await self._exchanges.tell(f"{base}{path}", {"request_ids": names})
            except RefusedError as refused:
                if refused.status not in _NO_SUCH_ROUTE:
                    raise
                self._lacks.add(f"{base}{path}")
            else:
                return True
        return False


def _sampling_params(sampling: Sampling, most: int) -> JSON:
    params: JSON = {
        "max_tokens": most,
        **common_params(sampling),
        "top_k": max(0, sampling.top_k),
        "logprobs": 0,  # only of the sampled token
        "include_stop_str_in_output": True,
    }
    if sampling.seed is not None:
        params["seed"] = wire_seed(sampling.seed)
    return params


def _of_tokens(where: str, answer: JSON, sampling: Sampling, most: int) -> Generation:
    choice = _choice(where, answer)
    content = a_list((an_object(choice.get("logprobs")) or {}).get("content"))
    if content is None:
        raise ServerFailedError(f"{where}: no logprobs.content in the answer: {str(choice)[:200]}")
    scored = [(an_object(entry) or {}).get("logprob") for entry in content]
    return _generation(where, answer, choice, scored, sampling, most)


def _of_completion(where: str, answer: JSON, sampling: Sampling, most: int) -> Generation:
    choice = _choice(where, answer)
    scored = a_list((an_object(choice.get("logprobs")) or {}).get("token_logprobs"))
    if scored is None:
        raise ServerFailedError(f"{where}: no logprobs.token_logprobs in the answer: {str(choice)[:200]}")
    return _generation(where, answer, choice, scored, sampling, most)


def _choice(where: str, answer: JSON) -> JSON:
    choices = a_list(answer.get("choices")) or []
    choice = an_object(choices[0]) if len(choices) == 1 else None
    if choice is None:
        raise ServerFailedError(f"{where}: expected exactly one choice in the answer: {str(answer)[:200]}")
    if choice.get("token_ids") is None:
        raise ServerFailedError(f"{where}: no token_ids in the answer; vLLM returns them since 0.10.2")
    return choice


def _generation(where: str, answer: JSON, choice: JSON, scored: list[Any], sampling: Sampling, most: int) -> Generation:
    usage = an_object(answer.get("usage")) or {}
    details = an_object(usage.get("prompt_tokens_details")) or {}
    return generation(
        where,
        sampling,
        most=most,
        token_ids=integers(where, "token_ids", choice["token_ids"]),
        logprobs=log_probabilities(where, scored),
        finish=str(choice.get("finish_reason")),
        matched=choice.get("stop_reason"),
        weight_version=spanned_version(choice.get("weight_versions")),
        cached_tokens=details.get("cached_tokens"),
    )
