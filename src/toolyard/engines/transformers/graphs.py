"""CUDA graphs: a computation that is recorded once for each size, and repeated from then on.

A small model on a GPU spends its time starting kernels, more than a thousand for one token. A graph starts all of them
at once, but does exactly what was recorded, in the same memory. So the computation must depend on its size alone, and
take its inputs from tensors, and put its outputs into tensors, that stay where they are.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

_log = logging.getLogger(__name__)
_cuda: Any = torch.cuda

Size: TypeAlias = "tuple[int, ...]"

_OFTEN = 32
"""A size that was wanted this many times gets a graph of its own, even if there is a larger one."""
_MOST_GRAPHS = 64
"""The least recently used graph is dropped first."""
_PAUSE = 1000
"""After a lack of memory, record nothing in this many runs."""


class Graphs:
    """The graphs of one computation, by size. Without a GPU, or if recording fails, it is simply computed."""

    def __init__(self, name: str, compute: Callable[[Size], None], device: torch.device, *, slack: int) -> None:
        """A graph may be used for a computation that is smaller by up to a factor of `slack`."""
        self._name = name
        self._compute = compute
        self._device = device
        self._slack = slack
        self._records = device.type == "cuda"
        self._pause = 0
        self.clear()

    def clear(self) -> None:
        """Drop all graphs: something that they use has moved or changed."""
        self._graphs: OrderedDict[Size, Any] = OrderedDict()
        self._computed: set[Size] = set()
        self._wanted: Counter[Size] = Counter()
        self._memory: tuple[Any, Any] | None = None

    @property
    def recorded(self) -> list[Size]:
        """The sizes that have a graph."""
        return list(self._graphs)

    def fitting(self, wanted: Size) -> Size:
        """Return the size to run for `wanted`: a larger one if that has a graph and `wanted` has none."""
        if wanted in self._graphs:
            return wanted
        self._wanted[wanted] += 1
        if self._wanted[wanted] > _OFTEN:
            return wanted
        most = self._slack * math.prod(wanted)
        larger = [
            size
            for size in self._graphs
            if all(one >= other for one, other in zip(size, wanted, strict=True)) and math.prod(size) <= most
        ]
        return min(larger, key=math.prod, default=wanted)

    def run(self, size: Size) -> None:
        """Compute what is in the input tensors, arranged for `size`."""
        if self._pause:
            self._pause -= 1
        elif size not in self._graphs and size in self._computed and self._records:
            self._record(size)
        if size in self._graphs:
            self._graphs.move_to_end(size)
            self._graphs[size].replay()
        else:
            self._compute(size)
            self._computed.add(size)

    def _record(self, size: Size) -> None:
        """Record a size that was computed before: libraries have prepared what a recording must not contain."""
        try:
            self._graphs[size] = self._capture(size)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):  # perhaps not for long
                self._pause, until = _PAUSE, f" for the next {_PAUSE} steps"
            else:
                self._records, until = False, ""
            self.clear()
            why = str(error).partition("\n")[0]
            _log.warning(
                "%s: not recorded as a CUDA graph, and therefore several times slower%s: %s", self._name, until, why
            )
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def _capture(self, size: Size) -> Any:
        if self._memory is None:
            # All graphs share memory for what they compute on the way: only one runs at a time.
            self._memory = _cuda.graph_pool_handle(), _cuda.Stream(self._device)
        graph, (pool, stream) = _cuda.CUDAGraph(), self._memory
        # The outer `stream` restores the current one, which a failed recording would not.
        with (
            _cuda.stream(stream),
            _cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self._compute(size)
        return graph
