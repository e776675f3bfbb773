"""A small run of `python tests/e2e/fuzz_service.py`."""

from __future__ import annotations

import pytest
from fuzz_service import fuzz


@pytest.mark.slow
async def test_hostile_requests_get_no_500_leave_nothing_behind_and_the_next_is_served() -> None:
    outcome = await fuzz(400, seed=7)
    assert outcome.failures == []
    answered = {status for status in outcome.statuses if status.isdigit()}
    assert answered >= {"200", "201", "400", "404", "405", "415", "421", "422", "431"}, "it reached what it is for"
