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

import torch
from torch import Tensor

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

    def room(self, make: Callable[..., Tensor], *sizes: int) -> Tensor:
        """Allocate keys and values, side by side, for `sizes[0]` sequences (if there are two sizes) of `sizes[-1]`
        tokens."""
        *rows, tokens = sizes
        width = self.key_dim + self.value_dim
        return make(self.layers, *rows, self.heads, tokens, width, dtype=self.dtype, device=self.device)

    def parts(self, room: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the keys and the values."""
        return room[..., : self.key_dim], room[..., self.key_dim :]


class Span:
    """Keys and values of one sequence."""

    def __init__(self, shape: TokenShape, tokens: int) -> None:
        self.contents = shape.room(torch.empty, tokens)
        """[layers, heads, tokens, dim of keys and values]."""
        self.keys, self.values = shape.parts(self.contents)

    def copy_from(self, source: Tensor, tokens: int) -> None:
        self.contents[:, :, :tokens] = source[:, :, :tokens]


class Rows:
    """Keys and values of the sequences being sampled, without gaps."""

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
        self._use(self._shape.room(torch.zeros, 0, 0))

    def empty(self) -> None:
        """Discard everything, but keep its memory for the next rows."""
        self.lengths.clear()
        self._contents.zero_()

    @property
    def dtype(self) -> torch.dtype:
        return self._shape.dtype

    @property
    def capacity(self) -> int:
        """Number of tokens that fit in all rows together."""
        return self._contents.shape[1] * self._contents.shape[3]

    @property
    def most_rows(self) -> int:
        """Number of rows that fit."""
        return self._contents.shape[1]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, for reading and writing: [rows, heads, tokens, dim]."""
        return self._layers[index]

    def join(self, source: Tensor | None, tokens: int) -> None:
        """Add a row that starts with the first `tokens` of `source`, which may be another row."""
        row = len(self.lengths)
        self.reserve(row + 1, tokens)
        if source is not None:
            self._contents[:, row, :, :tokens] = source[:, :, :tokens]
        self.lengths.append(tokens)

    def row(self, index: int) -> Tensor:
        """Return a view of a row, valid until the next change, like the contents of a `Span`."""
        return self._contents[:, index]

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
            self._contents[:, row, :, :length] = self._contents[:, last, :, :length]
            self._contents[:, last, :, :length] = 0  # `wipe` would not reach them here
            self.lengths[row] = length
        self.lengths.pop()

    def wipe(self, row: int) -> None:
        """After values that are not numbers: the row's next user must not read them beyond its own end."""
        self._contents[:, row] = 0

    def reserve(self, rows: int, tokens: int) -> int:
        """Make room. Return how many tokens of each row to read: rounded up, so that the number stays the same for a
        while, and kernels specialized for it serve several steps."""
        wanted = _rounded(tokens, _ALIGNMENT)
        had_rows, had_tokens = self._contents.shape[1], self._contents.shape[3]
        if rows <= had_rows and wanted <= had_tokens:
            return wanted
        rows = had_rows if rows <= had_rows else max(rows, 2 * had_rows)
        tokens = had_tokens if wanted <= had_tokens else _rounded(max(wanted, had_tokens + had_tokens // 2), _GROWTH)
        # Zeros, not uninitialized: masked values are multiplied by 0, and 0 times NaN is NaN.
        contents = self._shape.room(torch.zeros, rows, tokens)
        for row, length in enumerate(self.lengths):
            contents[:, row, :, :length] = self._contents[:, row, :, :length]
        self._use(contents)
        return wanted

    def _use(self, contents: Tensor) -> None:
        self._contents = contents  # [layers, rows, heads, tokens, dim of keys and values]
        self._layers = [self._shape.parts(layer) for layer in contents.unbind(0)]
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

    def longest(self, request_id: str, ids: list[int]) -> tuple[int, Tensor | None]:
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
        return best, self._kept[owner][1].contents

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
