"""Divides scarce permits: weighted max-min fairness between tenants, then between processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Claim:
    """One process's demand for one tenant."""

    process: str
    tenant: str
    weight: float
    demand: float


@dataclass(slots=True)
class _Tenant:
    weight: float = 0.0
    demand: float = 0.0
    by_process: dict[str, float] = field(default_factory=dict[str, float])


def fair_shares(capacity: float, claims: Iterable[Claim]) -> dict[str, dict[str, float]]:
    """Return fractional permits by process and tenant, in total `capacity` or the whole demand.

    A tenant's share does not depend on how many processes it is spread over, and no one gets more than it wants while
    another gets less than its share.
    """
    tenants: dict[str, _Tenant] = {}
    for claim in claims:
        tenant = tenants.setdefault(claim.tenant, _Tenant())
        tenant.weight = max(tenant.weight, claim.weight)
        tenant.demand += claim.demand
        tenant.by_process[claim.process] = tenant.by_process.get(claim.process, 0.0) + claim.demand
    levels = fill(capacity, {name: (tenant.demand, tenant.weight) for name, tenant in tenants.items()})
    shares: dict[str, dict[str, float]] = {}
    for name, tenant in tenants.items():
        split = fill(levels[name], {process: (demand, 1.0) for process, demand in tenant.by_process.items()})
        for process, share in split.items():
            shares.setdefault(process, {})[name] = share
    return shares


def fill(capacity: float, wanted: Mapping[K, tuple[float, float]]) -> dict[K, float]:
    """Weighted max-min fair division. `wanted` maps names to demand and weight."""
    left = capacity
    weights = sum(weight for _, weight in wanted.values())
    shares: dict[K, float] = {}
    for name, (demand, weight) in sorted(wanted.items(), key=lambda item: item[1][0] / item[1][1]):
        shares[name] = share = min(demand, left * weight / weights if weights > 0 else 0.0)
        left -= share
        weights -= weight
    return shares
