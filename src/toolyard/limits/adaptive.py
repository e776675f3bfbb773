"""Learns how many executions a service can handle, from its refusals alone.

Never from latency: a slow program looks like an overloaded service, and a limiter that slows down for slow programs
ends at a tenth of what the service can handle.

Down. A refusal (429) at `n` in flight means that the service handles fewer than `n`: the limit becomes `n - 1`. Many
refusals at once agree with each other, because each one that leaves lowers `n`: of 100 started on a service that
handles 60, 40 are refused, at 100, 99 … 61 in flight. An unavailable service (503) says nothing about numbers: the
limit is halved.

But refusals may arrive late. Those of executions started before a cut say nothing about the limit after it, and a
service that refuses everything for a moment must not bring us down to 1. So refusals are counted in *rounds*: a round
cuts at most half of the limit. It ends when a refusal must belong to an execution started since: when more were refused
than were in flight at its start, or after a second. That bounds both errors: a brief burst of refusals costs half the
limit, and a service that drops to a tenth refuses at most twice as many as were in flight until the limit fits.

Up. Without refusals the limit grows by 1, 2, 4 … each second, so that a recovered service is fully used within seconds,
and a full one refuses about one execution a second. Only time counts, not successes: if nothing runs, growth proves
nothing but is harmless, since the first refusals cut it down again.
"""

from __future__ import annotations

import math

from toolyard.errors import ConfigError

GROWTH_SECONDS = 1.0
"""Time without a refusal after which the limit grows."""
ROUND_SECONDS = 1.0
"""After this, a refusal is assumed to belong to an execution started since the round began."""
MAX_PAUSE_SECONDS = 300.0
"""Longer pauses are cut to this: a typo in a header must not end a training run."""


def pause_seconds(retry_after: float | None) -> float:
    """How long to pause for a service's `retry_after`; 0.0 if it is missing or invalid."""
    return min(retry_after, MAX_PAUSE_SECONDS) if retry_after is not None and 0 <= retry_after < math.inf else 0.0


class AdaptiveLimit:
    """The current limit. Decides only: the caller counts executions, reads the clock and enforces the limit.

    `now` is in seconds, from any clock that does not go backwards.
    """

    def __init__(self, ceiling: int) -> None:
        self.ceiling = _checked(ceiling)
        self.limit = ceiling
        """How many may be in flight: at least 1, or we would never notice that the service is back."""
        self.paused_until = 0.0
        """Start nothing before this time. Never shortened."""
        self._step = 1
        self._grows_at = math.inf
        self._round_ends = -math.inf
        self._floor = 1
        """The lowest limit this round may cut to."""
        self._possibly_old = 0
        """How many more refusals may belong to executions started before this round."""

    def refused(
        self, now: float, in_flight: int, *, retry_after: float | None = None, unavailable: bool = False
    ) -> None:
        """The service refused an execution: it was full (429) or `unavailable` (503).

        `in_flight` still counts that execution. Nothing starts for `retry_after` seconds, if that is valid.
        """
        self.paused_until = max(self.paused_until, now + pause_seconds(retry_after))
        self._step = 1
        self._grows_at = max(now, self.paused_until) + GROWTH_SECONDS

        # With more in flight than the limit, nothing was started since the cut: the new limit is still untested.
        untried = in_flight > self.limit
        if untried or (self._possibly_old > 0 and now < self._round_ends):
            self._possibly_old -= 1
        else:
            self._floor = max(1, min(self.limit // 2, in_flight - 1))
            self._possibly_old = in_flight - 1
            self._round_ends = now + ROUND_SECONDS
        self.limit = min(self.limit, self._floor if unavailable else max(self._floor, in_flight - 1))

    def advance(self, now: float) -> int:
        """Apply growth up to `now` and return the limit. A pause does not count: nothing could be refused in it."""
        while self.limit < self.ceiling and self._grows_at <= now:
            self.limit = min(self.ceiling, self.limit + self._step)
            self._step *= 2
            self._grows_at += GROWTH_SECONDS
        return self.limit

    def next_change(self, now: float) -> float:
        """When `advance` will next change something or a pause ends: `now` if already due, `math.inf` if never."""
        grows_at = self._grows_at if self.limit < self.ceiling else math.inf
        pause_ends = self.paused_until if self.paused_until > now else math.inf
        return max(now, min(grows_at, pause_ends))

    def resize(self, ceiling: int) -> None:
        """A limit at the old ceiling moves with it; a lowered limit stays and continues to grow from there."""
        self.limit = _checked(ceiling) if self.limit == self.ceiling else min(self.limit, _checked(ceiling))
        self.ceiling = ceiling


def _checked(ceiling: int) -> int:
    if ceiling < 1:
        raise ConfigError(f"limit: {ceiling} executions would never run anything; expected at least 1")
    return ceiling
