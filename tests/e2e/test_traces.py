"""Traces of real runs, as a collector receives them; and collectors that do not behave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collector import Received, collector
from patience import patient
from toolyard.cli.app import app
from toolyard.errors import ConfigError
from toolyard.records.dump import read_dump
from toolyard.rollout.config import load_config
from toolyard.rollout.run import RolloutResult, run_rollouts

SLACK = 2_000
"""Nanoseconds: times are recorded in microseconds."""
TOOLS = """
import asyncio
import time

from toolyard.tools import tool


@tool
async def nap(seconds: float) -> str:
    \"\"\"Sleeps.

    Args:
        seconds: How long.
    \"\"\"
    await asyncio.sleep(seconds)
    return "rested"
"""
TOOLS_YAML = """
tools:
  - class_name: napping.nap
    config: {call: {concurrency: 1}}
  - class_name: toolyard.tools.code_interpreter.SandboxFusionTool
    config: {type: native}
"""
SECRET = "Xylophone"


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "napping.py").write_text(TOOLS)
    (tmp_path / "tools.yaml").write_text(TOOLS_YAML)
    rows = [{"id": f"t{number}", "prompt": f"{SECRET} {number}?", "answer": "42"} for number in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    naps = call("nap", seconds=0.05) + "\n" + call("nap", seconds=0.05)
    program = call("code_interpreter", code=f"import time; time.sleep(0.1); print({SECRET!r})")
    (tmp_path / "script.json").write_text(json.dumps([naps, program, call(SECRET), f"{SECRET}\n#### 42"]))
    settings = {
        "tasks": {"path": "tasks.jsonl"},
        "engine": {"kind": "scripted", "model": str(model), "script": "script.json"},
        "tools": "tools.yaml",
        "rollout_data_dir": "out",
    }
    (tmp_path / "rollout.yaml").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("napping", None)


async def played(*settings: str) -> RolloutResult:
    return await run_rollouts(load_config("rollout.yaml", settings))


def check_tree(spans: list[Received]) -> dict[str, list[Received]]:
    """Every span is within its parent, and stages follow each other. Returns the spans by name."""
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    assert [span.name for span in spans if not span.parent] == ["request"]
    children: dict[str, list[Received]] = {}
    for span in spans:
        assert span.end >= span.start
        if span.parent:
            parent = by_id[span.parent]
            assert parent.start - SLACK <= span.start, (parent, span)
            assert span.end <= parent.end + SLACK, (parent, span)
            children.setdefault(span.parent, []).append(span)
    for found in children.values():
        sequential = [span for span in found if not span.name.startswith("tool ")]
        for before, after in pairwise(sequential):
            assert before.end <= after.start + SLACK, (before, after)
    root = next(span for span in spans if not span.parent)
    assert root.seconds == pytest.approx(sum(span.seconds for span in children[root.id]), rel=0.05, abs=0.005)
    by_name: dict[str, list[Received]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        by_name.setdefault(span.name, []).append(span)
    return by_name


async def test_a_run_sends_a_tree_of_spans_for_each_request(place: Path) -> None:
    with collector() as there:
        result = await played(f"otel={there.url}")
    assert there.paths == {"/v1/traces"}
    lines = {line.trajectory.request_id: line.trajectory for line in read_dump("out")}
    assert there.traces().keys() == lines.keys()
    assert len(lines) == 2
    for request_id, spans in there.traces().items():
        found, trajectory = check_tree(spans), lines[request_id]
        (root,) = found["request"]
        assert trajectory.started_at is not None
        assert root.start == pytest.approx(trajectory.started_at * 1e9, abs=SLACK)
        assert root.attributes["toolyard.finish_reason"] == trajectory.finish_reason == "stop"
        assert root.attributes["toolyard.score"] == 1.0
        assert [len(found[name]) for name in ("prepare", "turn", "generate", "reward")] == [1, 4, 4, 1]
        assert all(span.parent == root.id for span in found["turn"])
        naps = found["tool nap"]
        assert [span.parent for span in naps] == [found["turn"][0].id] * 2
        # The tool has one slot, so one of the two calls waited for the other; both requests share the tool.
        assert max(span.seconds for span in found["wait for tool slot"]) >= 0.045
        assert {span.parent for span in found["wait for tool slot"]} <= {span.id for span in naps}
        (program,) = found["tool code_interpreter"]
        (run,) = found["sandbox run"]
        assert run.parent == program.id
        assert program.parent == found["turn"][1].id
        assert 0.1 <= run.seconds <= program.seconds + 1e-5
        assert (run.attributes["toolyard.verdict"], run.is_error) == ("ok", False)
        (unknown,) = found["tool ?"]  # the model made the name up
        assert (unknown.is_error, unknown.message) == (True, "unknown_tool")
    assert SECRET not in repr(there.spans)
    assert result.traces is not None
    assert (result.traces.sent, result.traces.dropped) == (len(there.spans), 0)


async def test_the_wait_for_a_permit_and_for_the_sandbox_are_spans_of_the_call(place: Path) -> None:
    yaml = TOOLS_YAML.replace("{type: native}", "{type: native, num_workers: 1}")
    (place / "tools.yaml").write_text(yaml)
    with collector() as there:
        await played(f"otel={there.url}")
    waits = [span for span in there.spans if span.name == "wait for permit"]
    programs = {span.id: span for span in there.spans if span.name == "tool code_interpreter"}
    assert max(span.seconds for span in waits) >= 0.05  # one of two programs of 0.1 s waited for the other
    assert all(span.parent in programs for span in waits)


async def test_a_replay_and_a_second_sending_have_the_ids_of_the_first(place: Path) -> None:
    with collector() as first:
        await played(f"otel={first.url}", "record=a.tape")
    with collector() as again:
        await played(f"otel={again.url}", "replay=a.tape", "rollout_data_dir=again")
    with collector() as other:
        await played(f"otel={other.url}", "rollout_data_dir=other")
    assert sorted(map(repr, again.spans)) == sorted(map(repr, first.spans))
    assert not {span.trace for span in other.spans} & {span.trace for span in first.spans}
    assert (place / "again/0.jsonl").read_bytes() == (place / "out/0.jsonl").read_bytes()


@pytest.mark.parametrize("how", ["down", "stalls", "answers 500"])
async def test_a_bad_collector_neither_fails_nor_delays_a_run(place: Path, how: str) -> None:
    with collector() as there:
        url = there.url
        if how == "stalls":
            there.answering.clear()
        there.status = 500
        if how == "down":
            with collector() as gone:
                url = gone.url
        began = time.monotonic()
        result = await played(f"otel={url}")
        assert time.monotonic() - began < patient(15)  # at most 5 s at its end
    assert result.summary.completed == 2
    assert result.traces is not None
    assert (result.traces.sent, result.traces.dropped > 20) == (0, True)
    assert result.traces.problem


def test_the_command_reports_what_was_sent_as_json_and_as_a_note(place: Path) -> None:
    runner = CliRunner()
    with collector() as there:
        told = runner.invoke(app, ["rollout", "rollout.yaml", "--otel", there.url, "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["traces"] == {
        "endpoint": f"{there.url}/v1/traces",
        "spans_sent": len(there.spans),
        "spans_dropped": 0,
        "trajectories_without_times": 0,
        "problem": None,
    }
    assert f"traces: {len(there.spans)} spans sent to {there.url}/v1/traces" in told.stderr


def test_the_standard_variables_are_honoured(place: Path) -> None:
    with collector() as there:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": there.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-team=blue",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_SERVICE_NAME": "my-run",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=tests",
        }
        told = _command(place, variables, "--otel", "env", "--json")
    assert told["traces"]["spans_sent"] == len(there.spans) > 20
    assert there.headers[0]["x-team"] == "blue"
    assert there.headers[0]["Content-Encoding"] == "gzip"
    resource = there.resources[0]
    assert (resource["service.name"], resource["deployment.environment"]) == ("my-run", "tests")


def _command(place: Path, variables: dict[str, str], *options: str) -> dict[str, object]:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("toolyard")), "rollout", "rollout.yaml", *options],
        cwd=place,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://x", "http://", "http://x:y", ""])
async def test_what_is_no_url_is_refused_before_the_run(place: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL as http"):
        await run_rollouts(load_config("rollout.yaml", {"otel": url}))
    assert not (place / "out").exists()
