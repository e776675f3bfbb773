"""A model that computes rows in a few fixed shapes, so that a GPU can repeat them from CUDA graphs.

Numbers of rows, pieces and tokens are rounded up to one of a few sizes. What is added computes something nobody reads:
empty rows, or copies of real pieces and tokens. New weights are copied into the memory of the old ones, where graphs
find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from toolyard.engines.transformers.attention import AnyStep, PromptStep, RowStep
from toolyard.engines.transformers.cache import Rows
from toolyard.engines.transformers.graphs import Graphs, Size

_LEAST_TOKENS, _LEAST_PIECE = 128, 16
_LEAST_ROWS = 2
"""Layers that are compiled for all sizes would be compiled once more for one row."""
_PASS_TOKENS = 1024
"""A pass over a few tokens takes as long as one over this many."""


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Tokens of a prompt, starting at `start`, whose keys and values go into a row."""

    row: int
    ids: Sequence[int]
    start: int


class StepModel(Protocol):
    """What is needed of a `PackedModel`."""

    model: Any
    device: torch.device
    vocabulary: int

    def logits(self, step: AnyStep) -> Tensor: ...


class StaticModel:
    """Computes the next token of all rows, and pieces of prompts in some of them."""

    def __init__(self, model: StepModel, rows: Rows) -> None:
        self._model = model
        self._rows = rows
        name = type(model.model).__name__
        self._next = Graphs(f"{name}, next tokens", self._compute_next, model.device, slack=1000)
        self._prompts = Graphs(f"{name}, prompts", self._compute_prompts, model.device, slack=4)
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, and what they read and write: the model has changed, beyond the values of its weights, or
        the rows have moved."""
        self._next.clear()
        self._prompts.clear()
        self._moves = -1
        self._newest = self._pieces = self._zeros(0)
        self._logits = torch.zeros(0, self._model.vocabulary, device=self._model.device)

    @property
    def recorded(self) -> tuple[list[Size], list[Size]]:
        """The sizes that have a graph: rows and tokens; pieces, their length and tokens."""
        return self._next.recorded, self._prompts.recorded

    def logits(self, newest: Sequence[int]) -> Tensor:
        """Return the float32 logits after `newest[i]`, which follows the contents of row i. Valid until the next
        call."""
        longest = max(self._rows.lengths) + 1
        tokens = rounded(longest, _LEAST_TOKENS, steps=4)  # finer steps: every row attends to this many
        size = self._next.fitting((_power_of_two(len(newest), _LEAST_ROWS), tokens))
        rows, _ = size
        self._follow(*size)
        padding = [0] * (rows - len(newest))
        inputs = torch.tensor([*newest, *padding, *self._rows.lengths, *padding])
        self._newest[: 2 * rows].copy_(inputs)
        self._next.run(size)
        return self._logits[: len(newest)]

    def fill(self, pieces: Sequence[RowPiece]) -> None:
        """Compute keys and values of pieces of prompts."""
        longest = max(len(piece.ids) for piece in pieces)
        end = max(piece.start + len(piece.ids) for piece in pieces)
        size = self._prompts.fitting(
            (rounded(len(pieces)), rounded(longest, _LEAST_PIECE), rounded(end, _LEAST_TOKENS))
        )
        count, length, tokens = size
        self._follow(0, tokens)
        everything = [*pieces, *[pieces[-1]] * (count - len(pieces))]
        numbers = [piece.row for piece in everything]
        for piece in everything:
            numbers += _filled(piece.ids, length)
        for piece in everything:
            numbers += _filled(range(piece.start, piece.start + len(piece.ids)), length)
        if len(numbers) > len(self._pieces):
            self._prompts.clear()
            self._pieces = self._zeros(_power_of_two(len(numbers)))
        self._pieces[: len(numbers)].copy_(torch.tensor(numbers))
        self._prompts.run(size)

    def _follow(self, rows: int, tokens: int) -> None:
        """Make room, and new tensors for inputs and logits if the rows have moved."""
        self._rows.reserve(rows, tokens)
        if self._moves != self._rows.moves:
            self.forget()
            self._moves = self._rows.moves
            self._newest = self._zeros(2 * self._rows.most_rows)
            self._pieces = self._zeros(2**15)
            self._logits = torch.zeros(self._rows.most_rows, self._model.vocabulary, device=self._model.device)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.long, device=self._model.device)

    @torch.inference_mode()
    def _compute_next(self, size: Size) -> None:
        rows, tokens = size
        ids, positions = self._newest[: 2 * rows].view(2, rows)
        self._logits[:rows].copy_(self._model.logits(RowStep(self._rows, ids, positions, tokens)))

    @torch.inference_mode()
    def _compute_prompts(self, size: Size) -> None:
        count, length, tokens = size
        owners, both = self._pieces[:count], self._pieces[count : count + 2 * count * length]
        ids, positions = both.view(2, count * length)
        self._model.logits(PromptStep(self._rows, owners, ids, positions, tokens))


def best_length(left: Sequence[int], room: int) -> int:
    """Return the length of the pieces in a pass over prompts of which `left` tokens are left: the one that computes
    most tokens for its time. A pass has at most `room` tokens, and takes the prompts with most left first."""
    most = sorted((count for count in left if count), reverse=True)
    longest = min(most[0], room)

    def worth(length: int) -> float:
        chosen = most[: max(room // length, 1)]
        return sum(min(count, length) for count in chosen) / (_PASS_TOKENS + length * len(chosen))

    lengths, size = [longest], _LEAST_PIECE
    while size < longest:
        lengths.append(size)
        size = rounded(size + 1, _LEAST_PIECE)
    return max(lengths, key=worth)


def rounded(number: int, least: int = 1, *, steps: int = 2) -> int:
    """Round up to `least`, or to one of `steps` sizes between powers of two: by default to 1.5, 2, 3, 4, 6, … times
    `least`."""
    step = max(_power_of_two(number, least) // (2 * steps), 1)
    return max(-(-number // step) * step, least)


def _power_of_two(number: int, least: int = 1) -> int:
    """Round up to `least` or 2, 4, 8, … times that."""
    size = least
    while size < number:
        size *= 2
    return size


def _filled(values: Sequence[int], length: int) -> list[int]:
    """Repeat the last one: it is computed several times, each time the same."""
    return [*values, *[values[-1]] * (length - len(values))]
