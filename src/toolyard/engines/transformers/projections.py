"""Linear layers with the same input, computed in one product: queries, keys and values; gate and up.

On a GPU, a product with a few tokens takes hardly longer if it is three times as wide. The layers stay in the model,
with their names. Their weights become views of one tensor, so copying new values into a weight updates that tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that usually get the same input, by the names that transformers gives them. Whether they do is seen only when
they are called: one that gets another input computes for itself."""


class Projections:
    """All products of a model."""

    def __init__(self, model: Any) -> None:
        modules: list[Any] = list(model.modules())
        owners = Counter(id(value) for module in modules for value in module.parameters(recurse=False))
        found = [[getattr(module, name, None) for name in names] for module in modules for names in _SIBLINGS]
        self._products: list[_Product] = []
        try:
            for layers in found:
                if _fit(layers, owners):
                    self._products.append(_Product(layers))
        except BaseException:  # such as a lack of memory
            self.undo()
            raise

    def __len__(self) -> int:
        return len(self._products)

    def undo(self) -> None:
        """Let every layer compute for itself again, with whatever weights it has then."""
        for product in self._products:
            product.undo()
        self._products.clear()


class _Product:
    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._sizes = [layer.weight.shape[0] for layer in layers]
        self._weight = self._joined("weight")
        self._bias = None if layers[0].bias is None else self._joined("bias")
        self._input: Tensor | None = None
        self._parts: Sequence[Tensor] = ()
        for index, layer in enumerate(layers):
            layer.forward = self._forward_of(index)

    def _joined(self, name: str) -> Tensor:
        """Move these parameters of all layers into one tensor."""
        parameters = [getattr(layer, name) for layer in self._layers]
        joined = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, torch.split(joined, self._sizes), strict=True):
            parameter.data = part
        return joined

    def _forward_of(self, index: int) -> Callable[[Tensor], Tensor]:
        # A function, not a `partial`: torch would compile a `partial` again for each layer, and soon give up.
        def forward(given: Tensor) -> Tensor:
            return self._part(index, given)

        return forward

    def _part(self, index: int, given: Tensor) -> Tensor:
        """Return the layer's output. The first layer computes it for all."""
        if index == 0:
            self._input = given
            self._parts = torch.split(linear(given, self._weight, self._bias), self._sizes, -1)
        layer = self._layers[index]
        part = self._parts[index] if given is self._input else linear(given, layer.weight, layer.bias)
        if index == len(self._layers) - 1:
            self._input, self._parts = None, ()
        return part

    def undo(self) -> None:
        for layer in self._layers:
            del layer.forward


def _fit(layers: Sequence[Any], owners: Counter[int]) -> bool:
    """Return whether the layers can be one product. Subclasses, wrapped layers and quantized weights compute something
    else, and shared weights can only be views of one tensor."""
    if not all(type(layer) is torch.nn.Linear and "forward" not in vars(layer) for layer in layers):
        return False
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    values = [value for layer in layers for value in layer.parameters()]
    are_own = all(type(value) is torch.nn.Parameter and owners[id(value)] == 1 for value in values)
    return len(kinds) == 1 and len({*layers}) == len(layers) and are_own
