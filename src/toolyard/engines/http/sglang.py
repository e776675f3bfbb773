"""SGLang's own route: token ids in, token ids and log-probabilities out.

Log-probabilities are those that SGLang reports, by default of the distribution at the requested temperature. Seeds work
on servers started with `--enable-deterministic-inference`; others use their own randomness.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from toolyard.engines.http.client import HttpEngine
from toolyard.engines.http.exchange import ServerFailedError, a_list, an_object, routing_headers
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
from toolyard.errors import EngineError
from toolyard.images import Image
from toolyard.messages import JSON

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]


class SglangEngine(HttpEngine):
    """`SglangEngine("http://host:30000")`, or several URLs. Also works with `smg`, SGLang's router."""

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, request_id: str) -> Generation:
        return await self.generate_with_images(prompt_ids, (), sampling, request_id=request_id)

    async def generate_with_images(
        self, prompt_ids: Ids, images: Sequence[Image], sampling: Sampling, *, request_id: str
    ) -> Generation:
        ids = checked_prompt(prompt_ids)

        async def attempt(base: str, rid: str) -> Generation:
            most = room_for(ids, sampling, (await self._model_at(base)).context)
            body: JSON = {
                "input_ids": ids,
                "sampling_params": _sampling_params(sampling, most),
                "return_logprob": True,
                "rid": rid,
            }
            if images:
                body["image_data"] = [image.url for image in images]
            answer = await self._exchanges.ask(f"{base}/generate", body, headers=routing_headers(request_id))
            return _generation(f"{base}/generate", answer, sampling, most)

        return await self._perform(request_id, prefix_of(ids), attempt) or aborted()

    async def weight_version(self) -> str | None:
        """Return the version of the weights on all servers.

        Raises:
            EngineError: they do not agree, or one does not answer.
        """
        answers = await self._ask_all("/model_info")
        versions = {base: answer.get("weight_version") for base, answer in answers.items()}
        if len(set(versions.values())) > 1:
            raise EngineError(f"the servers have different weights: {versions}")
        version = next(iter(versions.values()))
        return None if version is None else str(version)

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop sampling on all servers, to load new weights. Running requests: `abort` ends them with what they have,
        `retract` and `in_place` resume them after `continue_generation`, with a recomputed or the old cache."""
        await self._ask_all("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        await self._ask_all("/continue_generation", {})

    async def update_weight_version(self, version: str, *, abort_all: bool = False) -> None:
        """Set the version of the servers' weights from now on. `abort_all` ends running requests."""
        await self._ask_all("/update_weight_version", {"new_version": version, "abort_all_requests": abort_all})

    async def update_weights_from_disk(self, folder: str | Path, version: str, *, abort: bool = True) -> None:
        """Make all servers load the weights of a folder, clear their caches, and report `version`.

        Requests that arrive meanwhile wait, and are sampled with the new weights.

        Args:
            folder: The served model, in Hugging Face's format, at a path that the servers can read too.
            abort: Running requests end with `Finish.ABORT` and the old version, and may continue from their tokens.
                Otherwise they are waited for; or, after `pause_generation("retract")`, they continue with the new
                weights. Requests paused `in_place` keep SGLang from clearing its cache, which crashes it.

        Raises:
            EngineError: a server refused, failed or did not answer within `request_timeout`; the message names it and
                quotes its error. Other servers may have the new weights by then, and that one a part of them: do not
                sample until a retry succeeds. `weight_version` raises as long as they differ.
        """
        path = "/update_weights_from_disk"
        for base, answer in (await self._ask_all(path, _from_disk(folder, version, abort))).items():
            if answer.get("success") is not True:
                raise EngineError(f"{base}{path}: the new weights were not loaded: {str(answer)[:300]}")

    async def _abort_at(self, base: str, rid: str) -> bool:
        await self._exchanges.tell(f"{base}/abort_request", {"rid": rid})
        return True


def _from_disk(folder: str | Path, version: str, abort: bool) -> JSON:
    return {
        "model_path": os.path.abspath(folder),  # the servers have other working directories
        "weight_version": version,
        "flush_cache": True,
        "abort_all_requests": abort,
    }


def _sampling_params(sampling: Sampling, most: int) -> JSON:
    params: JSON = {
        "max_new_tokens": most,
        **common_params(sampling),
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "no_stop_trim": True,  # a stop string was sampled, too
    }
    if sampling.seed is not None:
        params["sampling_seed"] = wire_seed(sampling.seed)
    return params


def _generation(where: str, answer: JSON, sampling: Sampling, most: int) -> Generation:
    meta = an_object(answer.get("meta_info")) or {}
    ended = an_object(meta.get("finish_reason"))
    if ended is None:
        raise ServerFailedError(f"{where}: no meta_info.finish_reason in the answer: {str(answer)[:200]}")
    scored = meta.get("output_token_logprobs")
    # A request that ended before it started has neither tokens nor log-probabilities.
    triples: list[Any] = [] if scored is None and ended.get("type") == "abort" else _triples(where, scored)
    ids = answer.get("output_ids")
    if ids is None:
        ids = [triple[1] for triple in triples]
    token_ids = integers(where, "output_ids", ids)
    if any(triple[1] != token for triple, token in zip(triples, token_ids, strict=False)):
        raise ServerFailedError(f"{where}: output_token_logprobs and output_ids have different tokens")
    version = spanned_version(meta.get("weight_versions")) or meta.get("weight_version")
    return generation(
        where,
        sampling,
        most=most,
        token_ids=token_ids,
        logprobs=log_probabilities(where, [triple[0] for triple in triples]),
        finish=str(ended.get("type")),
        matched=ended.get("matched"),
        weight_version=None if version is None else str(version),
        cached_tokens=meta.get("cached_tokens"),
    )


def _triples(where: str, scored: Any) -> list[Any]:
    """`[[logprob, id, text], …]`."""
    found = a_list(scored)
    if found is None or not all(len(a_list(item) or ()) >= 2 for item in found):
        what = "output_token_logprobs is not a list of [logprob, id, text]"
        raise ServerFailedError(f"{where}: {what}: {str(scored)[:120]}")
    return found
