"""What is checked of a prompt before it is sent, and of an answer before it is believed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from toolyard.engines.http.exchange import ServerFailedError, a_list, an_object, permanent
from toolyard.engines.protocol import Finish, Generation, Ids, Sampling
from toolyard.errors import EngineRequestError

_NO_LOGPROB = -9999.0
"""vLLM writes this where it has none. Taken for one, it would blow up a training step."""
_ROUNDING = 1e-3
_SEED_BITS = (1 << 63) - 1


def checked_prompt(prompt_ids: Ids) -> list[int]:
    ids = prompt_ids if isinstance(prompt_ids, list) else list(prompt_ids)
    if not ids:
        raise EngineRequestError("the prompt is empty")
    if others := {*map(type, ids)} - {int}:
        raise EngineRequestError(f"the prompt is not made of integers alone: it has {others.pop().__name__}")
    if (least := min(ids)) < 0:
        raise EngineRequestError(f"the prompt has the id {least}, which is no token")
    return ids


def room_for(ids: list[int], sampling: Sampling, context: int | None) -> int:
    """How many tokens may be asked for: servers refuse what could outgrow their context, though it seldom would."""
    if context is None:
        return sampling.max_tokens
    left = context - len(ids)
    if left <= 0:
        raise EngineRequestError(f"a prompt of {len(ids)} tokens does not fit into the model's context of {context}")
    return min(left, sampling.max_tokens)


def wire_seed(seed: int) -> int:
    """Any integer as one that servers take: 63 bits."""
    return seed & _SEED_BITS


def integers(where: str, name: str, found: Any) -> list[int]:
    ids = a_list(found)
    if ids is None or not all(type(token) is int and token >= 0 for token in ids):
        raise ServerFailedError(f"{where}: {name} is no list of token ids: {str(found)[:120]}")
    return ids


def log_probabilities(where: str, found: Sequence[Any]) -> list[float]:
    checked: list[float] = []
    for value in found:
        if type(value) not in (int, float) or not math.isfinite(value) or value > _ROUNDING or value <= _NO_LOGPROB:
            raise ServerFailedError(f"{where}: token {len(checked)} has the log-probability {value!r}, which is none")
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
    """A server's answer, if it is one. `matched`: the stop token or stop text that the server names.

    A stop token was sampled, so it belongs to the answer; both servers return it. One that leaves it out but has its
    log-probability is completed. Without that, the answer is refused: trained on, it would teach never to stop.
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
        raise ServerFailedError(f"{where}: {len(token_ids)} tokens, though max_tokens was {most}")
    if not token_ids and ended is not Finish.ABORT:
        raise ServerFailedError(f"{where}: no token at all, and the finish_reason {finish!r}")
    return Generation(
        token_ids,
        logprobs,
        ended,
        weight_version,
        cached_tokens if type(cached_tokens) is int else None,
        matched if ended is Finish.STOP and isinstance(matched, str) and matched in sampling.stop else None,
    )


def aborted() -> Generation:
    """Of a request that ended before the server said anything."""
    return Generation([], [], Finish.ABORT)


def spanned_version(spans: Any) -> str | None:
    """`[{version, start, end}]` as one version, or several in their order if the weights changed under way."""
    named = [(an_object(span) or {}).get("version") for span in a_list(spans) or ()]
    return ",".join(dict.fromkeys(str(version) for version in named if version is not None)) or None
