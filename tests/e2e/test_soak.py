"""A small run of `make soak`."""

from __future__ import annotations

import pytest
from soak import check, soak


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize(("trajectories", "kills"), [(40, 1), (240, 2)])
async def test_everything_fails_now_and_then_and_every_request_has_one_line(tmp_path, model, trajectories, kills):
    done, disturbed = await soak(tmp_path, model, trajectories=trajectories, kills=kills)
    reasons = check(done, trajectories)
    assert reasons["stop"] > trajectories // 2
    assert disturbed["runs killed"] == kills
    assert disturbed["limiters killed"] > 0
