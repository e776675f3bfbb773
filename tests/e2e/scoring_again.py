"""Dumps to rescore, and `toolyard score` on them, in this process or a separate one."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from toolyard.cli.score.report import ScoreReport
from toolyard.cli.score.run import ScoreArguments, run
from toolyard.messages import Message
from toolyard.records.lines import to_line
from toolyard.records.trajectory import Trajectory
from trajectory_samples import good_trajectory

TOOLYARD = str(Path(sys.executable).with_name("toolyard"))
SECONDS = 90


def toolyard(place: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [TOOLYARD, "score", *map(str, args)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=SECONDS, check=False)


def score(path: Path, reward: str, **asked) -> ScoreReport:
    return asyncio.run(run(ScoreArguments(path, reward, **asked), Console(file=io.StringIO())))


def changes(report: ScoreReport) -> dict[str, int]:
    return {change.value: count for change, count in report.total.changes.items() if count}


def answered(text: str, truth: object = "18", score: float | None = 1.0, **fields) -> Trajectory:
    """Said in two turns: the first asks a tool, the second is `text`. Its prompt has messages of an assistant too."""
    made = good_trajectory(fields.pop("seed", 1), turns=2)
    messages = list(made.messages)
    messages[-1] = Message("assistant", text)
    messages[1:1] = [Message("user", "Like this:"), Message("assistant", "#### 4")]
    rewards = fields.pop("rewards", {"final": score})
    known = {"ground_truth": truth, "score": score, "rewards": rewards, "messages": tuple(messages)}
    return replace(made, **(known | fields))


def fill(path: Path, *trajectories: Trajectory | dict | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        to_line(one)
        if isinstance(one, Trajectory)
        else one
        if isinstance(one, bytes)
        else json.dumps(one).encode() + b"\n"
        for one in trajectories
    ]
    path.write_bytes(b"".join(lines))
    return path


def function(place: Path, code: str, name: str = "mine") -> str:
    path = place / f"{name}.py"
    path.write_text(textwrap.dedent(code))
    return f"{path}:compute_score"


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def verls(output: str, score: float | None, **fields) -> dict:
    return {"input": "Q", "output": output, "gts": "18", "score": score, "step": 20, "acc": True, **fields}
