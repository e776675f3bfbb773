"""The screen of `toolyard rollout`: in terminals of two sizes, in a pipe, and interrupted before the first request."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tmux import Tmux, in_tmux, needs_tmux

TOOLYARD = str(Path(sys.executable).with_name("toolyard"))
SECONDS = 60.0
WAIT = "while not Path({!r}).exists():\n    time.sleep(0.02)\n"
REWARD = f"""
import time
from pathlib import Path

{WAIT.format("imported")}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""
TOOLS = """
import asyncio
from pathlib import Path

from toolyard.tools import tool


@tool
async def look_up(word: str) -> str:
    \"\"\"Looks a word up.

    Args:
        word: What to look up.
    \"\"\"
    while not Path("answer").exists():
        await asyncio.sleep(0.02)
    return f"{word}: 42"
"""
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "answer"}}\n</tool_call>'


@pytest.fixture
def place(tmp_path, model) -> Path:
    """The reward's import blocks the event loop until there is a file `imported`, the tool waits for `answer`."""
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "my_tools.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text("tools:\n  - class_name: my_tools.look_up\n")
    rows = [{"id": f"t{number}", "prompt": "What is the answer?", "answer": "42"} for number in range(3)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "script.json").write_text(json.dumps([CALL, "#### 42"]))
    settings = {
        "tasks": {"path": "tasks.jsonl"},
        "engine": {"kind": "scripted", "model": str(model), "script": "script.json"},
        "rewards": {"final": "my_rewards:compute_score"},
        "tools": "tools.yaml",
        "rollout_data_dir": "runs/a",
        "n": 2,
    }
    (tmp_path / "rollout.yaml").write_text(json.dumps(settings))
    return tmp_path


def until_it_ticks(tmux: Tmux) -> None:
    """Until the first stage has gone on for a second, while the event loop is blocked."""
    end = time.monotonic() + SECONDS
    while not re.search(r"^loading rewards and tools  [1-9]\d* s$", screen := tmux.screen(), re.MULTILINE):
        assert time.monotonic() < end, screen
        time.sleep(0.05)


@needs_tmux
@pytest.mark.parametrize("size", [(80, 24), (140, 45)])
def test_it_says_what_it_is_doing_how_far_it_is_and_what_to_do_next(place, size):
    with in_tmux(place, size, "sh", "-c", f"{TOOLYARD} rollout rollout.yaml; echo status $?; exec cat") as tmux:
        until_it_ticks(tmux)
        (place / "imported").touch()
        shown = tmux.until("0/6 done", "0/3 groups · 0 failed · reward –", "tool calling 6", " tokens/s · ")
        lines = [line.rstrip() for line in shown.rstrip().split("\n")]
        assert re.match(r"started after [\d.]+ s: .*loading rewards and tools [\d.]+ s", " ".join(lines))
        assert re.fullmatch(r"rollouts ━+ 0/6 done \d+ s", lines[-4]), "and nothing below it is wrapped"
        (place / "answer").touch()
        lines = [line.strip() for line in tmux.until("status 0").split("\n")]
    at = lines.index("next:")
    assert lines[at + 1 : at + 4] == ["toolyard view runs/a", "toolyard audit runs/a", "status 0"]


def test_in_a_pipe_it_writes_plain_lines(place):
    with subprocess.Popen(
        [TOOLYARD, "rollout", "rollout.yaml"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        (place / "imported").touch()
        (place / "answer").touch()
        stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, stderr
    assert re.fullmatch(r"loading rewards and tools  \d+ s\n", first)
    assert [char for char in first + stderr + stdout if not char.isprintable() and char != "\n"] == []
    assert "6 trajectories in" in stdout
    assert "rollouts ━" not in stderr


@pytest.mark.slow
def test_interrupted_twice_it_ends_even_if_an_import_never_does(place):
    with subprocess.Popen(
        [TOOLYARD, "rollout", "rollout.yaml"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "loading rewards and tools" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, stderr
    assert stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in stderr
