"""`toolyard rollout` as a user runs it: real processes, killed, interrupted, resumed, recorded and replayed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from toolyard.cli.app import app
from toolyard.errors import ConfigError, ToolyardError
from toolyard.records.dump import read_dump
from toolyard.rollout.config import load_config
from toolyard.rollout.run import Observer, RolloutResult, run_rollouts
from toolyard.testing.engine.byte_model import ByteModel
from toolyard.testing.engine.servers import EngineServer

TOOLS = """
import asyncio

from toolyard.tools import tool


@tool
async def look_up(word: str) -> str:
    \"\"\"Looks a word up, slowly.

    Args:
        word: What to look up.
    \"\"\"
    await asyncio.sleep(0.3)
    return f"{word}: 42"
"""
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "answer"}}\n</tool_call>'


@pytest.fixture
def place(tmp_path, model) -> Path:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: my_tools.look_up\n")
    rows = [{"id": f"t{number}", "prompt": f"What is the answer, {number}?", "answer": "42"} for number in range(12)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "script.json").write_text(json.dumps([CALL, "#### 42"]))
    settings = {
        "tasks": {"path": "tasks.jsonl"},
        "engine": {"kind": "scripted", "model": str(model), "script": "script.json"},
        "tools": "tools.yaml",
        "n": 2,
    }
    (tmp_path / "rollout.yaml").write_text(json.dumps(settings))
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("toolyard")), *arguments]


def toolyard(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=place, capture_output=True, text=True, timeout=100, check=False)


def rolled(place: Path, *arguments: str) -> dict:
    done = toolyard(place, "rollout", "rollout.yaml", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ids(folder: Path) -> list[str]:
    return [line.trajectory.request_id for line in read_dump(folder)]


def test_tasks_are_played_dumped_summed_up_and_not_played_again(place):
    done = toolyard(place, "rollout", "rollout.yaml", "--out", "runs/a")
    assert done.returncode == 0, done.stderr
    assert "24 trajectories in" in done.stdout
    assert "dump: runs/a/0.jsonl" in done.stdout
    assert "look_up" in done.stdout
    lines = [line.trajectory for line in read_dump(place / "runs/a")]
    assert len(lines) == 24
    assert {(line.score, line.finish_reason, line.messages[-2].content) for line in lines} == {
        (1.0, "stop", "answer: 42")
    }
    assert sorted({line.rollout_offset for line in lines}) == [0, 1]

    again = rolled(place, "--out", "runs/a")
    assert (again["trajectories"], again["done_before"]) == (0, 24)
    more = rolled(place, "--out", "runs/a", "--n", "3")
    assert (more["trajectories"], more["done_before"], more["score"]["mean"]) == (12, 24, 1.0)
    assert len(set(ids(place / "runs/a"))) == 36

    checked = toolyard(place, "audit", "runs/a")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ended_in_the_middle_it_goes_on_where_it_was(place, how):
    run = ["rollout", "rollout.yaml", "--out", "runs/a", "--concurrency", "2", "--json"]
    process = subprocess.Popen(command(*run), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    dump = place / "runs/a/0.jsonl"
    deadline = time.monotonic() + 30
    while (not dump.exists() or dump.read_bytes().count(b"\n") < 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, how)
    _, said = process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if how is signal.SIGKILL else 130), said
    before = ids(place / "runs/a")
    assert 3 <= len(before) < 24
    again = rolled(place, "--out", "runs/a")
    assert again["done_before"] == len(before)
    after = ids(place / "runs/a")
    assert len(after) == len(set(after)) == 24, "none twice, none lost"


def test_a_tape_is_replayed_without_engine_and_tools_to_the_bit(place):
    rolled(place, "--out", "runs/live", "--record", "run.tape")
    (place / "my_tools.py").write_text("raise SystemExit('the tools must not be needed')")
    (place / "script.json").unlink()
    summary = rolled(place, "--out", "runs/again", "--replay", "run.tape")
    assert summary["trajectories"] == 24
    assert (place / "runs/live/0.jsonl").read_bytes() == (place / "runs/again/0.jsonl").read_bytes()
    for line in read_dump(place / "runs/again"):
        assert line.trajectory.reward_details == {
            "final": {"weight": 1.0, "reason": "the answer 42 equals 42", "extracted": "42", "expected": "42"},
            "tool/look_up": {"weight": 0.0},
        }

    other = ["rollout", "rollout.yaml", "--replay", "run.tape", "--out", "runs/other"]
    done = toolyard(place, *other, "--set", "limits.response_length=300")
    assert done.returncode == 1
    assert "asked.max_tokens is 300; the tape has 4096" in done.stderr


@pytest.mark.slow
def test_the_replay_engine_samples_as_the_tape_did_while_tools_are_real(place):
    rolled(place, "--out", "runs/live", "--record", "run.tape")
    summary = rolled(place, "--engine", "replay", "--set", "engine.tape=run.tape", "--out", "runs/again")
    assert (summary["trajectories"], summary["completed"]) == (24, 24)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tasks", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--set", "limits.response_lenght=5"], "override 'limits.response_lenght=5': unknown key"),
        (["--set", "n=none"], "override 'n=none': Input should be a valid integer"),
        (["--engine", "sglang"], "engine.urls: sglang needs a server URL"),
        (["--record", "a", "--replay", "b"], "record and replay cannot be used together"),
        (["--replay", "nowhere.tape"], "nowhere.tape"),
        (["--reward", "nowhere:score"], "nowhere"),
        (["--format", "morse"], "morse"),
        (["--tools", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_told(place, arguments, complaint, monkeypatch):
    monkeypatch.chdir(place)
    done = CliRunner().invoke(app, ["rollout", "rollout.yaml", "--out", "runs/a", *arguments])
    assert isinstance(done.exception, ToolyardError), "told in one line by the command"
    assert complaint in str(done.exception)


def test_a_bad_row_is_told_by_its_line_before_anything_runs_or_skipped_on_request(place):
    with (place / "tasks.jsonl").open("a") as file:
        file.write('{"prompt": 5}\n')
    done = toolyard(place, "rollout", "rollout.yaml", "--out", "runs/a")
    assert (done.returncode, "line 13" in done.stderr) == (1, True), done.stderr
    assert not (place / "runs").exists()
    assert rolled(place, "--out", "runs/a", "--skip-bad-rows")["trajectories"] == 24


@pytest.mark.slow
def test_nothing_completed_is_a_failure_and_says_why(place):
    (place / "script.json").write_text(json.dumps({"t1": ["#### 42"]}))
    done = toolyard(place, "rollout", "rollout.yaml", "--out", "runs/a", "--limit", "1")
    assert done.returncode == 1
    assert "has no turn 1 for task 't0'" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_own_tasks_are_played_as_they_are_by_the_embedded_defaults(place):
    embedded = yaml.safe_load(toolyard(place, "rollout", "--print-config").stdout)
    assert embedded["prompt"]["system"]
    assert embedded["prompt"]["examples"]
    own = yaml.safe_load(toolyard(place, "rollout", "--tasks", "tasks.jsonl", "--print-config").stdout)
    assert own["prompt"] == {"system": None, "examples": [], "instruction": None}
    assert (own["tasks"]["limit"], own["chat"]["format"]) == (None, "code_block")


@pytest.mark.slow
def test_what_the_settings_put_into_every_prompt_is_printed_before_the_first_turn(place):
    done = toolyard(place, "rollout", "rollout.yaml", "--out", "runs/a", "--set", "prompt.instruction=Think first.")
    assert "every prompt gets the instruction 'Think first.' at its end" in done.stderr


def test_settings_are_printed_as_they_would_be_used(place):
    done = toolyard(place, "rollout", "rollout.yaml", "--n", "7", "--set", "sampling.top_p=0.9", "--print-config")
    assert "n: 7" in done.stdout
    assert "top_p: 0.9" in done.stdout


# Resuming, in this process --------------------------------------------------------------------------------------------


class Noted(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


async def again(*settings: str) -> tuple[RolloutResult, list[str]]:
    observer = Noted()
    result = await run_rollouts(load_config("rollout.yaml", ["rollout_data_dir=runs/a", *settings]), observer)
    return result, observer.notes


async def test_what_failed_is_played_again_on_request_and_has_one_line(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "script.json").write_text(json.dumps({"t0": ["#### 42"], "t2": ["#### 41"]}))
    first, _ = await again("tasks.limit=3", "n=1")
    assert (first.summary.completed, first.summary.finish_reasons["bad_task"]) == (2, 1)
    (place / "script.json").write_text(json.dumps(["#### 42"]))
    with pytest.raises(ConfigError, match=r"engine\.script: the contents have changed"):
        await again("tasks.limit=3", "n=1")
    kept, _ = await again("tasks.limit=3", "n=1", "accept_changes=true")
    assert (kept.summary.trajectories, kept.done_before) == (0, 3)
    mended, _ = await again("tasks.limit=3", "n=1", "retry_failed=true")
    assert (mended.summary.trajectories, mended.done_before, mended.missing) == (1, 2, 0)
    lines = {line.trajectory.batch_data_id: line.trajectory.score for line in read_dump(place / "runs/a")}
    assert lines == {"t0": 1.0, "t1": 1.0, "t2": 0.0}
    assert len(ids(place / "runs/a")) == 3


async def test_only_what_this_run_asks_for_counts_as_done(place, monkeypatch):
    monkeypatch.chdir(place)
    await again("tasks.limit=3")
    fewer, _ = await again("tasks.limit=2", "n=1")
    assert (fewer.done_before, fewer.missing, fewer.summary.trajectories) == (2, 0, 0)
    (place / "runs/a/rollout.json").write_text("{half")
    await again("tasks.limit=2", "n=1")
    assert json.loads((place / "runs/a/rollout.json").read_text())["tools"] == "tools.yaml"


async def test_the_tape_of_a_resumed_run_replays_what_it_has(place, monkeypatch):
    monkeypatch.chdir(place)
    await again("tasks.limit=2", "n=1")
    await again("tasks.limit=3", "n=1", "record=rest.tape")
    replayed, notes = await again("tasks.limit=3", "n=1", "replay=rest.tape", "rollout_data_dir=runs/b")
    assert (replayed.summary.trajectories, replayed.missing) == (1, 2)
    assert set(replayed.accounting.missing.values()) == {"not on the tape"}
    assert "the tape has 1 of 3 requests; the others are skipped" in notes
    with pytest.raises(ToolyardError, match="tapes are never overwritten"):
        await again("record=rest.tape")


@pytest.mark.parametrize("kind", ["sglang", "vllm", "openai"])
async def test_servers_are_named_in_settings(place, monkeypatch, kind):
    monkeypatch.chdir(place)
    async with EngineServer(model=ByteModel("#### 42"), api_key="secret") as server:
        engine = [f"engine.kind={kind}", f"engine.urls=[{server.url}]", "engine.api_key=secret", "tasks.limit=3"]
        model = ["engine.model=null"] if kind == "openai" else []
        result, _ = await again(*engine, *model)
    assert (result.summary.completed, result.summary.token_exact) == (6, 6)
    if kind == "openai":  # elsewhere, the folder's tokenizer gives the server's bytes other numbers
        assert result.summary.score.mean == 1.0
    assert "secret" not in (place / "runs/a/rollout.json").read_text()
