"""The example that trains: its settings are valid, and the teacher of its small form plays as it says."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolyard.records.dump import read_dump
from toolyard.rollout import run_rollouts
from toolyard.rollout.config import EngineConfig
from toolyard.train.config import load_train_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "learn_tool_use"


@pytest.mark.slow
def test_the_teacher_of_the_small_form_shows_calls_that_run_and_answers_what_they_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("small.py", "small.yaml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    subprocess.run([sys.executable, "small.py"], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    config = load_train_config("small.yaml")
    assert config.warm_start is not None
    script, taught = config.warm_start.script, config.warm_start.tasks
    tasks = config.rollout.tasks.model_copy(update={"path": taught, "limit": 60})
    engine = EngineConfig(kind="scripted", model=config.rollout.engine.model, script=script)
    changed = {"engine": engine, "tasks": tasks, "n": 1, "rollout_data_dir": "out"}
    asyncio.run(run_rollouts(config.rollout.model_copy(update=changed)))
    played = [line.trajectory for line in read_dump("out")]
    assert len(played) == 60
    for one in played:
        (call,) = one.turns[0].tool_calls
        assert one.messages[-1].content == f"#### {call.response.strip()}"
    right = sum(one.score == 1 for one in played)
    assert 10 <= right <= 35, "which operation a story asks for, it does not show"


def test_the_settings_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)
    assert load_train_config("train.yaml").dynamic_sampling
