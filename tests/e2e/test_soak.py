"""A small run of `make soak`, which takes more of everything: ARGS="--trajectories 240 --kills 2"."""

from __future__ import annotations

import pytest
from soak import check, soak


@pytest.mark.timeout(400)
@pytest.mark.exhaustive
async def test_everything_fails_now_and_then_and_every_request_has_one_line(tmp_path, model):
    done, disturbed = await soak(tmp_path, model, trajectories=40, kills=1)
    reasons = check(done, 40)
    assert reasons["stop"] > 20
    assert disturbed["runs killed"] == 1
    assert disturbed["limiters killed"] > 0
