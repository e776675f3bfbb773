"""The embedded engine: a model in this process, using torch and transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.engines.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.engines.transformers.engine": "TransformersEngine",
    },
)
