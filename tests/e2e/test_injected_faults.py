"""`toolyard rollout --faults`: each kind really happens, the report agrees with what can be counted from outside, and
every request is accounted for."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_asking import until as settled
from faulting import check_accounts, ended, lines_in, make_place, rolled, start, until

from patience import patient
from playing import request_for, scripted, setting
from ray_node import processes_of
from toolyard.engines.http.openai import OpenaiEngine
from toolyard.engines.http.sglang import SglangEngine
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import Sampling
from toolyard.errors import ConfigError, EngineError
from toolyard.messages import Message
from toolyard.records.audit import audit
from toolyard.records.lines import trajectory_of
from toolyard.rollout.config import load_config
from toolyard.rollout.faults.inject import Faults, FaultyCalls
from toolyard.rollout.faults.profile import FaultProfile
from toolyard.rollout.faults.proxy import engine_proxy
from toolyard.rollout.run import RolloutResult, run_rollouts
from toolyard.testing.engine.byte_model import ByteModel
from toolyard.testing.engine.servers import OPENAI, SGLANG, VLLM, VLLM_TOKENS, EngineServer

CODE = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
TASKS, SAMPLES = 4, 2
ALL = TASKS * SAMPLES

# In this process ------------------------------------------------------------------------------------------------------


class Job:
    """A folder with settings, for runs in this process."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        rows = [{"id": f"t{number}", "prompt": f"How much is {number}?", "answer": "42"} for number in range(TASKS)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "script.json").write_text(json.dumps([CODE, CODE, "#### 42"]))
        self.settings: dict[str, Any] = {
            "tasks": {"path": str(folder / "tasks.jsonl")},
            "engine": {"kind": "scripted", "model": str(model), "script": str(folder / "script.json")},
            "chat": {"format": "hermes"},
            "n": SAMPLES,
            "limits": {"engine_retry_pause_seconds": 0.01},
        }

    def profile(self, **fields: Any) -> str:
        file = self.folder / "mine.yaml"
        file.write_text(yaml.safe_dump(fields))
        return str(file)

    async def run(self, faults: str | None, out: str = "out", **settings: Any) -> RolloutResult:
        given = {**self.settings, "faults": faults, "rollout_data_dir": str(self.folder / out), **settings}
        result = await run_rollouts(load_config(None, given))
        result.accounting.check()
        return result

    def lines(self, out: str = "out") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / out / "0.jsonl").read_text().splitlines()]

    def injected(self, out: str = "out") -> list[tuple[str, str, int, int | None, int | None]]:
        """What the lines of the dump say, without times and order."""
        return sorted(
            (line["request_id"], fault["kind"], fault["turn"], fault.get("call"), fault.get("attempt"))
            for line in self.lines(out)
            for fault in line["metrics"]["faults"]["injected"]
        )

    def check(self, result: RolloutResult, out: str = "out") -> dict[str, Any]:
        """One line for each id, no score for our failures, and a file that says what the dump says."""
        lines = self.lines(out)
        assert len(lines) == len({line["request_id"] for line in lines}) == ALL
        for line in lines:
            if (line["failure"] or {}).get("whose") == "ours":
                assert line["score"] is None
        file = self.folder / out / "faults-0.jsonl"
        told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        found = [
            (one["request_id"], one["kind"], one["turn"], one.get("call"), one.get("attempt"))
            for one in told
            if "turn" in one
        ]
        assert sorted(found, key=str) == sorted(self.injected(out), key=str)
        assert result.faults is not None
        kinds = result.faults.as_json()["kinds"]
        assert Counter(one["kind"] for one in told) == {kind: count["planned"] for kind, count in kinds.items()}
        for line in (self.folder / out / "0.jsonl").read_bytes().splitlines():
            assert audit(trajectory_of(line)) == []
        return kinds


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Job:
    return Job(tmp_path, model)


@pytest.mark.parametrize("name", ["flaky-engine", "flaky-tools", "chaos"])
async def test_a_bundled_profile_accounts_for_every_id_and_replays_to_the_bit(job: Job, name: str):
    result = await job.run(name, record=str(job.folder / "a.tape"))
    kinds = job.check(result)
    assert {line["metrics"]["faults"]["profile"] for line in job.lines()} == {name}
    assert sum(count["injected"] for count in kinds.values()) > ALL // 4
    replayed = await job.run(None, out="replayed", replay=str(job.folder / "a.tape"))
    assert (job.folder / "replayed/0.jsonl").read_bytes() == (job.folder / "out/0.jsonl").read_bytes()
    again = job.check(replayed, "replayed")
    assert again == {kind: count for kind, count in kinds.items() if kind != "slow_disk"}


@pytest.mark.exhaustive
async def test_the_same_seed_injects_the_same_faults_whatever_the_timing(job: Job):
    rates = {
        "engine_error": {"rate": 0.3},
        "tool_timeout": {"rate": 0.2, "seconds": 0.05},
        "malformed_call": {"rate": 0.2},
        "sandbox_kill": {"rate": 0.2},
    }
    await job.run(job.profile(seed=3, **rates), "one by one", concurrency=1)
    await job.run(job.profile(seed=3, **rates), "at once")
    await job.run(job.profile(seed=4, **rates), "other")
    assert len(job.injected("at once")) > ALL
    assert {kind for _, kind, *_ in job.injected("at once")} == set(rates)
    assert job.injected("one by one") == job.injected("at once")
    assert job.injected("other") != job.injected("at once")


ALWAYS = {
    "engine_error": ({}, "engine_failure", 1 + 3),
    "tool_timeout": ({"seconds": 0.05}, "stop", 2),
    "malformed_call": ({}, "stop", 2),
    "sandbox_kill": ({}, "tool_failure", 1 + 2),
}
"""By kind: more of it, how every trajectory ends, and how often it strikes in each, with the default retries."""


@pytest.mark.parametrize("kind", ALWAYS)
async def test_what_always_strikes_ends_as_a_real_failure_does(job: Job, kind: str):
    more, finish, times = ALWAYS[kind]
    kinds = job.check(await job.run(job.profile(**{kind: {"rate": 1, **more}})))
    lines = job.lines()
    assert {line["finish_reason"] for line in lines} == {finish}
    assert list(kinds) == [kind]
    assert kinds[kind]["injected"] == times * ALL
    if finish == "stop":
        outcome = {"tool_timeout": "timed_out", "malformed_call": "malformed"}[kind]
        assert Counter(call["outcome"] for line in lines for turn in line["turns"] for call in turn["tool_calls"]) == {
            outcome: 2 * ALL
        }
        assert {line["score"] for line in lines} == {1.0}, "the model's own answer was right"
        assert kinds[kind]["survived"] == 2 * ALL
    else:
        assert {(line["failure"]["whose"], line["score"]) for line in lines} == {("ours", None)}
        assert kinds[kind]["ended"] == {f"{finish} (ours)": times * ALL}


async def test_malformed_calls_leave_the_sampled_tokens_as_they_are(job: Job):
    await job.run(None, "without")
    await job.run(job.profile(malformed_call={"rate": 1}), limits={"max_malformed_turns": 2})
    said = {line["request_id"]: line["turns"][0]["sampled"]["text"] for line in job.lines("without")}
    assert {line["request_id"]: line["turns"][0]["sampled"]["text"] for line in job.lines()} == said
    assert {(line["finish_reason"], line["state"]) for line in job.lines()} == {("malformed_calls", "COMPLETED")}


async def test_what_never_strikes_changes_nothing_but_the_mark(job: Job):
    await job.run(None, "without")
    kinds = job.check(await job.run(job.profile(engine_error={"rate": 0}, sandbox_kill={"rate": 0})))
    assert kinds == {}
    outputs = {line["request_id"]: line["output"] for line in job.lines("without")}
    assert {line["request_id"]: line["output"] for line in job.lines()} == outputs
    assert all("faults" not in line["metrics"] for line in job.lines("without"))
    assert all(line["metrics"]["faults"]["injected"] == [] for line in job.lines())


async def test_a_slow_disk_delays_the_lines(job: Job):
    began = time.monotonic()
    kinds = job.check(await job.run(job.profile(slow_disk={"rate": 1, "seconds": 0.02})))
    assert time.monotonic() - began > 0.02 * ALL
    assert kinds == {"slow_disk": {"planned": ALL, "injected": ALL, "survived": ALL, "ended": {}}}


async def test_kinds_that_the_run_cannot_have_are_refused_before_it_starts_or_skipped_with_a_note(job: Job):
    wanted = {"worker_kill": {"rate": 0.1}, "engine_reset": {"rate": 0.1}, "engine_error": {"rate": 0.1}}
    with pytest.raises(ConfigError, match=r"engine_reset \(the engine scripted is not a server\); worker_kill \(only"):
        await job.run(job.profile(**wanted))
    assert not (job.folder / "out").exists()
    kinds = job.check(await job.run(job.profile(if_missing="skip", **wanted)))
    assert set(kinds) == {"engine_error"}


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:1"])
async def test_a_sandbox_that_is_not_embedded_cannot_be_killed(job: Job, url: str | None):
    own = "toolyard.tools.code_interpreter.SandboxFusionTool", {"type": "native", "sandbox_fusion_url": url}
    name, config = own if url else ("toolyard.tools.gsm8k.Gsm8kTool", {"type": "native"})
    (job.folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [{"class_name": name, "config": config}]}))
    with pytest.raises(ConfigError, match=r"cannot have sandbox_kill \(no tool has an embedded sandbox\)"):
        await job.run(job.profile(sandbox_kill={"rate": 0.1}), tools=str(job.folder / "tools.yaml"))


async def test_a_dump_without_faults_is_not_continued_with_them(job: Job):
    await job.run(None, tasks={**job.settings["tasks"], "limit": 2})
    with pytest.raises(ConfigError, match=r"faults: null → "):
        await job.run("flaky-tools")


# Servers --------------------------------------------------------------------------------------------------------------

ROUTE_MISSING = "vllm without the route for tokens"
ENGINES = {
    "sglang": (SglangEngine, [SGLANG], "/generate"),
    "vllm": (VllmEngine, [VLLM, VLLM_TOKENS], "/inference/v1/generate"),
    ROUTE_MISSING: (VllmEngine, [VLLM], "/v1/completions"),
    "openai": (OpenaiEngine, [OPENAI], "/v1/chat/completions"),
}
OTHERS = [name for name in ENGINES if name != ROUTE_MISSING]


def asked(faults: Faults, request_id: str) -> FaultyCalls:
    """The faults of one request, without a rollout around it."""
    place = setting(scripted(["x"]))
    request = request_for(place)
    request.request_id = request_id
    return faults.calls(None, request, place.speaker)


@asynccontextmanager
async def engine_server(
    faults: Faults, token_seconds: float = 0.0, **options: Any
) -> AsyncGenerator[tuple[EngineServer, SglangEngine]]:
    async with (
        EngineServer([SGLANG], token_seconds=token_seconds) as server,
        engine_proxy(faults, "sglang", [server.url]) as urls,
        SglangEngine(urls, **options) as engine,
    ):
        yield server, engine


async def generate(engine: Any, request_id: str) -> None:
    if isinstance(engine, OpenaiEngine):
        await engine.chat([Message("user", "hello")], [], Sampling(max_tokens=4), request_id=request_id)
    else:
        await engine.generate([1, 2, 3], Sampling(max_tokens=4), request_id=request_id)


@pytest.mark.parametrize("name", [ROUTE_MISSING, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
async def test_engine_faults_are_real_answers_and_resets_that_the_engine_retries(name: str):
    kind, routes, path = ENGINES[name]
    rates = {
        "engine_error": {"rate": 0.2},
        "engine_busy": {"rate": 0.2, "retry_after_seconds": 0.01},
        "engine_reset": {"rate": 0.2},
    }
    faults = Faults(FaultProfile.model_validate(rates))
    requests = [asked(faults, f"request-{number}") for number in range(20)]
    async with EngineServer(routes) as server, engine_proxy(faults, name.partition(" ")[0], [server.url]) as urls:
        options = {"model": "byte-model"} if kind is OpenaiEngine else {}
        async with kind(urls, retries=20, **options) as engine, asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(generate(engine, f"request-{number}"))
    struck = Counter(fault["kind"] for one in requests for fault in one.faults)
    assert set(struck) == set(rates)
    assert engine.retried == struck.total()
    assert len(server.posts(path)) == 20, "an attempt with a fault does not reach the server"
    one_by_one = [sum(1 for _ in one.faults) for one in requests]
    assert one_by_one == [
        next(n for n in range(99) if not any(faults.profile.strikes(kind, f"request-{r}", -1, n) for kind in rates))
        for r in range(20)
    ], "as planned, also if a route had to be found first"


async def test_every_attempt_fails_with_the_status_of_the_profile_and_the_message_names_the_server():
    faults = Faults(FaultProfile.model_validate({"engine_error": {"rate": 1, "status": 502}}))
    one = asked(faults, "r")
    async with engine_server(faults, retries=2) as (server, engine):
        with pytest.raises(EngineError, match=r"HTTP 502: injected fault: engine_error \(tries: 3\)") as raised:
            await generate(engine, "r")
        assert server.url.removeprefix("http://") in str(raised.value)
        assert len(one.faults) == 3
        await generate(engine, "a request without faults")


async def test_a_busy_server_is_waited_for_as_long_as_it_asks():
    faults = Faults(FaultProfile.model_validate({"engine_busy": {"rate": 1, "retry_after_seconds": 0.3}}))
    one = asked(faults, "r")
    async with engine_server(faults, retries=1) as (_, engine):
        began = time.monotonic()
        with pytest.raises(EngineError, match="HTTP 429"):
            await generate(engine, "r")
    assert time.monotonic() - began > 0.3
    assert len(one.faults) == 2


async def test_a_stall_of_a_day_can_be_cancelled_and_leaves_nothing_behind():
    faults = Faults(FaultProfile.model_validate({"engine_stall": {"rate": 1, "seconds": 86400}}))
    one = asked(faults, "r")
    async with engine_server(faults) as (server, engine):
        waiting = asyncio.create_task(generate(engine, "r"))
        await settled(lambda: bool(one.faults))
        waiting.cancel()
        async with asyncio.timeout(patient(10)):
            await asyncio.wait([waiting])
        assert server.posts("/generate") == []
    assert waiting.cancelled()


async def test_the_server_behind_the_proxy_is_told_when_a_client_hangs_up_and_its_death_is_a_broken_connection():
    faults = Faults(FaultProfile())
    async with engine_server(faults, retries=0, token_seconds=1.0) as (server, engine):
        waiting = asyncio.create_task(engine.generate([1], Sampling(max_tokens=2000), request_id="r"))
        await settled(lambda: bool(server.running))
        waiting.cancel()
        await asyncio.wait([waiting])
        await settled(lambda: not server.running)
        assert server.hung_up == 1
        await server.kill()
        with pytest.raises(EngineError, match="the connection broke"):
            await generate(engine, "other")


async def test_a_run_on_servers_survives_a_flaky_engine_and_each_request_reaches_a_server_once(job: Job):
    async with EngineServer(model=ByteModel("#### 42")) as one, EngineServer(model=ByteModel("#### 42")) as two:
        settings = {**job.settings["engine"], "kind": "vllm", "urls": [one.url, two.url]}
        kinds = job.check(await job.run("flaky-engine", engine=settings))
        path = "/inference/v1/generate"
        assert len(one.posts(path)) + len(two.posts(path)) == ALL
    assert {line["finish_reason"] for line in job.lines()} == {"stop"}
    assert sum(count["survived"] for count in kinds.values()) == sum(count["planned"] for count in kinds.values()) > 0


# The command ----------------------------------------------------------------------------------------------------------

DAY = 86400


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fault",
    [
        {"slow_disk": {"rate": 1, "seconds": DAY}},
        pytest.param({"engine_stall": {"rate": 1, "seconds": DAY}}, marks=pytest.mark.slow),
        pytest.param({"tool_timeout": {"rate": 1, "seconds": DAY}}, marks=pytest.mark.slow),
    ],
    ids=lambda fault: next(iter(fault)),
)
async def test_ctrl_c_ends_a_delay_of_a_day(tmp_path: Path, model: Path, fault: dict[str, Any]):
    place = make_place(tmp_path, model)
    (place / "mine.yaml").write_text(json.dumps(fault))
    process, marker = await start(place, "--faults", "mine.yaml")
    reached = "runs/faults-0.jsonl" if "slow_disk" in fault else "diary.jsonl"  # instances are created: it samples next
    await until(lambda: (place / reached).exists(), process)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    done = await ended(place, process, marker)
    assert time.monotonic() - began < patient(15)
    assert done.status == 130
    accounting = done.summary["accounting"]
    assert accounting["planned"] == accounting["dumped"] + len(accounting["missing"])
    assert accounting["problems"] == []
    assert not processes_of(marker)


@pytest.mark.exhaustive
async def test_kill_nine_and_running_again_leave_one_report(tmp_path: Path, model: Path):
    place = make_place(tmp_path, model)
    fault = {"tool_timeout": {"rate": 0.5, "seconds": 0.1}, "engine_error": {"rate": 0.2}}
    (place / "mine.yaml").write_text(json.dumps({"slow_disk": {"rate": 1, "seconds": 0.05}, **fault}))
    process, marker = await start(place, "--faults", "mine.yaml", "--concurrency", "4")
    await until(lambda: lines_in(place) > 3, process)
    process.kill()
    await ended(place, process, marker)
    (place / "diary.jsonl").unlink()  # what was killed released nothing
    done = await rolled(place, "--faults", "mine.yaml")
    check_accounts(done)
    told = [json.loads(line) for line in (place / "runs/faults-0.jsonl").read_text().splitlines()]
    there = [
        (line["request_id"], fault["kind"], fault["turn"], fault.get("call"), fault.get("attempt"))
        for line in done.lines
        for fault in line["metrics"]["faults"]["injected"]
    ]
    reported = [
        (one["request_id"], one["kind"], one["turn"], one.get("call"), one.get("attempt"))
        for one in told
        if "turn" in one
    ]
    assert sorted(reported, key=str) == sorted(there, key=str)
    assert Counter(one["request_id"] for one in told if one["kind"] == "slow_disk") == {
        line["request_id"]: 1 for line in done.lines
    }


@pytest.mark.slow
async def test_the_command_names_what_is_wrong_with_a_profile(tmp_path: Path, model: Path):
    place = make_place(tmp_path, model)
    (place / "mine.yaml").write_text("engine_stall: {rate: 2, seconds: 1}")
    refused = await rolled(place, "--faults", "mine.yaml")
    assert refused.status == 1
    assert "mine.yaml: engine_stall.rate: Input should be less than or equal to 1" in " ".join(refused.stderr.split())
