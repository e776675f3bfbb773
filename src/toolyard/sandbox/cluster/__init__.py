"""`RaySandbox`: the sandboxes of all nodes of a Ray cluster as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.sandbox.cluster.ray import RaySandbox

__all__ = ["RaySandbox"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.sandbox.cluster.ray": "RaySandbox",
    },
)
