"""Choose tokens from logits.

Each request has its own random generator, with one number per token: what it samples depends on its seed and its
logits, not on the other requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from toolyard.engines.protocol import Sampling

_HEAD = 256
"""Usually `top_p` and the like choose among fewer of the most likely tokens than this. Then nothing needs sorting."""

_LEAST = -9000.0
"""The least log-probability that is reported: -9999 means that there is none. Temperatures near 0 lead to less."""


class Chooser:
    """How one request chooses its tokens."""

    def __init__(self, sampling: Sampling, ids: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self.sampling = sampling
        self._chance = random.Random(sampling.seed)  # noqa: S311 (reproducible is the point)
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[torch.tensor(list(ids), device=device)] = True

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def is_cut(self) -> bool:
        """Whether not all tokens are considered."""
        return self.sampling.top_k > 0 or self.sampling.top_p < 1 or self.sampling.min_p > 0

    def number(self) -> float:
        """Return a random number in [0, 1)."""
        return self._chance.random()

    def penalized(self, logits: Tensor) -> Tensor:
        """Make tokens that occurred before less likely (or more, below 1)."""
        if self._seen is None:
            return logits
        penalty = self.sampling.repetition_penalty
        return torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def chose(self, token: int) -> None:
        if self._seen is not None:
            self._seen[token] = True


def choose(logits: Tensor, choosers: Sequence[Chooser]) -> tuple[list[int], list[float]]:
    """Choose one token for each row of `logits` (float32); also return its log-probability at the request's temperature
    (at 1 if it is 0), without penalties or cuts. It is NaN if the model's own numbers are."""
    if any(chooser.sampling.repetition_penalty != 1 for chooser in choosers):
        shaped = torch.stack([chooser.penalized(row) for row, chooser in zip(logits, choosers, strict=True)])
    else:
        shaped = logits
    tokens = torch.zeros(len(choosers), dtype=torch.long, device=logits.device)
    for pick, members in (
        (_greedy, [at for at, chooser in enumerate(choosers) if chooser.is_greedy]),
        (_from_all, [at for at, chooser in enumerate(choosers) if not chooser.is_greedy and not chooser.is_cut]),
        (_from_likeliest, [at for at, chooser in enumerate(choosers) if not chooser.is_greedy and chooser.is_cut]),
    ):
        if len(members) == len(choosers):
            tokens = pick(shaped, choosers)
        elif members:
            where = _tensor(members, torch.long, logits)
            tokens[where] = pick(shaped[where], [choosers[at] for at in members])
    scaled = logits / _column([chooser.sampling.temperature or 1.0 for chooser in choosers], logits)
    chosen = scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(1)
    # Together, since a GPU is waited for whenever something is copied from it. A double holds every token's number.
    found = torch.stack((tokens.double(), chosen.double()))
    numbers, scores = cast("list[list[float]]", found.tolist())  # pyright: ignore[reportUnknownMemberType]
    sampled = [int(number) for number in numbers]
    for token, chooser in zip(sampled, choosers, strict=True):
        chooser.chose(token)
    return sampled, [value if math.isnan(value) else max(_LEAST, min(value, 0.0)) for value in scores]


def _greedy(logits: Tensor, _: Sequence[Chooser]) -> Tensor:
    return logits.argmax(1)


def _from_all(logits: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    weights = (logits / _column([chooser.sampling.temperature for chooser in choosers], logits)).softmax(1)
    return _drawn(weights, choosers)


def _from_likeliest(logits: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """Apply `top_k` first, then `top_p` and `min_p` to what it leaves."""
    scaled = logits / _column([chooser.sampling.temperature for chooser in choosers], logits)
    vocabulary = logits.shape[1]
    ranks = [chooser.sampling.top_k if chooser.sampling.top_k > 0 else vocabulary for chooser in choosers]
    everything = scaled.logsumexp(1, keepdim=True)
    for head in (min(_HEAD, vocabulary), vocabulary):
        values, tokens = scaled.topk(head, dim=1)
        rank = torch.arange(head, device=logits.device)
        in_rank = rank < _column(ranks, logits)
        whole = torch.where(in_rank, values, -torch.inf).logsumexp(1, keepdim=True)
        limited = _tensor([[most <= head] for most in ranks], torch.bool, logits)
        weights = (values - torch.where(limited, whole, everything)).exp()
        before = weights.cumsum(1) - weights
        kept = in_rank & (before < _column([chooser.sampling.top_p for chooser in choosers], logits))
        kept &= weights >= weights[:, :1] * _column([chooser.sampling.min_p for chooser in choosers], logits)
        kept[:, 0] = True
        enough = not any(head < most < vocabulary for most in ranks) and not bool((kept[:, -1:] & ~limited).any())
        if enough:
            break  # no request considers more tokens than this
    return tokens.gather(1, _drawn(weights * kept, choosers)[:, None])[:, 0]


def _drawn(weights: Tensor, choosers: Sequence[Chooser]) -> Tensor:
    """Return the index at which the running sum of the weights exceeds the request's number."""
    # In double precision: in single, the last of 50,000 tokens would get no probability, or all of the remainder.
    sums = weights.cumsum(1, dtype=torch.float64)
    totals = sums[:, -1:]
    numbers = _tensor([[chooser.number()] for chooser in choosers], torch.float64, weights)
    wanted = torch.minimum(numbers * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(sums, wanted, right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return _tensor(values, torch.float32, like)[:, None]


def _tensor(values: Sequence[Any], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return a tensor where `like` is, without waiting for what a GPU is still computing."""
    if like.device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=like.device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(like.device, non_blocking=True)
