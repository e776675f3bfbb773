"""Rollouts on a Ray of four nodes of this machine: speed-up, overhead, throughput of the ledger, memory of the driver.

    python benchmarks/scale.py                    all but the largest memory run, about three minutes
    python benchmarks/scale.py --requests 100000  the driver's memory up to that many requests

The engine follows a script, so what is measured is Toolyard and Ray, not a model. Times are those between the first and
the last tool call of a run: starting Ray and the workers is left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from toolyard.rollout.cluster.actors import LedgerActor, Orders
from toolyard.rollout.cluster.ledger import Ledger, Report

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "cluster"), str(Path(__file__).parents[1] / "tests")]

from cluster_rollouts import Job, Nodes, ray_nodes  # noqa: E402 - found by the line above

_BLOCK = 100


def played(job: Job, *options: str, seconds: float) -> float:
    """Seconds from the first to the last tool call."""
    (job.folder / "calls.jsonl").unlink(missing_ok=True)
    job.run(*options, out=f"out-{time.monotonic_ns()}", seconds=seconds)
    times = [line[4] for line in job.log()]
    return max(times) - min(times)


def speed_up(console: Console, nodes: Nodes, folder: Path) -> None:
    table = Table("workers", "seconds", "speed-up", title="240 trajectories with 3 tool calls that wait for 0.3 s")
    job = Job(folder / "scale", tasks=240)
    alone = 0.0
    for workers in (1, 2, 4):
        took = played(job, "--ray", nodes.address, "--set", f"cluster.workers={workers}", seconds=0.3)
        alone = alone or took
        table.add_row(str(workers), f"{took:.1f}", f"{alone / took:.2f}")
    console.print(table)


def overhead(console: Console, nodes: Nodes, folder: Path) -> None:
    count = 600
    job = Job(folder / "overhead", tasks=count)
    here = played(job, seconds=0.0) / count
    on_one = ["--ray", nodes.address, "--set", "cluster.workers=1"]
    careful = played(job, *on_one, seconds=0.0) / count
    job.tools(repeatable=True)
    there = played(job, *on_one, seconds=0.0) / count
    table = Table(
        "", "ms per trajectory", "difference", title=f"{count} trajectories with 3 tool calls that return at once"
    )
    for what, took in (
        ("in this process", here),
        ("one worker of a cluster", there),
        ("the same, if calls are not repeatable: an fsync before each", careful),
    ):
        table.add_row(what, f"{1000 * took:.2f}", f"{1000 * (took - here):+.2f}")
    console.print(table)


def reports(count: int) -> list[Report]:
    """A worker that finishes everything it was leased with its next report."""
    made = [Report("worker", "", _BLOCK, (), ())]
    for start in range(0, count, _BLOCK):
        ended = [(index, None) for index in range(start, start + _BLOCK)]
        made.append(Report("worker", "", _BLOCK, (), (), ended))
    return made


def ledger_throughput(console: Console, address: str) -> None:
    table = Table("ledger", "commits/s", title=f"{_BLOCK} commits in each report")
    count = 50_000
    ledger = Ledger(spare=0)
    began = time.process_time()
    for start, report in zip(range(0, count + _BLOCK, _BLOCK), reports(count), strict=True):
        for index in range(start, min(start + _BLOCK, count)):
            ledger.offer(index, index // 8, b"")
        ledger.report(report, 0.0)
        ledger.forget(range(max(0, start - 2 * _BLOCK), start - _BLOCK))
    table.add_row("by itself", f"{count / (time.process_time() - began):.0f}")
    ray.init(address, logging_level="error", log_to_driver=False)
    actor = ray.remote(LedgerActor).options(num_cpus=0).remote(4.0, 0)
    name = ray.get(actor.open.remote([]))
    count = 20_000
    began = time.monotonic()
    for start, report in zip(range(0, count + _BLOCK, _BLOCK), reports(count), strict=True):
        offers = [(index, index // 8, b"x" * 1000) for index in range(start, min(start + _BLOCK, count))]
        gone = list(range(max(0, start - 2 * _BLOCK), start - _BLOCK))
        actor.order.remote(Orders(name, offers, gone))
        ray.get(actor.report.remote(Report(**{**fields(report), "ledger": name})))
    table.add_row("as an actor, one worker, offers of 1 kB", f"{count / (time.monotonic() - began):.0f}")
    console.print(table)
    count = 10_000
    said = Report("another", name, 0, (), ())
    waiting = [actor.report.remote(said) for _ in range(64)]
    began = time.monotonic()
    for _ in range(count):
        done, waiting = ray.wait(waiting)
        ray.get(done)
        waiting.append(actor.report.remote(said))
    console.print(
        f"reports per second that say and bring nothing, 64 at a time: {count / (time.monotonic() - began):.0f}\n"
    )
    ray.kill(actor)
    ray.shutdown()


def fields(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__slots__}


def driver_memory(console: Console, nodes: Nodes, folder: Path, most: int) -> None:
    table = Table(
        "requests", "driver MiB at most", "its CPU ms per request", "requests/s", title="The driver's memory and work"
    )
    for count in [size for size in (1_000, 10_000, 100_000) if size <= most]:
        job = Job(folder / f"memory-{count}", tasks=count, calls=0)
        options = ["--ray", nodes.address, "--set", "concurrency=64"]
        began = time.monotonic()
        run = job.start(*options)
        peak, used = 0, 0.0
        while run.poll() is None:
            peak, used = max(peak, peak_memory(run)), max(used, processor_seconds(run))
            time.sleep(0.2)
        job.end(run)
        rate = count / (time.monotonic() - began)
        table.add_row(str(count), str(peak), f"{1000 * used / count:.2f}", f"{rate:.0f}")
    console.print(table)


def peak_memory(process: subprocess.Popen[str]) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def processor_seconds(process: subprocess.Popen[str]) -> float:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="most requests of the memory runs")
    given = parser.parse_args()
    console = Console()
    console.print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, Ray {ray.__version__}")
    with tempfile.TemporaryDirectory() as folder, ray_nodes() as nodes:
        place = Path(folder)
        speed_up(console, nodes, place)
        overhead(console, nodes, place)
        ledger_throughput(console, nodes.address)
        driver_memory(console, nodes, place, given.requests)


if __name__ == "__main__":
    main()
