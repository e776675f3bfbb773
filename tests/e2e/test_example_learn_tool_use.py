"""The example that trains: its settings are valid, and the teacher of its small form plays as it says."""

from __future__ import annotations

import asyncio
import json
import os
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


def test_the_script_plays_what_was_trained_and_not_what_it_played_before(tmp_path: Path) -> None:
    """Its commands are only noted: they take minutes on a GPU."""
    shutil.copy(EXAMPLE / "run.sh", tmp_path)
    noted = tmp_path / "noted"
    command = tmp_path / "command"
    command.write_text(f'#!/bin/sh\necho "$@" >> {noted}; [ "$1" != "$FAILS" ] || exit 130\n')
    command.chmod(0o700)
    before, after = (tmp_path / "runs/learn-play" / name for name in ("before-unseen", "after-unseen"))
    for folder in (before, after):
        folder.mkdir(parents=True)

    def run(fails: str) -> list[str]:
        noted.unlink(missing_ok=True)
        (tmp_path / "data").mkdir(exist_ok=True)
        environment = {**os.environ, "TOOLYARD": str(command), "FAILS": fails}
        done = subprocess.run(["bash", "run.sh", "--resume", "steps=42"], cwd=tmp_path, env=environment, check=False)
        assert done.returncode == (130 if fails else 0)
        return [" ".join(line.split()[:2]) for line in noted.read_text().splitlines()]

    played = ["rollout data/play.yaml"] * 2
    begun = [*["tasks generate"] * 2, "rollout --print-config", *played, "train -c"]
    assert run(fails="train") == begun
    assert after.exists()
    assert run(fails="") == [
        *begun,
        *played,
        *["eval runs/learn-play/before-unseen", "eval runs/learn-play/before-word-problems"],
    ]
    assert "--resume steps=42" in noted.read_text()
    assert noted.read_text().count("--set engine.adapter=runs/learn/model") == 2
    assert before.exists()
    assert not after.exists(), "an earlier model played there"


def test_curves_of_several_seeds_are_drawn(tmp_path: Path) -> None:
    row = {"step": 1, "reward": 0.5, "calls_ok": 1.0, "entropy": 0.2}
    for run in ("seed-1", "seed-2"):
        (tmp_path / run).mkdir()
        for file in ("metrics.jsonl", "evaluations.jsonl"):
            (tmp_path / run / file).write_text(json.dumps(row) + "\n")
    subprocess.run([sys.executable, EXAMPLE / "curves.py", "curves.png", "seed-1", "seed-2"], cwd=tmp_path, check=True)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


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
