"""Limits how many executions start per second, independently of how many are in flight."""

from __future__ import annotations

import math

from toolyard.errors import ConfigError

SLACK = 1e-9
"""A token counts as whole if it lacks no more than this, so that rounding does not turn a punctual caller away. The
difference stays owed: the limit is exceeded by no more than this in total."""


class TokenBucket:
    """At most `burst + rate * seconds` starts over any period; full at first.

    Decides only: `now` is passed in, in seconds. Time never counts twice: if the clock goes backwards, no tokens are
    added until it catches up.
    """

    def __init__(self, rate: float, burst: float | None = None, now: float = 0.0) -> None:
        """`burst`: how many may start at once after a quiet time; default: one second's worth.

        Raises:
            ConfigError: `rate` is not positive and finite, or `burst` is below 1: nothing could ever start.
        """
        self.rate, self.burst = _checked(rate, burst)
        self._tokens = self.burst
        self._at = now

    def take(self, now: float) -> bool:
        """Take a token, if there is one."""
        self._refill(now)
        if self._tokens < 1 - SLACK:
            return False
        self._tokens -= 1
        return True

    def delay(self, now: float) -> float:
        """Seconds until `take` would succeed if no one else takes; 0.0 if it would now."""
        self._refill(now)
        if self._tokens >= 1 - SLACK:
            return 0.0
        return (1 - self._tokens) / self.rate + (self._at - now)

    def configure(self, now: float, rate: float, burst: float | None = None) -> None:
        """Change both from now on. Existing tokens are kept, up to the new burst.

        Raises:
            ConfigError: as in the constructor; nothing is changed.
        """
        rate, burst = _checked(rate, burst)
        self._refill(now)  # the time until now counts at the old rate
        self.rate, self.burst = rate, burst
        self._tokens = min(self._tokens, burst)

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now


def _checked(rate: float, burst: float | None) -> tuple[float, float]:
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate: {rate} starts per second; expected a finite number above 0")
    if burst is None:
        burst = max(1.0, rate)
    if not burst >= 1:
        raise ConfigError(f"burst: {burst} starts at once; expected at least 1, or nothing would ever start")
    return rate, burst
