"""The limiter that reaches furthest from here: the cluster's where Ray is connected, else this process's."""

from __future__ import annotations

import sys
from typing import Any

from .local import LocalLimiter
from .protocol import Limiter


def widest_limiter(name: str, limit: int) -> Limiter:
    """Blocks while it waits for the cluster: not for an event loop's own thread.

    Ray is not imported for it: who did not, is not connected.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return LocalLimiter(limit, name=name)
    from .ray import RayLimiter

    return RayLimiter(name, limit)
