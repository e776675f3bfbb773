"""The metrics of a run: labels stay few, totals never shrink, and the dashboard asks for what exists."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from playing import call, request_for, scripted, setting, task
from toolyard.engines.protocol import ServerLoad
from toolyard.limits.local import LocalLimiter
from toolyard.records.trajectory import CallRecord, Failure, Trajectory
from toolyard.rollout.cluster.ledger import Ledger
from toolyard.rollout.run_many import RolloutRun
from toolyard.rollout.status import SandboxLoad, SlowRequest, Status
from toolyard.rollout.summary import Summary
from toolyard.rollout.watching.page import MAX_NODES, MAX_REQUESTS
from toolyard.rollout.watching.prometheus_client import RunMetrics

DASHBOARD = Path(__file__).parents[4] / "deploy" / "grafana" / "toolyard.json"
GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "watching.md"


@dataclass
class Run:
    """A run in whatever state a test wants."""

    statuses: dict[str, Status] = field(default_factory=dict[str, Status])
    ledger: dict[str, int] = field(default_factory=dict[str, int])
    limiters: list[Any] = field(default_factory=list[Any])
    states: Counter[Any] = field(default_factory=Counter[Any])
    live: tuple[int, int, int] = (0, 0, 0)
    is_blocked: bool = False

    def stop(self) -> None: ...


def status(**changes: Any) -> Status:
    whole = Status("vm", 1, {"GENERATING": 2}, 3, 100, 4, (), sandbox=SandboxLoad(4, 1, 0, 0, {"ok": 5}))
    return whole._replace(**changes)


def samples(metrics: RunMetrics) -> dict[str, float]:
    found = text_string_to_metric_families(metrics.exposition().decode())
    return {
        one.name + "".join(f" {key}={value}" for key, value in sorted(one.labels.items())): one.value
        for family in found
        for one in family.samples
    }


async def played() -> Trajectory:
    async with scripted([call("code_interpreter", {"code": "1"}), "#### 42"]) as engine:
        place = setting(engine)
        async with RolloutRun(place, [request_for(place, task())]) as run:
            [trajectory] = [trajectory async for trajectory in run]
    return trajectory


async def test_names_that_a_model_or_a_tool_makes_up_get_no_series_of_their_own() -> None:
    metrics, one = RunMetrics(), await played()
    for number in range(300):
        made_up = [
            CallRecord("1", f"tool-{number}", "{}", outcome, "")
            for outcome in ("unknown_tool", "too_many_calls", "malformed")
        ]
        odd = CallRecord("1", "real", "{}", "ok", "", metrics={"verdict": f"v{number}", "queue_seconds": "soon"})
        worse = CallRecord("1", "real", "{}", "ok", "", metrics={"verdict": [number], "queue_seconds": None})
        turn = replace(one.turns[0], tool_calls=(*made_up, odd, worse))
        failure = Failure("ours", "GENERATING", "no", source=f"http://{number}" + 1000 * "x")
        ended = replace(one, turns=(turn,), failure=failure, rewards={f"part-{number}": 1.0, "none": None})
        metrics.ended(ended, Summary())
    found = samples(metrics)
    assert found["toolyard_tool_calls_total outcome=ok tool=real verdict="] == 600
    assert found["toolyard_tool_calls_total outcome=unknown_tool tool=(others) verdict="] == 300
    assert sum(name.startswith("toolyard_tool_calls_total") for name in found) == 4
    assert found["toolyard_rollout_failures_total source=(others) stage=GENERATING whose=ours"] == 250
    assert len(metrics.exposition()) < 100_000
    assert max(map(len, found)) < 300


def test_what_a_lost_worker_had_counted_still_counts() -> None:
    def server(answered: int) -> tuple[ServerLoad, ...]:
        return (ServerLoad("http://a", 1, answered, 2, is_up=True),)

    metrics, run = RunMetrics(), Run({"n1-x": status(servers=server(10)), "n2-y": status(servers=server(5))})
    metrics.began(run)
    assert samples(metrics)["toolyard_engine_answers_total server=http://a"] == 15
    run.statuses = {"n1-x/1a2b": status(servers=server(12))}  # one died, the other goes on under another name
    found = samples(metrics)
    assert found["toolyard_engine_answers_total server=http://a"] == 17
    assert found["toolyard_engine_in_flight server=http://a"] == 1, "what goes on is only what goes on now"
    assert found["toolyard_sandbox_executions_total verdict=ok"] == 10
    run.statuses = {"n1-z": status(servers=server(1))}
    assert samples(metrics)["toolyard_engine_answers_total server=http://a"] == 18


def test_a_node_is_one_series_however_often_its_worker_is_replaced() -> None:
    metrics, run = RunMetrics(), Run()
    metrics.began(run)
    for number in range(50):
        run.statuses = {f"n1-{number}": status(), "n2-0": status(node="other")}
        nodes = {name: count for name, count in samples(metrics).items() if "node_requests" in name}
        assert nodes == {"toolyard_node_requests host=vm node=n1": 2, "toolyard_node_requests host=other node=n2": 2}


def test_the_page_of_a_huge_cluster_is_small() -> None:
    slow = SlowRequest("r", "t" * 50, "GENERATING", 1.0, 1, "w" * 200)
    workers = {f"n{number}-x": status(slowest=(slow._replace(seconds=number),) * 3) for number in range(2000)}
    metrics = RunMetrics()
    metrics.began(Run(workers))
    page = metrics.page()
    assert (len(page.nodes), page.node_count, len(page.slowest)) == (MAX_NODES, 2000, MAX_REQUESTS)
    assert page.slowest[0].seconds == 1999
    assert page.states == {"GENERATING": 4000}
    assert len(page.model_dump_json()) < 200_000


async def test_before_and_after_the_run_there_is_something_to_read() -> None:
    metrics = RunMetrics()
    assert samples(metrics)["toolyard_rollout_planned"] == 0
    assert metrics.page().slowest == []
    metrics.opened(3, 2)
    metrics.ended(await played(), Summary(trajectories=1))
    assert samples(metrics)["toolyard_rollout_done"] == 3


class Deaf(LocalLimiter):
    def read_statistics(self) -> Any:
        raise OSError("no answer")


def test_a_limiter_that_does_not_answer_hides_nothing_else() -> None:
    metrics = RunMetrics()
    metrics.began(Run({"": status()}, limiters=[Deaf(1, name="deaf"), LocalLimiter(3, name="fine"), object()]))
    found = samples(metrics)
    assert found["toolyard_limiter_up limiter=deaf"] == 0
    assert found["toolyard_limiter_limit limiter=fine"] == 3
    assert found["toolyard_rollout_running state=GENERATING"] == 2
    assert [one.name for one in metrics.page().limiters] == ["fine"]


async def test_tenants_of_a_limiter_are_trajectories_and_get_no_series() -> None:
    limiter = LocalLimiter(1, name="busy")
    metrics = RunMetrics()
    metrics.began(Run(limiters=[limiter]))
    async with limiter.permit("request-0123"):
        text = metrics.exposition().decode()
    assert "request-0123" not in text
    assert "toolyard_limiter_granted_total" in text


async def test_every_metric_of_the_dashboard_exists() -> None:
    metrics = RunMetrics()
    limiter = LocalLimiter(1, name="rate-limiter")
    metrics.began(Run({"n-x": status()}, ledger=Ledger().figures(), limiters=[limiter]))
    one = await played()
    metrics.ended(replace(one, failure=Failure("ours", "GENERATING", "no", "x")), Summary())
    metrics.stuck(None)  # type: ignore[arg-type]
    async with limiter.permit():
        text = metrics.exposition().decode()
    exported = set[str]()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
        exported |= {family.name + suffix for suffix in suffixes.get(family.type, ("",))}
    board = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"toolyard_\w+", expression)}
    assert len(panels) > 15
    assert names - exported == set()
    own = {name for name in exported if not name.startswith("toolyard_limiter") and not name.endswith("_created")}
    unshown = {re.sub("_(sum|count|bucket)$", "", name) for name in own} - {
        re.sub("_(sum|count|bucket)$", "", name) for name in names
    }
    assert unshown == {"toolyard_build_info", "toolyard_rollout_live", "toolyard_rollout_reward"}, "seen by nobody"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    told = set(re.findall(r"`(toolyard_\w+)`", GUIDE.read_text()))
    assert told == {re.sub("_(sum|count|bucket)$", "", name) for name in own}, "the guide's table"
    for variable in board["templating"]["list"][1:]:
        assert "toolyard_rollout_planned" in variable["query"]["query"]


def test_without_prometheus_client_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from toolyard.rollout.config import load_config\n"
        "from toolyard.rollout.run import run_rollouts\n"
        "import asyncio; asyncio.run(run_rollouts(load_config(None, {'metrics': {}})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'toolyard[server]'" in done.stderr
