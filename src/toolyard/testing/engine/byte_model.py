"""A stand-in for a language model: its tokens are bytes, and the next token is computed by arithmetic.

It is fast and has no weights. It shares with a model what engine tests need: the next token depends on everything
before it, with a known distribution, so greedy sampling is reproducible and log-probabilities are exact.
"""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Sequence

from toolyard.engines.protocol import Sampling

BYTE_VOCABULARY = 260
"""256 bytes and four special tokens; `BYTE_EOS` is one of them."""
BYTE_EOS = 256

_LETTERS = b"etaoin shrdlu cmfwyp vbgkqj."
_WEIGHTS = (0.4, 0.25, 0.15, 0.1, 0.06, 0.04)


def byte_encode(text: str) -> list[int]:
    return list(text.encode())


def byte_decode(ids: Sequence[int]) -> str:
    """The text of `ids`, without special tokens; invalid UTF-8 becomes U+FFFD."""
    return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


class ByteModel:
    """Samples letters endlessly, or a fixed answer."""

    vocabulary = BYTE_VOCABULARY

    def __init__(self, says: str | None = None) -> None:
        """`says`: every answer is this text followed by `BYTE_EOS`, for any prompt and any sampling."""
        self._says = None if says is None else [*says.encode(), BYTE_EOS]

    def distribution(self, ids: Sequence[int], start: int) -> list[tuple[int, float]]:
        """The tokens that can follow `ids`, most likely first. `ids[start:]` is the answer so far."""
        if self._says is not None:
            return [(self._says[min(len(ids) - start, len(self._says) - 1)], 1.0)]
        seed = zlib.crc32(bytes([token & 255 for token in ids[-4:]]), len(ids))
        return _letters(seed % len(_LETTERS), 1 + (seed >> 8) % 3)

    def next(self, ids: Sequence[int], start: int, sampling: Sampling, rng: random.Random) -> tuple[int, float]:
        """Sample a token after `ids`. Returns it with its log-probability at temperature 1 over all tokens."""
        ranked = self.distribution(ids, start)
        if sampling.temperature == 0:
            token, probability = ranked[0]
        else:
            kept = _kept(ranked, sampling)
            token, probability = rng.choices(kept, [p ** (1 / sampling.temperature) for _, p in kept])[0]
        return token, math.log(probability)


@functools.cache
def _letters(first: int, step: int) -> list[tuple[int, float]]:
    merged: dict[int, float] = {}
    for n, weight in enumerate(_WEIGHTS):
        letter = _LETTERS[(first + n * step) % len(_LETTERS)]
        merged[letter] = merged.get(letter, 0.0) + weight
    return sorted(merged.items(), key=lambda pair: -pair[1])


def _kept(ranked: list[tuple[int, float]], sampling: Sampling) -> list[tuple[int, float]]:
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    least = sampling.min_p * ranked[0][1]
    kept: list[tuple[int, float]] = []
    mass = 0.0
    for token, probability in ranked:
        if kept and (mass >= sampling.top_p or probability < least):
            break
        kept.append((token, probability))
        mass += probability
    return kept
