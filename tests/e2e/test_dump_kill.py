"""A run that is killed repeatedly while it writes loses at most the line it was writing each time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from toolyard.records.dump import DumpWriter, read_dump

KILLS = 20

# Forks, so that what takes time is the writing, not twenty starts of Python.
RUNS = """
import asyncio, json, os, random, signal, sys, time
sys.path.insert(0, sys.argv[2])
from dataclasses import replace
from pathlib import Path
from trajectory_samples import good_trajectory
from toolyard.records.dump import DumpWriter

large = "x" * 1_000_000

async def run(told):
    async with DumpWriter(sys.argv[1]) as dump:
        done = len(dump.existing(1))
        os.write(told, b"open\\n")
        for number in range(done, 10**9):
            made = good_trajectory(number, request_id=f"{number}")
            await dump.write(replace(made, output=large if number % 3 == 2 else made.output))
            os.write(told, b"%d\\n" % number)

chance, confirmed, torn = random.Random(5), -1, 0
path = Path(sys.argv[1], "1.jsonl")
for _ in range(int(sys.argv[3])):
    ours, told = os.pipe()
    if not (pid := os.fork()):
        asyncio.run(run(told))
    os.close(told)
    with open(ours) as said:
        assert said.readline() == "open\\n"
        time.sleep(chance.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        confirmed = max([confirmed, *map(int, said.read().split())])
    os.waitpid(pid, 0)
    torn += path.exists() and not path.read_bytes().endswith(b"\\n")
print(json.dumps({"confirmed": confirmed, "torn": torn}))
"""


@pytest.mark.slow
def test_twenty_kills_leave_whole_lines_and_lose_none_that_was_confirmed(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(tmp_path), tests, str(KILLS)], capture_output=True, check=True, timeout=60
    )
    said = json.loads(done.stdout)
    found = [trajectory.request_id for _, _, trajectory in read_dump(tmp_path)]
    assert found == [str(number) for number in range(len(found))]
    assert len(found) > said["confirmed"] > 0
    assert len(DumpWriter(tmp_path).existing(1)) == len(found)
    print(f"{KILLS} kills, {said['torn']} torn lines, {len(found)} whole ones")
