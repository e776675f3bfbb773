"""A small run of `make soak`."""

from __future__ import annotations

import pytest
from soak import check, soak


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_everything_fails_now_and_then_and_every_request_has_one_line(tmp_path, model):
    done, disturbed = await soak(tmp_path, model, trajectories=240, kills=2)
    reasons = check(done, 240)
    assert reasons["stop"] > 120
    assert disturbed["runs killed"] == 2
    assert disturbed["limiters killed"] > 0
