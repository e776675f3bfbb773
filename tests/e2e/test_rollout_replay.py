"""A run of the real embedded model, recorded once: replayed without model and sandbox, it is bit-identical.

Everything between them really runs: rendering, parsing, limits, rewards, audit, dump. After a change
that is meant to change these, record it again:

    toolyard rollout --record embedded.tape --out run && gzip -9nc embedded.tape > tests/data/embedded.tape.gz
    gzip -9nc run/0.jsonl > tests/data/embedded.jsonl.gz
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from toolyard.errors import DivergenceError
from toolyard.records.audit import audit
from toolyard.records.dump import read_dump
from toolyard.rollout.config import EMBEDDED, load_config
from toolyard.rollout.run import run_rollouts

DATA = Path(__file__).parents[1] / "data"
TAPE = DATA / "embedded.tape.gz"


async def test_the_recorded_run_of_the_embedded_model_is_the_same_to_the_bit(tmp_path):
    settings = [f"replay={TAPE}", f"rollout_data_dir={tmp_path}"]
    result = await run_rollouts(load_config(EMBEDDED, settings))
    recorded = gzip.decompress((DATA / "embedded.jsonl.gz").read_bytes()).splitlines()
    played = (tmp_path / "0.jsonl").read_bytes().splitlines()
    assert played == recorded
    assert (result.summary.trajectories, result.summary.with_calls) == (16, 15)
    assert not any(audit(line.trajectory) for line in read_dump(tmp_path))


@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        ("limits.response_length=300", "asked.max_tokens is 300; the tape has 512"),
        pytest.param("seed=1", "asked.seed is", marks=pytest.mark.slow),
        pytest.param("prompt.instruction=Use Python.", "asked.prompt_tokens is", marks=pytest.mark.slow),
        ("chat.tool_wrapper=Result {}", "asked.prompt_tokens is"),
    ],
)
async def test_what_was_changed_is_shown_as_the_first_divergence(setting, difference):
    with pytest.raises(DivergenceError) as raised:
        await run_rollouts(load_config(EMBEDDED, [f"replay={TAPE}", setting]))
    assert difference in str(raised.value)


async def test_a_tape_of_other_requests_is_refused(tmp_path):
    with pytest.raises(DivergenceError, match="the tape has none of the 16 requests"):
        await run_rollouts(load_config(EMBEDDED, [f"replay={TAPE}", "step=7"]))
