"""Validate prompts before they are sent, and answers before they are used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from toolyard.engines.http.exchange import ServerFailedError, a_list, an_object, permanent
from toolyard.engines.protocol import Finish, Generation, Ids, Sampling
from toolyard.errors import EngineRequestError
from toolyard.messages import JSON

_NO_LOGPROB = -9999.0
"""vLLM's placeholder for a missing log-probability. Used as one, it would ruin a training step."""
_ROUNDING = 1e-3
_SEED_BITS = (1 << 63) - 1


def checked_prompt(prompt_ids: Ids) -> list[int]:
    ids = prompt_ids if isinstance(prompt_ids, list) else list(prompt_ids)
    if not ids:
        raise EngineRequestError("the prompt is empty")
    if others := {*map(type, ids)} - {int}:
        raise EngineRequestError(f"the prompt must contain only integers, not {others.pop().__name__}")
    if (least := min(ids)) < 0:
        raise EngineRequestError(f"the prompt has the id {least}, which is not a token")
    return ids


def prefix_of(ids: list[int]) -> str:
    """A name for the prompt, the same in all processes. Its end tells prompts apart; hashing all of it would cost time
    in every turn."""
    return f"{len(ids)} {hash(tuple(ids[-512:]))}"


def room_for(ids: list[int], sampling: Sampling, context: int | None) -> int:
    """Return how many tokens may be requested: servers refuse what could exceed their context."""
    if context is None:
        return sampling.max_tokens
    left = context - len(ids)
    if left <= 0:
        raise EngineRequestError(f"a prompt of {len(ids)} tokens does not fit into the model's context of {context}")
    return min(left, sampling.max_tokens)


def wire_seed(seed: int) -> int:
    """Map any integer to a seed that servers accept: 63 bits."""
    return seed & _SEED_BITS


def common_params(sampling: Sampling) -> JSON:
    """The sampling parameters that vLLM and SGLang write alike."""
    params: JSON = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": False,
        "skip_special_tokens": False,  # nothing that was sampled may be missing from the answer
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    return params


def integers(where: str, name: str, found: Any) -> list[int]:
    ids = a_list(found)
    if ids is None or not all(type(token) is int and token >= 0 for token in ids):
        raise ServerFailedError(f"{where}: {name} is not a list of token ids: {str(found)[:120]}")
    return ids


def log_probabilities(where: str, found: Sequence[Any]) -> list[float]:
    checked: list[float] = []
    for value in found:
        if type(value) not in (int, float) or not math.isfinite(value) or value > _ROUNDING or value <= _NO_LOGPROB:
            raise ServerFailedError(f"{where}: token {len(checked)} has an invalid log-probability: {value!r}")
        checked.append(min(0.0, float(value)))
    return checked


def generation(
    where: str,
    sampling: Sampling,
    *,
    most: int,
    token_ids: list[int],
    logprobs: list[float],
    finish: str,
    matched: Any,
    weight_version: str | None,
    cached_tokens: Any,
) -> Generation:
    """Validate a server's answer. `matched`: the stop token or stop string that the server names.

    A stop token was sampled, so it belongs to the answer; both servers return it. If it is missing but its
    log-probability is there, it is added. Otherwise the answer is rejected: training on it would teach the model never
    to stop.
    """
    try:
        ended = Finish(finish)
    except ValueError:
        raise ServerFailedError(f"{where}: an unknown finish_reason: {finish!r}") from None
    if ended is Finish.STOP and type(matched) is int and (not token_ids or token_ids[-1] != matched):
        if len(logprobs) != len(token_ids) + 1:
            raise permanent(
                f"{where}: sampling ended with the token {matched}, which the server left out of the answer; "
                "it must return stop tokens"
            )
        token_ids = [*token_ids, matched]
    if len(logprobs) != len(token_ids):
        raise ServerFailedError(f"{where}: {len(token_ids)} tokens, but {len(logprobs)} log-probabilities")
    if len(token_ids) > most:
        raise ServerFailedError(f"{where}: {len(token_ids)} tokens, but max_tokens was {most}")
    if not token_ids and ended is not Finish.ABORT:
        raise ServerFailedError(f"{where}: no tokens, but the finish_reason {finish!r}")
    return Generation(
        token_ids,
        logprobs,
        ended,
        weight_version,
        cached_tokens if type(cached_tokens) is int else None,
        matched if ended is Finish.STOP and isinstance(matched, str) and matched in sampling.stop else None,
    )


def aborted() -> Generation:
    """The answer to a request that ended before the server sent anything."""
    return Generation([], [], Finish.ABORT)


def spanned_version(spans: Any) -> str | None:
    """Convert `[{version, start, end}]` to one version, or several in order if the weights changed meanwhile."""
    named = [(an_object(span) or {}).get("version") for span in a_list(spans) or ()]
    return ",".join(dict.fromkeys(str(version) for version in named if version is not None)) or None
