"""A run seen from outside: its endpoint on a real socket, its logs, and `toolyard top`."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from patience import patient
from toolyard.errors import ConfigError, RecordError
from toolyard.records.dump import read_dump
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.config import RolloutConfig, load_config
from toolyard.rollout.observer import Observer, Running
from toolyard.rollout.run import run_rollouts
from toolyard.rollout.summary import Summary
from toolyard.testing.engine.servers import SGLANG, EngineServer, Fault

SECRET = "sk-do-not-log-me"
QUESTION = "What is the answer to this very secret question?"
TOOLS = '''
import logging
from pathlib import Path
from time import sleep

from toolyard.tools import tool


@tool
def look_up(word: str) -> str:
    """Look a word up, in a thread, once the gate is open.

    Args:
        word: What to look up.
    """
    logging.getLogger("watched_tools").info("looking up")
    while not Path(__file__).with_name("gate").exists():
        sleep(0.01)
    return f"{word}: 42"
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SCRIPT = {
    "t0": [call("look_up", word="answer"), "#### 42"],
    "t1": [call("look_up", word="answer"), call("look_up", word="again"), "#### 41"],
    "t2": [call("no_such_tool_3f9a"), "#### 42"],
    "t3": ["<tool_call>\n{broken\n</tool_call>", "#### 42"],
    "t4": [call("code_interpreter", code="print(6 * 7)"), call("code_interpreter", code="1/0"), "#### 42"],
}
"""Nothing for t5: its engine fails."""


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "watched_tools.py").write_text(TOOLS)
    interpreter = "toolyard.tools.code_interpreter.SandboxFusionTool"
    (tmp_path / "tools.yaml").write_text(
        f"tools:\n  - class_name: watched_tools.look_up\n  - {{class_name: {interpreter}, config: {{type: native}}}}\n"
    )
    rows = [{"id": f"t{number}", "prompt": QUESTION, "answer": "42"} for number in range(6)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    settings = {
        "tasks": {"path": "tasks.jsonl"},
        "engine": {"kind": "scripted", "model": str(model), "script": "script.json", "api_key": SECRET},
        "chat": {"format": "hermes"},
        "tools": "tools.yaml",
        "limits": {"engine_retries": 0},
        "n": 2,
    }
    (tmp_path / "rollout.yaml").write_text(json.dumps(settings))
    yield tmp_path
    sys.modules.pop("watched_tools", None)


def config(**changes: Any) -> RolloutConfig:
    return load_config("rollout.yaml", {"rollout_data_dir": "out", "metrics": {"port": 0}, **changes})


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=patient(10)) as answer:
        return answer.read()


ADDRESS = Path("out/.metrics")


def address() -> str:
    return ADDRESS.read_text() if ADDRESS.exists() else ""


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(url: str) -> Samples:
    found = text_string_to_metric_families(fetched(f"{url}/metrics").decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in found for one in family.samples}


def by_labels(samples: Samples, name: str) -> dict[frozenset[tuple[str, str]], float]:
    return {labels: value for (found, labels), value in samples.items() if found == name}


def labelled(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


class Scraper(Observer):
    """Reads the endpoint in the run's own event loop, whenever a request has ended: nobody else can run then."""

    def __init__(self) -> None:
        self.url = ""
        self.samples: Samples = {}
        self.page: dict[str, Any] = {}

    def note(self, text: str) -> None:
        if text.startswith("metrics: "):
            self.url = text.removeprefix("metrics: ").removesuffix("/metrics")

    def began(self, run: Running) -> None:
        self.run = run

    def ended(self, trajectory: Trajectory, summary: Summary) -> None:
        self.samples, self.page = scraped(self.url), json.loads(fetched(f"{self.url}/status"))


async def test_what_the_endpoint_counts_is_what_the_dump_contains(place: Path) -> None:
    (place / "gate").touch()
    scraper = Scraper()
    await run_rollouts(config(), scraper)
    lines = [line.trajectory for line in read_dump(place / "out")]
    assert len(lines) == 12
    got = scraper.samples
    assert by_labels(got, "toolyard_rollout_trajectories_total") == {
        labelled(state=state, finish_reason=reason): count
        for (state, reason), count in Counter((line.state, line.finish_reason) for line in lines).items()
    }
    calls = [call for line in lines for turn in line.turns for call in turn.tool_calls]
    assert by_labels(got, "toolyard_tool_calls_total") == {
        labelled(tool="look_up", outcome="ok", verdict=""): 6,
        labelled(tool="(others)", outcome="unknown_tool", verdict=""): 2,
        labelled(tool="(others)", outcome="malformed", verdict=""): 2,
        labelled(tool="code_interpreter", outcome="ok", verdict="ok"): 2,
        labelled(tool="code_interpreter", outcome="ok", verdict="failed"): 2,
    }
    assert len(calls) == sum(by_labels(got, "toolyard_tool_calls_total").values())
    interpreted = labelled(tool="code_interpreter")
    waited = sum(call.metrics["queue_seconds"] for call in calls if call.name == "code_interpreter")
    assert got["toolyard_tool_wait_seconds_count", interpreted] == 4
    assert got["toolyard_tool_wait_seconds_sum", interpreted] == pytest.approx(waited)
    nothing = labelled()
    assert got["toolyard_rollout_turns_total", nothing] == sum(len(line.turns) for line in lines)
    assert by_labels(got, "toolyard_rollout_tokens_total") == {
        labelled(kind="sampled"): sum(line.metrics["sampled_tokens"] for line in lines),
        labelled(kind="prompt"): sum(len(line.tokens.prompt_ids) for line in lines),
        labelled(kind="response"): sum(len(line.tokens.response_ids) for line in lines),
    }
    scores = [line.score for line in lines if line.score is not None]
    assert got["toolyard_rollout_score_count", nothing] == len(scores) == 10
    assert got["toolyard_rollout_score_sum", nothing] == pytest.approx(sum(scores))
    generated = sum(turn.timings["generating"] for line in lines for turn in line.turns)
    assert got["toolyard_rollout_stage_seconds_sum", labelled(stage="generating")] == pytest.approx(generated)
    [(failed, count)] = by_labels(got, "toolyard_rollout_failures_total").items()
    assert (dict(failed)["stage"], count) == ("GENERATING", 2)
    assert by_labels(got, "toolyard_sandbox_executions_total") == {
        labelled(verdict="ok"): 2,
        labelled(verdict="failed"): 2,
    }
    assert got["toolyard_limiter_granted_total", labelled(limiter="rate-limiter")] == 4
    assert got["toolyard_rollout_planned", nothing] == got["toolyard_rollout_done", nothing] == 12
    assert sum(by_labels(got, "toolyard_rollout_running").values()) == 0
    page = scraper.page
    assert (page["done"], page["failed"], page["tool_calls"]) == (12, 2, len(calls))
    ids = {line.request_id for line in lines} | {line.batch_data_id for line in lines}
    assert not [labels for _, labels in got for _, value in labels if value in ids], "labels name no requests"
    assert address() == ""
    with pytest.raises(OSError, match="refused"):
        fetched(f"{scraper.url}/metrics")


async def test_servers_are_counted_by_url_with_those_that_fail(place: Path) -> None:
    async with EngineServer((SGLANG,)) as good, EngineServer((SGLANG,)) as bad:
        bad.faults = [Fault(status=500, body=b"CUDA error")] * 1000
        engine = {"kind": "sglang", "urls": [good.url, bad.url], "script": None}
        scraper = Scraper()
        await run_rollouts(config(engine=engine, sampling={"max_tokens": 8}), scraper)
    lines = [line.trajectory for line in read_dump(place / "out")]
    assert {line.state for line in lines} == {"COMPLETED"}
    answers = by_labels(scraper.samples, "toolyard_engine_answers_total")
    assert answers[labelled(server=good.url)] == sum(len(line.turns) for line in lines) == 12
    assert answers[labelled(server=bad.url)] == 0
    failures = by_labels(scraper.samples, "toolyard_engine_failures_total")
    assert failures[labelled(server=bad.url)] == 1000 - len(bad.faults) > 0
    assert failures[labelled(server=good.url)] == 0
    assert by_labels(scraper.samples, "toolyard_engine_up")[labelled(server=good.url)] == 1
    assert {server["url"] for server in scraper.page["servers"]} == {good.url, bad.url}


async def test_a_port_in_use_is_an_error_before_anything_is_played(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use.* 0 for any free port"):
            await run_rollouts(config(metrics={"port": port}))
    with pytest.raises(ConfigError, match=r"cannot listen on nowhere\.invalid"):
        await run_rollouts(config(metrics={"host": "nowhere.invalid"}))
    with pytest.raises(ConfigError, match=r"logs\.file"):
        await run_rollouts(config(logs={"file": "no/such/folder/log"}))
    assert "out" not in os.listdir()


async def test_a_second_run_in_the_same_folder_does_not_take_the_address_of_the_first(place: Path) -> None:
    first = asyncio.create_task(run_rollouts(config()))
    await asyncio.to_thread(until, ADDRESS.exists, "the endpoint")
    url = address()
    with pytest.raises(RecordError, match="another"):
        await run_rollouts(config())
    assert address() == url
    (place / "gate").touch()
    await first
    assert address() == ""


# The commands ---------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("toolyard")), *arguments]


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("top", *arguments), capture_output=True, text=True, timeout=patient(60), check=False)


def until(found: Any, what: str, seconds: float = 60) -> None:
    end = time.monotonic() + patient(seconds)
    while not found():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.mark.slow
def test_top_and_the_log_name_the_requests_and_the_run_may_vanish(place: Path) -> None:
    run = ["rollout", "rollout.yaml", "--out", "out", "--metrics-port", "0", "--log-format", "json", "--json"]
    with Path("stderr").open("w") as errors:
        process = subprocess.Popen(command(*run), stdout=subprocess.PIPE, stderr=errors)
    try:
        until(ADDRESS.exists, "the endpoint")
        url = address()
        until(lambda: json.loads(fetched(f"{url}/status"))["states"] == {"TOOL_CALLING": 4}, "four waiting calls")
        page = json.loads(top("out", "--json").stdout)
        waiting = {row["request_id"] for row in page["slowest"]}
        assert {(row["task"], row["turn"], row["waits_for"]) for row in page["slowest"]} == {
            ("t0", 1, "look_up"),
            ("t1", 1, "look_up"),
        }
        shown = top(url, "--once")
        assert shown.returncode == 0, shown.stderr
        assert "done 8/12 (67 %)  failed 2" in shown.stdout
        assert "running 4  tool calling 4" in shown.stdout
        assert "limiter rate-limiter  0/10 in flight" in shown.stdout
        assert all(one in shown.stdout for one in waiting)

        lines = [json.loads(line) for line in Path("stderr").read_text().splitlines()]
        told = [line for line in lines if line["logger"] == "watched_tools"]
        assert {line["request_id"] for line in told} == waiting, "a tool's own line names the request, from its thread"
        assert {line["state"] for line in told} == {"TOOL_CALLING"}
        ended = {line["request_id"]: line for line in lines if "finish_reason" in line}
        dumped = {one.trajectory.request_id: one.trajectory for one in read_dump("out")}
        assert ended.keys() == dumped.keys()
        assert all(line["finish_reason"] == dumped[one].finish_reason for one, line in ended.items())
        text = Path("stderr").read_text()
        assert SECRET not in text
        assert QUESTION[:20] not in text

        watching, said = in_terminal(command("top", "out", "--interval", "0.1"))
        until(lambda: b"tool calling 4" in said(), "top's first frame")
    finally:
        process.kill()
    process.communicate()
    assert watching.wait(timeout=patient(30)) == 0
    assert b"has ended; when last seen, 8 of 12 requests were done" in said()
    gone = top("out", "--once")
    assert (gone.returncode, "nothing answers there" in gone.stderr) == (1, True)


def in_terminal(arguments: list[str]) -> tuple[subprocess.Popen[bytes], Any]:
    """The process, and a function that returns all it has written to its terminal."""
    mine, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "24"}
    process = subprocess.Popen(arguments, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    os.close(its)
    os.set_blocking(mine, False)
    written = bytearray()

    def said() -> bytes:
        try:
            while data := os.read(mine, 65536):
                written.extend(data)
        except OSError:  # nothing more, or its end is closed
            pass
        return bytes(written)

    return process, said


def test_ctrl_c_leaves_top_and_not_the_run(place: Path) -> None:
    from toolyard.rollout.config import MetricsConfig
    from toolyard.rollout.watching.prometheus_client import RunMetrics
    from toolyard.rollout.watching.server import MetricsServer

    with MetricsServer(MetricsConfig(), RunMetrics()) as server:
        watching, said = in_terminal(command("top", server.url))
        until(lambda: b"done 0/0" in said(), "top's first frame")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=patient(30)) == 0
        assert b"Traceback" not in said()
        assert fetched(f"{server.url}/metrics")
