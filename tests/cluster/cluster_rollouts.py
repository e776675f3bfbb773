"""Rollouts on a Ray of several nodes of this machine, and what remains of them, counted from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from byte_model import make_model
from patience import patient
from ray_node import processes_of
from toolyard.whole_file import replacing

TOOL = '''
"""Each call is a line before and a line after it, with the process and the time."""
import json, os, time
from pathlib import Path
from toolyard.tools.function import tool

LOG = Path(__file__).with_name("calls.jsonl")


def note(what, instance_id, number):
    line = json.dumps([what, instance_id, number, os.getpid(), time.time()]) + "\\n"
    fd = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)


@tool
async def count(number: int, instance_id: str) -> str:
    """Count.

    Args:
        number: Which call of its trajectory it is.
    """
    import asyncio
    note("begin", instance_id, number)
    await asyncio.sleep(float(LOG.with_name("seconds").read_text()))
    note("end", instance_id, number)
    return f"counted {number}"
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class Nodes:
    """A Ray cluster of several nodes on this machine."""

    cluster: Any
    marker: str
    extra: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.cluster.address

    def processes(self, title: str) -> list[int]:
        """The processes of an actor class."""
        found = list[int]()
        for pid in processes_of(self.marker):
            with contextlib.suppress(OSError):
                if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    @property
    def workers(self) -> list[int]:
        return self.processes("ray::WorkerActor")

    @property
    def ledgers(self) -> list[int]:
        return self.processes("ray::LedgerActor")

    def add(self, address: str, **options: Any) -> Any:
        node = self.cluster.add_node(num_cpus=4, node_ip_address=address, include_dashboard=False, **options)
        self.extra.append(node)
        return node

    def remove(self, node: Any, *, gracefully: bool = False) -> None:
        self.extra.remove(node)
        self.cluster.remove_node(node, allow_graceful=gracefully)


@contextmanager
def ray_nodes(count: int = 4) -> Generator[Nodes]:
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ty-")
    value = uuid.uuid4().hex
    before = dict(os.environ)
    os.environ.update(RAY_TMPDIR=folder, TOOLYARD_TEST_CLUSTER=value, RAY_AUTH_MODE="disabled")
    try:
        head = {"num_cpus": 4, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for number in range(1, count):
                cluster.add_node(num_cpus=4, node_ip_address=f"127.0.0.{2 + number}")
            yield Nodes(cluster, f"TOOLYARD_TEST_CLUSTER={value}")
        finally:
            cluster.shutdown()
            for pid in processes_of(f"TOOLYARD_TEST_CLUSTER={value}"):
                if pid != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Job:
    """A folder with everything a run needs."""

    folder: Path
    tasks: int
    n: int = 1
    calls: int = 3

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "model").mkdir()
        make_model(self.folder / "model")
        rows = [{"id": f"task-{number}", "prompt": f"Count, {number}!", "answer": "0"} for number in range(self.tasks)]
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = [f"Call {number}. {call('count', number=number)}" for number in range(self.calls)]
        (self.folder / "script.json").write_text(json.dumps([*lines, "Done."]))
        (self.folder / "counting.py").write_text(TOOL)
        self.tools()
        settings = {
            "tasks": {"path": "tasks.jsonl"},
            "engine": {"kind": "scripted", "model": "model", "script": "script.json"},
            "chat": {"format": "hermes"},
            "rewards": {"final": "none"},
            "tools": "tools.yaml",
            "n": self.n,
            "concurrency": 4,
        }
        (self.folder / "rollout.yaml").write_text(yaml.safe_dump(settings))

    @property
    def stderr(self) -> Path:
        """What the last run says, also while it goes on."""
        return self.folder / "stderr"

    def tools(self, **policy: Any) -> None:
        entry = {"class_name": "counting.count", "config": {"type": "native", "call": policy}}
        (self.folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))

    def start(self, *options: str, out: str = "out", seconds: float = 0.1) -> subprocess.Popen[str]:
        self.set_seconds(seconds)
        command = [str(Path(sys.executable).with_name("toolyard")), "rollout", "rollout.yaml", "--out", out, "--json"]
        with self.stderr.open("w") as file:
            return subprocess.Popen(
                [*command, *options], cwd=self.folder, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def set_seconds(self, seconds: float) -> None:
        """How long each call takes. Not in the environment, which Ray's processes do not get."""
        with replacing(self.folder / "seconds") as file:
            file.write_text(str(seconds))

    def end(self, process: subprocess.Popen[str], seconds: float = 120) -> dict[str, Any]:
        with process:
            try:
                out, _ = process.communicate(timeout=patient(seconds))
            except BaseException:  # also pytest's own time limit
                process.kill()
                print(self.stderr.read_text()[-6000:])
                raise
        assert process.returncode == 0, f"{out[-3000:]}\n{self.stderr.read_text()[-6000:]}"
        return json.loads(out)

    def run(self, *options: str, **more: Any) -> dict[str, Any]:
        return self.end(self.start(*options, **more))

    # ------------------------------------------------------------------------------------------------------ the checker
    def lines(self, out: str = "out") -> list[dict[str, Any]]:
        text = (self.folder / out / "0.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def log(self) -> list[tuple[str, str, int, int, float]]:
        with contextlib.suppress(FileNotFoundError):
            whole = (self.folder / "calls.jsonl").read_text().rpartition("\n")[0]  # the last one may be half written
            return [tuple(json.loads(line)) for line in whole.splitlines()]
        return []

    def check(self, out: str = "out") -> Counter[tuple[str, int]]:
        """Each id once, all completed. Returns how often each call has ended."""
        lines = self.lines(out)
        ids = Counter(line["request_id"] for line in lines)
        assert set(ids.values()) == {1}, [one for one, times in ids.items() if times > 1]
        assert len(lines) == self.tasks * self.n
        assert not (self.folder / out / ".cluster").exists()
        return Counter((instance, number) for what, instance, number, _, _ in self.log() if what == "end")

    def same_as(self, other: str, out: str = "out") -> None:
        """What one process would have written, order and times apart."""
        assert {line["request_id"]: timeless(line) for line in self.lines(out)} == {
            line["request_id"]: timeless(line) for line in self.lines(other)
        }


TIMES = {
    "seconds", "queue_seconds", "started", "started_at", "generating", "tool_calling", "pending", "interacting",
    "timings", "stuck",
}  # fmt: skip


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(one) for key, one in value.items() if key not in TIMES}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def until(found: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    end = time.monotonic() + patient(seconds)
    while not (seen := found()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return seen


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
