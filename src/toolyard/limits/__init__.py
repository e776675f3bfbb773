"""Concurrency limits: permits held with `async with`, fair between tenants, and safe through any crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolyard._lazy import exports

if TYPE_CHECKING:
    from toolyard.limits.cluster.ray import RayLimiter
    from toolyard.limits.local import LocalLimiter
    from toolyard.limits.prometheus_client import LimiterCollector
    from toolyard.limits.protocol import Limiter, LimiterStatistics, Permit, TenantStatistics

__all__ = [
    "Limiter",
    "LimiterCollector",
    "LimiterStatistics",
    "LocalLimiter",
    "Permit",
    "RayLimiter",
    "TenantStatistics",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "toolyard.limits.cluster.ray": "RayLimiter",
        "toolyard.limits.local": "LocalLimiter",
        "toolyard.limits.prometheus_client": "LimiterCollector",
        "toolyard.limits.protocol": "Limiter LimiterStatistics Permit TenantStatistics",
    },
)
