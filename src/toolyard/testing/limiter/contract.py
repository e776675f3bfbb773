"""What any `Limiter` promises, seen from outside only: by the executions that run under its permits.

One that works through messages hears of a change a little later. So what must happen is waited for, and what must not
happen is looked for after `settle_seconds`.
"""

from __future__ import annotations

from toolyard.testing.limiter.crowd import Make
from toolyard.testing.limiter.permits import LimiterPermits
from toolyard.testing.limiter.sharing import LimiterSharing
from toolyard.testing.limiter.terms import LimiterTerms

__all__ = ["LimiterContract", "Make"]


class LimiterContract(LimiterSharing, LimiterPermits, LimiterTerms):
    """Inherit, and provide the fixture `make`: a `Make` whose limiters are closed at the end of the test.

    It passes these options on: `adaptive`, `starts_per_second`, `burst` and `max_hold_seconds`.
    """
