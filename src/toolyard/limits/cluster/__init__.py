"""One limit for a whole Ray cluster: a lender in an actor, and a borrower in every process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.limits.cluster.ray import RayLimiter

__all__ = ["RayLimiter"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.limits.cluster.ray": "RayLimiter",
    },
)
