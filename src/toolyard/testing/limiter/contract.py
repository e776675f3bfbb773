"""What any `Limiter` promises, tested from outside: by the executions that run under its permits.

A limiter that works through messages learns of a change a little later. So tests wait for what must happen, and check
for what must not happen after `settle_seconds`.
"""

from __future__ import annotations

from toolyard.testing.limiter.crowd import Make
from toolyard.testing.limiter.permits import LimiterPermits
from toolyard.testing.limiter.sharing import LimiterSharing
from toolyard.testing.limiter.terms import LimiterTerms

__all__ = ["LimiterContract", "Make"]


class LimiterContract(LimiterSharing, LimiterPermits, LimiterTerms):
    """Subclass it and provide the fixture `make`: a `Make` whose limiters are closed at the end of the test.

    It must pass on the options `adaptive`, `starts_per_second`, `burst` and `max_hold_seconds`.
    """
