"""A dump for pictures: the recorded trajectories of the demo, several times, with made-up scores, calls and times."""

from __future__ import annotations

import copy
import gzip
import json
import random
from pathlib import Path
from typing import Any

STEPS, SAMPLES, CONCURRENCY = 6, 8, 24
BEGAN = 1_750_000_000.0
ERRORS = {
    "NameError: name 'total' is not defined": "failed",
    "SyntaxError: unterminated string literal": "failed",
    "ZeroDivisionError: division by zero": "failed",
    "The program was stopped after 10 s.": "timed_out",
}


def write_made_up_dump(recorded: Path, folder: Path) -> None:
    lines = [json.loads(line) for line in gzip.decompress(recorded.read_bytes()).splitlines()]
    chance = random.Random(7)  # noqa: S311 - a picture is no secret
    by_task: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_task.setdefault(line["batch_data_id"], []).append(line)
    tasks = {f"{name}-{copy_}": found for name, found in by_task.items() for copy_ in "abc"}
    skill = {task: chance.choice([-0.1, -0.1, 0.0, 0.4, 0.7, 1.2]) for task in tasks}
    for step in range(STEPS):
        free = [BEGAN + 60.0 * step] * CONCURRENCY
        with (folder / f"{step}.jsonl").open("w") as file:
            for task, found in tasks.items():
                for sample in range(SAMPLES):
                    line = _line(chance, found[sample % len(found)], skill[task] + chance.uniform(-0.05, 0.09) * step)
                    line |= {"step": step, "batch_data_id": task, "rollout_offset": sample}
                    line["request_id"] = f"{chance.getrandbits(96):024x}"
                    line["started_at"] = min(free)
                    free[free.index(min(free))] += sum(line["metrics"]["seconds"].values())
                    file.write(json.dumps(line) + "\n")


def _line(chance: random.Random, recorded: dict[str, Any], skill: float) -> dict[str, Any]:
    line = copy.deepcopy(recorded)
    line["score"] = float(chance.random() < skill)
    slow = chance.lognormvariate(0, 0.5) / 4
    now = 0.1
    for turn in line["turns"]:
        timings = turn["timings"]
        timings["started"], timings["generating"] = now, timings["generating"] * slow
        for call in turn["tool_calls"]:
            call["metrics"]["queue_seconds"] = chance.expovariate(5)
            call["seconds"] = call["metrics"]["queue_seconds"] + chance.expovariate(2)
            if chance.random() < 0.15:
                call["response"], call["metrics"]["verdict"] = chance.choice(list(ERRORS.items()))
            timings["tool_calling"] = call["seconds"]
        now += timings["generating"] + timings.get("tool_calling", 0.0)
    line["metrics"]["seconds"] = {"pending": 0.1, "generating": now - 0.1}
    if chance.random() < 0.02:
        line |= {"score": None, "state": "FAILED", "finish_reason": "engine_failure"}
        line["failure"] = {"whose": "ours", "stage": "GENERATING", "error": "connection refused"}
    elif chance.random() < 0.05:
        line |= {"score": 0.0, "finish_reason": "length"}
    return line
