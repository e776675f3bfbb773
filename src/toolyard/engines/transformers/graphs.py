"""The next token of every row, computed in a few fixed shapes, each recorded as a CUDA graph.

A small model on a GPU spends its time starting kernels, more than a thousand for one token. A graph starts all of them
at once. It repeats what was recorded, in the same memory: its inputs, its logits and the rows are tensors that stay
where they are, and the number of rows and of tokens to read is rounded up to one of a few sizes. The rows added by this
hold nothing, and nobody reads their logits. New weights are copied into the old ones' memory, where graphs find them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from toolyard.engines.transformers.attention import RowStep
from toolyard.engines.transformers.cache import Rows

if TYPE_CHECKING:
    from toolyard.engines.transformers.model import PackedModel

_log = logging.getLogger(__name__)
_cuda: Any = torch.cuda

_Size: TypeAlias = "tuple[int, int]"
"""How many rows, and how many tokens of each are read."""

_LEAST_ROWS, _LEAST_TOKENS = 8, 128
_MOST_GRAPHS = 64
"""The least recently used graph is dropped first. Each takes a few megabytes."""


class Decoder:
    """Computes logits of the next token of all rows."""

    def __init__(self, model: PackedModel, rows: Rows) -> None:
        self._model = model
        self._rows = rows
        self._records = model.device.type == "cuda"
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: the model has changed, beyond the values of its weights."""
        self._graphs: OrderedDict[_Size, Any] = OrderedDict()
        self._seen: set[_Size] = set()
        self._moves = -1

    @property
    def recorded(self) -> list[_Size]:
        """The sizes that have a graph."""
        return list(self._graphs)

    def logits(self, newest: Sequence[int]) -> Tensor:
        """Return the float32 logits after `newest[i]`, which follows the contents of row i. Valid until the next
        call."""
        count = len(newest)
        size = rows, tokens = rounded(count, _LEAST_ROWS), rounded(max(self._rows.lengths) + 1, _LEAST_TOKENS)
        self._rows.reserve(rows, tokens)
        if self._moves != self._rows.moves:
            self._allocate()
        padding = [0] * (rows - count)
        inputs = torch.tensor([[*newest, *padding], [*self._rows.lengths, *padding]])
        self._inputs[: inputs.numel()].copy_(inputs.view(-1))
        if size in self._seen and size not in self._graphs and self._records:
            self._record(size)
        if size in self._graphs:
            self._graphs.move_to_end(size)
            self._graphs[size].replay()
        else:
            self._compute(size)
            self._seen.add(size)
        return self._logits[:count]

    def _allocate(self) -> None:
        """Make tensors for the inputs and logits of as many rows as there are."""
        self.forget()
        self._moves = self._rows.moves
        device, rows = self._model.device, self._rows.most_rows
        self._inputs = torch.zeros(2 * rows, dtype=torch.long, device=device)
        self._logits = torch.zeros(rows, self._model.vocabulary, device=device)
        if self._records:
            # All graphs share memory for what they compute on the way: only one runs at a time.
            self._pool = _cuda.graph_pool_handle()

    @torch.inference_mode()
    def _compute(self, size: _Size) -> None:
        rows, tokens = size
        ids, positions = self._inputs[: 2 * rows].view(2, rows)
        step = RowStep(self._rows, ids, positions, tokens)
        self._logits[:rows].copy_(self._model.logits(step))

    def _record(self, size: _Size) -> None:
        """Record a size that was computed before: libraries have prepared what a recording must not contain."""
        graph, stream = _cuda.CUDAGraph(), _cuda.Stream(self._model.device)
        try:
            # The outer `stream` restores the current one, which a failed recording would not.
            with (
                _cuda.stream(stream),
                _cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                self._compute(size)
        except RuntimeError as error:
            self._records = False
            self._graphs.clear()
            _log.warning(
                "%s cannot be recorded as a CUDA graph, so tokens are sampled several times slower: %s",
                type(self._model.model).__name__,
                str(error).partition("\n")[0],
            )
            return
        self._graphs[size] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)


def rounded(number: int, least: int) -> int:
    """Round up to `least`, or 1.5, 2, 3, 4, 6, 8, … times that."""
    size = least
    while size < number:
        size *= 2
    return size * 3 // 4 if least < size and number <= size * 3 // 4 else size
