"""Attention over many sequences at once, for any transformers model whose attention can be selected.

A step is one forward pass over a flat list of tokens: the newest token of every row, then pieces of prompts. Everything
that works token by token (most of a model) sees one long sequence without padding; only attention knows where one
sequence ends and the next starts. It is registered with transformers under a name, and receives the `Step` as an
argument that models pass through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from toolyard.engines.transformers.cache import Rows, Span

_attentions: Any = AttentionInterface

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Features of some models' attention that this one does not support: caps, sinks, biases."""

PACKED = "toolyard_packed"
"""The name of this attention, for `attn_implementation`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a prompt, starting at `start`, whose keys and values go into `span`."""

    ids: Sequence[int]
    start: int
    span: Span
    is_last: bool = True
    """Whether the prompt ends with it, so that its next token is wanted."""


class RowStep:
    """One forward pass over the newest token of every row. What is computed depends on the shapes of its tensors, never
    on their values: a GPU can record it once and repeat it with other values."""

    def __init__(self, rows: Rows, ids: Tensor, positions: Tensor, longest: int) -> None:
        """`ids[i]` is the token at `positions[i]` of row i; no more than `longest` tokens of a row are read."""
        self.ids, self.positions = ids[None], positions[None]
        self._rows = rows
        self._longest = longest
        self._at = positions
        self._row = torch.arange(len(positions), device=positions.device)
        # On a GPU, for one token of each sequence, the fused kernels for float32 take half as long again.
        self._by_products = rows.dtype == torch.float32 and positions.device.type == "cuda"
        self._masks: dict[int | None, Tensor] = {}

    @property
    def last(self) -> int:
        """The logits of all tokens are wanted, which transformers calls 0."""
        return 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend, from [heads, rows, dim] to [rows, heads, dim]. With a `window`, a token sees itself and the
        window - 1 tokens before it."""
        keys, values = self._rows.layer(layer)
        keys[self._row, :, self._at] = key.transpose(0, 1)
        values[self._row, :, self._at] = value.transpose(0, 1)
        count, heads = len(self._row), keys.shape[1]
        # Query heads that share a key head are treated as positions, so that nothing has to be repeated for them.
        queries = query.transpose(0, 1).reshape(count, heads, -1, query.shape[2])
        keys, values = keys[:count, :, : self._longest], values[:count, :, : self._longest]
        attend = attend_by_products if self._by_products else scaled_dot_product_attention
        attended = attend(queries, keys, values, attn_mask=self._mask_of(window), scale=scale)
        return attended.reshape(count, -1, value.shape[2])

    def _mask_of(self, window: int | None) -> Tensor:
        """Build the mask once for all layers with the same window."""
        if window is not None and window >= self._longest:
            window = None
        if window not in self._masks:
            hidden = ~_visible(self._at, self._longest, window)
            mask = torch.zeros(len(self._at), 1, 1, self._longest, dtype=self._rows.dtype, device=self._at.device)
            self._masks[window] = mask.masked_fill_(hidden[:, None, None], -torch.inf)
        return self._masks[window]


class PromptStep:
    """One forward pass over pieces of prompts that are computed in rows, all of the same length. It fills the rows;
    nobody wants its logits. As in `RowStep`, what is computed depends on shapes alone."""

    def __init__(self, rows: Rows, owners: Tensor, ids: Tensor, positions: Tensor, end: int) -> None:
        """`owners[i]` is the row of the i-th piece. `ids` and `positions` are those of all pieces, one after the
        other. No more than `end` tokens of a row are read."""
        self.ids, self.positions = ids[None], positions[None]
        self._rows = rows
        self._owners = owners
        self._row = owners[:, None].expand(-1, len(ids) // len(owners)).flatten()
        self._end = end
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    @property
    def last(self) -> Tensor:
        """One token, since models insist on logits."""
        return torch.zeros(1, dtype=torch.long, device=self.ids.device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend, from [heads, tokens, dim] to [tokens, heads, dim], like `RowStep`."""
        keys, values = self._rows.layer(layer)
        keys[self._row, :, self.positions[0]] = key.transpose(0, 1)
        values[self._row, :, self.positions[0]] = value.transpose(0, 1)
        pieces, (heads, tokens, dim) = len(self._owners), query.shape
        shared = heads // keys.shape[1]
        attended = scaled_dot_product_attention(
            # As in `RowStep`, query heads that share a key head are treated as positions.
            query.view(heads, pieces, -1, dim).transpose(0, 1).reshape(pieces, keys.shape[1], -1, dim),
            keys[self._owners, :, : self._end],
            values[self._owners, :, : self._end],
            attn_mask=self._mask_of(window, shared),
            scale=scale,
        )
        return attended.reshape(pieces, heads, -1, value.shape[2]).transpose(1, 2).reshape(tokens, heads, -1)

    def _mask_of(self, window: int | None, shared: int) -> Tensor:
        """Build the mask once for all layers with the same window: [pieces, 1, shared * length, end]."""
        if window is not None and window >= self._end:
            window = None
        if (window, shared) not in self._masks:
            at = self.positions.view(len(self._owners), -1).repeat(1, shared)
            hidden = ~_visible(at.flatten(), self._end, window).view(len(at), 1, -1, self._end)
            mask = torch.zeros(hidden.shape, dtype=self._rows.dtype, device=at.device)
            self._masks[window, shared] = mask.masked_fill_(hidden, -torch.inf)
        return self._masks[window, shared]


class Step:
    """One forward pass: `newest[i]` is the token after the contents of row i; pieces follow."""

    def __init__(self, rows: Rows, newest: Sequence[int], pieces: Sequence[Piece], device: torch.device) -> None:
        self._count = len(newest)
        self._pieces: list[tuple[Piece, slice]] = []
        self._piece_masks: dict[int | None, list[Tensor | None]] = {}
        positions = rows.lengths[: self._count]
        ids = list(newest)
        for piece in pieces:
            place = slice(len(ids), len(ids) + len(piece.ids))
            ids += piece.ids
            positions = [*positions, *range(piece.start, piece.start + len(piece.ids))]
            self._pieces.append((piece, place))
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        self._end = max(positions, default=0) + 1
        if newest:
            longest = rows.reserve(self._count, max(rows.lengths) + 1)
            self._rows = RowStep(rows, self.ids[0, : self._count], self.positions[0, : self._count], longest)

    @property
    def last(self) -> Tensor:
        """Return the positions of the tokens whose logits are wanted: of each row, then of each last piece."""
        ends = [place.stop - 1 for piece, place in self._pieces if piece.is_last]
        return torch.tensor([*range(self._count), *ends], dtype=torch.long, device=self.ids.device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend, from [heads, tokens, dim] to [tokens, heads, dim], like `RowStep`."""
        if window is not None and window >= self._end:
            window = None
        if not self._pieces:
            return self._rows.attend(layer, query, key, value, scale, window)
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        if self._count:
            part = slice(0, self._count)
            out[part] = self._rows.attend(layer, query[:, part], key[:, part], value[:, part], scale, window)
        for (piece, place), mask in zip(self._pieces, self._masks_of(window), strict=True):
            end = piece.start + len(piece.ids)
            keys, values = piece.span.keys[layer], piece.span.values[layer]
            keys[:, piece.start : end] = key[:, place]
            values[:, piece.start : end] = value[:, place]
            attended = scaled_dot_product_attention(
                query[None, :, place],
                keys[None, :, :end],
                values[None, :, :end],
                attn_mask=mask,
                is_causal=mask is None and len(piece.ids) > 1,
                scale=scale,
                enable_gqa=True,
            )
            out[place] = attended[0].transpose(0, 1)
        return out

    def _masks_of(self, window: int | None) -> list[Tensor | None]:
        """Build the masks of the pieces once for all layers with the same window."""
        if window not in self._piece_masks:
            self._piece_masks[window] = [_piece_mask(piece, self.ids.device, window) for piece, _ in self._pieces]
        return self._piece_masks[window]


def attend_by_products(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, scale: float | None) -> Tensor:
    """`scaled_dot_product_attention`, step by step."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1) + attn_mask
    return scores.softmax(-1) @ value


def _visible(at: Tensor, end: int, window: int | None) -> Tensor:
    """Return [len(at), end]: which of the tokens before `end` those at `at` may see."""
    there, here = torch.arange(end, device=at.device), at[:, None]
    causal = there <= here
    return causal if window is None else causal & (there > here - window)


def _piece_mask(piece: Piece, device: torch.device, window: int | None) -> Tensor | None:
    """Return None if a token sees everything, or exactly what `is_causal` means."""
    if window is None and (piece.start == 0 or len(piece.ids) == 1):
        return None
    end = piece.start + len(piece.ids)
    return _visible(torch.arange(piece.start, end, device=device), end, window)


AnyStep: TypeAlias = Step | RowStep | PromptStep


@dataclass(frozen=True, slots=True)
class Current:
    """What models pass through to the attention. Compiled layers are compiled again for an argument of another type, so
    all kinds of steps are passed as this one."""

    step: Any


def _packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    toolyard_step: Any = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The function models call: from [1, heads, tokens, dim] to [1, tokens, heads, dim]."""
    asked = [name for name in _UNSUPPORTED if more.get(name) is not None]
    if asked:
        raise ValueError(f"its attention has {', '.join(asked)}")
    attended = toolyard_step.step.attend(module.layer_idx, query[0], key[0], value[0], scaling, sliding_window)
    return attended[None], None


_attentions.register(PACKED, _packed_attention)


def hide_from_compiler() -> None:
    """Compiled layers call the attention as it is: it depends on the step, and on the number of the layer."""
    compiler: Any = torch.compiler
    _attentions.register(PACKED, compiler.disable(_packed_attention))
