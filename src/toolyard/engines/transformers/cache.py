"""Storage of keys and values: in rows while tokens are sampled, in spans before and after. On a GPU, prompts are
computed in rows as well.

A `Span` belongs to one sequence. The `Rows` are all sequences being sampled, side by side, so that one call attends for
all of them. The `Prefixes` are spans of sequences that may be continued, by the next turn of the same request or by
requests that share its prefix; the least recently used are dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Source: TypeAlias = "tuple[Tensor, Tensor]"
"""Keys and values of one sequence, as a source to copy from."""

_GROWTH = 256
"""Rows grow by multiples of this many tokens."""
_ALIGNMENT = 32
"""Rows are read in multiples of this many tokens."""


@dataclass(frozen=True, slots=True)
class TokenShape:
    """The size of one token's keys and values."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def room(self, make: Callable[..., Tensor], *sizes: int) -> Source:
        """Allocate keys and values for `sizes[0]` sequences (if there are two sizes) of `sizes[-1]` tokens."""
        *rows, tokens = sizes
        keys, values = (
            make(self.layers, *rows, self.heads, tokens, dim, dtype=self.dtype, device=self.device)
            for dim in (self.key_dim, self.value_dim)
        )
        return keys, values


class Span:
    """Keys and values of one sequence: [layers, heads, tokens, dim]."""

    def __init__(self, shape: TokenShape, tokens: int) -> None:
        self.keys, self.values = shape.room(torch.empty, tokens)

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def source(self) -> Source:
        return self.keys, self.values

    def copy_from(self, source: Source, tokens: int) -> None:
        self.keys[:, :, :tokens] = source[0][:, :, :tokens]
        self.values[:, :, :tokens] = source[1][:, :, :tokens]


class Rows:
    """Keys and values of the sequences being sampled, without gaps: [layers, rows, heads, tokens, dim]."""

    def __init__(self, shape: TokenShape) -> None:
        self._shape = shape
        self.lengths: list[int] = []
        """Number of tokens in each row."""
        self.moves = 0
        """How often the storage was replaced. Views of the previous one are useless."""
        self.clear()

    def clear(self) -> None:
        """Discard everything and free its memory."""
        self.lengths.clear()
        self._use(*self._shape.room(torch.zeros, 0, 0))

    def empty(self) -> None:
        """Discard everything, but keep its memory for the next rows."""
        self.lengths.clear()
        self._keys.zero_()
        self._values.zero_()

    @property
    def dtype(self) -> torch.dtype:
        return self._shape.dtype

    @property
    def capacity(self) -> int:
        """Number of tokens that fit in all rows together."""
        return self._keys.shape[1] * self._keys.shape[3]

    @property
    def most_rows(self) -> int:
        """Number of rows that fit."""
        return self._keys.shape[1]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, for reading and writing: [rows, heads, tokens, dim]."""
        return self._layers[index]

    def join(self, source: Source | None, tokens: int) -> None:
        """Add a row that starts with the first `tokens` of `source`, which may be another row."""
        row = len(self.lengths)
        self.reserve(row + 1, tokens)
        if source is not None:
            self._keys[:, row, :, :tokens] = source[0][:, :, :tokens]
            self._values[:, row, :, :tokens] = source[1][:, :, :tokens]
        self.lengths.append(tokens)

    def row(self, index: int) -> Source:
        """Return a view of a row, valid until the next change."""
        return self._keys[:, index], self._values[:, index]

    def span(self, row: int, tokens: int) -> Span:
        """Copy the start of a row."""
        span = Span(self._shape, tokens)
        span.copy_from(self.row(row), tokens)
        return span

    def leave(self, row: int) -> None:
        """Remove a row. The last one takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            self._keys[:, row, :, :length] = self._keys[:, last, :, :length]
            self._values[:, row, :, :length] = self._values[:, last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()

    def wipe(self, row: int) -> None:
        """After values that are not numbers: the row's next user must not read them beyond its own end."""
        self._keys[:, row] = 0
        self._values[:, row] = 0

    def reserve(self, rows: int, tokens: int) -> int:
        """Make room. Return how many tokens of each row to read: rounded up, so that the number stays the same for a
        while, and kernels specialized for it serve several steps."""
        wanted = _rounded(tokens, _ALIGNMENT)
        had_rows, had_tokens = self._keys.shape[1], self._keys.shape[3]
        if rows <= had_rows and wanted <= had_tokens:
            return wanted
        rows = had_rows if rows <= had_rows else max(rows, 2 * had_rows)
        tokens = had_tokens if wanted <= had_tokens else _rounded(max(wanted, had_tokens + had_tokens // 2), _GROWTH)
        # Zeros, not uninitialized: masked values are multiplied by 0, and 0 times NaN is NaN.
        keys, values = self._shape.room(torch.zeros, rows, tokens)
        for row, length in enumerate(self.lengths):
            keys[:, row, :, :length] = self._keys[:, row, :, :length]
            values[:, row, :, :length] = self._values[:, row, :, :length]
        self._use(keys, values)
        return wanted

    def _use(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self._layers = list(zip(keys.unbind(0), values.unbind(0), strict=True))
        self.moves += 1


def _rounded(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit


class Prefixes:
    """Reusable spans, by request; never more than `most_tokens` in total."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._kept: OrderedDict[str, tuple[list[int], Span]] = OrderedDict()
        self.tokens = 0

    def keep(self, request_id: str, ids: list[int], span: Span) -> None:
        """Keep `span`, which contains exactly `ids`. It replaces what was kept for the request."""
        self.drop(request_id)
        if not ids or len(ids) > self._most:
            return
        self._kept[request_id] = (ids, span)
        self.tokens += len(ids)
        while self.tokens > self._most:
            self.drop(next(iter(self._kept)))

    def longest(self, request_id: str, ids: list[int]) -> tuple[int, Source | None]:
        """Return the length of the longest common prefix with `ids`, and its span."""
        best, owner = 0, None
        own = (request_id,) if request_id in self._kept else ()
        for name in (*own, *self._kept):
            kept = self._kept[name][0]
            if best == len(ids):
                break
            if best < len(kept) and kept[best] == ids[best] and (shared := common_prefix(kept, ids)) > best:
                best, owner = shared, name
        if owner is None:
            return 0, None
        self._kept.move_to_end(owner)
        return best, self._kept[owner][1].source

    def drop(self, request_id: str) -> None:
        dropped = self._kept.pop(request_id, None)
        if dropped is not None:
            self.tokens -= len(dropped[0])

    def clear(self) -> None:
        self._kept.clear()
        self.tokens = 0


def common_prefix(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix. Compares whole slices, which is as fast as C compares lists."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    low, high = 0, most  # equal up to low, different somewhere before high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
