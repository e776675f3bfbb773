"""Many random kills over many scripted requests on a Ray of four nodes: `make soak-cluster`.

Workers, the ledger and the driver are killed, workers are stopped and go on. A killed driver is started again with the
same command. Then everything is counted from outside: each id is in the dump once, what is in it is what one process
would have written, finished calls ran once, and each driver's tape is replayed to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cluster_rollouts import Job, Nodes, kill, ray_nodes

STOP_SECONDS = 6.0
"""Longer than a term: others take over."""
ABOUT_SECONDS = 0.5
"""A call that a worker was about to make when it was stopped begins this soon after it goes on."""


class Play(NamedTuple):
    """A call that ended."""

    pid: int
    began: float
    ended: float


class Interruption(NamedTuple):
    """Of a worker, which was stopped, killed, or lost with its driver."""

    at: float
    journals: dict[str, int]
    """The number of calls in each journal then. Nobody can know of others."""


@dataclass
class Soak:
    job: Job
    nodes: Nodes
    kills: int
    seed: int = 0
    done: Counter[str] = field(default_factory=Counter)
    interruptions: dict[int, list[Interruption]] = field(default_factory=dict)
    """Of workers, by process id, which may be used again."""
    pauses: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """When workers were stopped and went on."""
    tapes: int = 0
    _stopped: dict[int, float] = field(default_factory=dict)

    def run(self) -> None:
        choose = random.Random(self.seed)
        process = self.start()
        total = self.job.tasks * self.job.n * self.job.calls
        began = time.monotonic()
        while True:
            self.wake()
            if process.poll() is not None:
                if process.returncode == 0:
                    break
                process.communicate()
                process = self.start()
            calls = self.calls()
            due = (sum(self.done.values()) + 1) * total / (self.kills + 1)
            if sum(self.done.values()) < self.kills and calls >= due:
                process = self.disturb(choose, process)
                self.show(calls, total, began)
            time.sleep(0.05)
        json.loads(process.communicate()[0])
        self.wake(all_of_them=True)

    def start(self) -> subprocess.Popen[str]:
        self.tapes += 1
        return self.job.start("--ray", self.nodes.address, "--record", f"{self.tapes}.tape", seconds=0.05)

    def disturb(self, choose: random.Random, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        workers = [pid for pid in self.nodes.workers if pid not in self._stopped]
        dice = choose.random()
        if dice < 0.06 and self.nodes.ledgers:
            kill(self.nodes.ledgers)
            self.done["ledgers killed"] += 1
        elif dice < 0.10:
            workers = self.nodes.workers
            process.kill()
            process.communicate()
            self.done["drivers killed"] += 1
            while set(workers) & set(self.nodes.workers):
                self.wake()
                time.sleep(0.02)
            self.interrupted(*workers)
            return self.start()
        elif dice < 0.16 and workers:
            victim = choose.choice(workers)
            kill([victim], signal.SIGSTOP)
            self._stopped[victim] = time.time()
            self.interrupted(victim)
            self.done["workers stopped"] += 1
        elif workers:
            victim = choose.choice(workers)
            kill([victim], signal.SIGSTOP)  # so that it cannot write any more
            self.interrupted(victim)
            kill([victim])
            self.done["workers killed"] += 1
        return process

    def wake(self, *, all_of_them: bool = False) -> None:
        for pid, since in list(self._stopped.items()):
            if all_of_them or time.time() - since > STOP_SECONDS:
                self.pauses.setdefault(pid, []).append((since, time.time()))
                kill([pid], signal.SIGCONT)
                del self._stopped[pid]

    def interrupted(self, *workers: int) -> None:
        found = dict[str, int]()
        for path in (self.job.folder / "out" / ".cluster" / "0" / "journals").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                found[path.name] = path.read_bytes().count(b'"kind":"tools"')
        for pid in workers:
            self.interruptions.setdefault(pid, []).append(Interruption(time.time(), found))

    def calls(self) -> int:
        log = self.job.folder / "calls.jsonl"
        return log.read_bytes().count(b'["end"') if log.exists() else 0

    def show(self, calls: int, total: int, began: float) -> None:
        told = ", ".join(f"{count} {what}" for what, count in self.done.items())
        print(
            f"{time.time():.2f} {time.monotonic() - began:6.0f} s  {calls}/{total} calls  {told}",
            file=sys.stderr,
            flush=True,
        )

    # ------------------------------------------------------------------------------------------------------- afterwards
    def check(self) -> dict[str, int]:
        ended = self.job.check()
        assert len(ended) == self.job.tasks * self.job.n * self.job.calls
        again = [(*call, play) for call, plays in self.plays().items() for play in plays[:-1]]
        problems = [one for one in again if not self.was_unheard(*one)]
        (self.job.folder / "interruptions.json").write_text(json.dumps(self.interruptions))
        assert not problems, f"made again although they were heard of: {problems}"
        lines = [line for line in self.job.lines() if line["state"] != "COMPLETED"]
        assert not lines, lines[0]["failure"]
        return {"calls": sum(ended.values()), "twice, and excused": len(again)}

    def was_unheard(self, request: str, number: int, play: Play) -> bool:
        """Whether nobody could know of this call when it was made again."""
        first = next((one for one in self.interruptions.get(play.pid, ()) if one.at >= play.began), None)
        known = {} if first is None else first.journals
        heard = max((calls for name, calls in known.items() if name.startswith(request)), default=0)
        return first is not None and heard <= number

    def plays(self) -> dict[tuple[str, int], list[Play]]:
        """The calls that ended, by request and number, in the order in which they began."""
        begun, found = dict[tuple[str, int, int], float](), dict[tuple[str, int], list[Play]]()
        for what, instance, number, pid, at in self.job.log():
            if what == "begin":
                begun[instance, number, pid] = at
            else:
                began = self.decided(pid, begun[instance, number, pid])
                found.setdefault((instance, number), []).append(Play(pid, began, at))
        return {call: sorted(plays, key=lambda play: play.began) for call, plays in found.items()}

    def decided(self, pid: int, began: float) -> float:
        """When a call was decided on. What a worker was about to do when it was stopped, it does when it goes on."""
        stops = [stop for stop, end in self.pauses.get(pid, ()) if 0 <= began - end < ABOUT_SECONDS]
        return stops[-1] if stops else began

    def compare(self) -> None:
        """With what one process writes, and with what the tapes replay."""
        (self.job.folder / "calls.jsonl").rename(self.job.folder / "calls.done")
        self.job.run(out="alone", seconds=0)
        self.job.same_as("alone")
        there = set((self.job.folder / "out" / "0.jsonl").read_bytes().splitlines())
        for number in range(1, self.tapes + 1):
            tape = self.job.folder / f"{number}.tape"
            if tape.exists() and b'"ended"' in tape.read_bytes():
                self.job.run("--replay", tape.name, out=f"replayed-{number}")
                lines = (self.job.folder / f"replayed-{number}" / "0.jsonl").read_bytes().splitlines()
                assert set(lines) <= there, f"tape {number} is replayed differently"


def soak(folder: Path, nodes: Nodes, requests: int, kills: int, seed: int = 0) -> tuple[Counter[str], dict[str, int]]:
    job = Job(folder, tasks=requests // 2, n=2, calls=3)
    job.tools(repeatable=True)
    one = Soak(job, nodes, kills, seed)
    one.run()
    found = one.check()
    one.compare()
    return one.done, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--nodes", type=int, default=4, help="more are faster where there are more processors")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="toolyard-soak-"))
    print(f"{folder} is deleted if all is well", file=sys.stderr)
    with ray_nodes(given.nodes) as nodes:
        done, found = soak(folder / "job", nodes, given.requests, given.kills, given.seed)
    shutil.rmtree(folder)
    print(f"{given.requests} requests in {time.monotonic() - began:.0f} s; disturbed: {dict(done)}; {found}")
    print("each id once, as one process writes it; every tape replays to the bit")


if __name__ == "__main__":
    main()
