"""The real embedded model, sandbox and rewards: a small version of `make demo`."""

from __future__ import annotations

import pytest

from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.engines.models import resolve_model
from toolyard.records.audit import audit
from toolyard.records.dump import read_dump
from toolyard.rollout.config import EMBEDDED, load_config
from toolyard.rollout.run import run_rollouts


@pytest.mark.slow
@pytest.mark.timeout(400)  # a minute of processor time, on a machine that may be busy
@pytest.mark.kernel("confined")
async def test_the_embedded_model_calls_code_in_the_sandbox_and_is_scored(tmp_path):
    result = await run_rollouts(load_config(EMBEDDED, ["tasks.limit=1", "n=2", f"rollout_data_dir={tmp_path}"]))
    assert (result.summary.trajectories, result.summary.completed) == (2, 2)
    assert result.summary.with_calls >= 1
    assert result.summary.score.count == 2
    decode = load_tokenizer(resolve_model("smollm2-135m")).decode
    for line in read_dump(tmp_path):
        trajectory = line.trajectory
        assert audit(trajectory, decode) == []
        assert trajectory.tokens.response_logprobs is not None
        assert all(turn.sampled.cached_tokens for turn in trajectory.turns[1:]), "the KV cache of the turn before"
