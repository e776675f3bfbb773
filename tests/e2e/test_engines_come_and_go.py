"""Servers that join, leave, die and change their weights while requests run, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_asking import KINDS, answered, ask
from typer.testing import CliRunner

from byte_model import make_model
from engine_process import engine_process
from patience import patient
from playing import CHAT, TOKENIZER, Echo, call, limits, request_for, task
from toolyard.cli.app import app
from toolyard.engines.http.directory import add_urls, remove_urls
from toolyard.engines.http.openai import OpenaiEngine
from toolyard.engines.http.sglang import SglangEngine
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import Load, Sampling
from toolyard.errors import ConfigError, EngineError
from toolyard.rollout.assembly import open_rollout
from toolyard.rollout.config import load_config
from toolyard.rollout.play.setting import Setting
from toolyard.rollout.play.speaker import TokenSpeaker
from toolyard.rollout.run import Observer, run_rollouts
from toolyard.rollout.run_many import RolloutRun
from toolyard.testing.engine.byte_model import ByteModel
from toolyard.testing.engine.servers import OPENAI, SGLANG, VLLM, VLLM_TOKENS, EngineServer


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(patient(15)):
        while not holds():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


# An engine ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_is_added_gets_requests_and_one_that_is_removed_does_not(kind: Any) -> None:
    async with EngineServer() as one, EngineServer() as two, kind(one.url, waits_for_servers=True) as engine:
        await ask(engine, request_id="old")
        engine.set_urls([one.url, two.url])
        await until(lambda: len(engine.urls) == 2)
        await asyncio.gather(*(ask(engine, request_id=f"r-{n}") for n in range(16)))
        assert answered(one)
        assert answered(two)
        engine.set_urls([two.url])
        before = len(answered(one))
        await asyncio.gather(*(ask(engine, request_id=f"r-{n}") for n in range(16)), ask(engine, request_id="old"))
        assert len(answered(one)) == before, "its requests have moved"
        assert engine.retried == 0


async def test_what_a_removed_server_is_sampling_ends_there() -> None:
    long = Sampling(max_tokens=320, temperature=0)
    async with EngineServer(token_seconds=0.001) as one, EngineServer() as two:
        async with SglangEngine(one.url, waits_for_servers=True) as engine, asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(ask(engine, long, request_id=f"r-{n}")) for n in range(8)]
            await until(lambda: len(one.running) == 8)
            engine.set_urls([two.url])
            await until(lambda: len(engine.urls) == 1)
            await ask(engine, request_id="new")
            assert len(one.running) == 8
        assert all(len(task.result().token_ids) == 320 for task in running)
        assert (len(answered(one)), len(answered(two)), engine.retried) == (8, 1, 0)


async def test_a_server_joins_when_it_is_healthy(caplog: pytest.LogCaptureFixture) -> None:
    async with EngineServer() as one, EngineServer() as two:
        two.is_healthy = False
        async with SglangEngine([one.url, two.url], waits_for_servers=True) as engine:
            await asyncio.gather(*(ask(engine, request_id=f"r-{n}") for n in range(16)))
            assert engine.urls == [one.url]
            assert [record.getMessage() for record in caplog.records if two.url in record.getMessage()] == [
                f"{two.url} does not pass its health check; it gets requests as soon as it does"
            ]
            two.is_healthy = True
            await until(lambda: len(engine.urls) == 2)
            await asyncio.gather(*(ask(engine, request_id=f"new-{n}") for n in range(16)))
            assert answered(two)


async def test_a_server_that_never_answers_its_health_check_holds_up_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        async with (
            EngineServer() as server,
            SglangEngine([url, server.url], waits_for_servers=True, connect_timeout=0.3) as engine,
        ):
            await asyncio.gather(*(ask(engine, request_id=f"r-{n}") for n in range(8)))
            assert (engine.urls, engine.retried) == ([server.url], 0)


async def test_requests_wait_while_there_is_no_server_and_go_on_when_one_comes() -> None:
    async with EngineServer() as server, SglangEngine([], waits_for_servers=True) as engine:
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(ask(engine, request_id=f"r-{n}")) for n in range(4)]
            await until(lambda: "add one to the engine directory" in engine.activity("r-0"))
            engine.set_urls([server.url])
        assert all(task.result().token_ids for task in waiting)
        engine.set_urls([])
        with pytest.raises(EngineError, match="/model_info: there is no server"):
            await engine.weight_version()


async def test_a_wait_for_a_server_ends_with_an_error_that_says_why() -> None:
    async with SglangEngine([], waits_for_servers=True, request_timeout=0.2) as engine:
        with pytest.raises(EngineError, match=r"no server for 'r-1' within 0\.2 s: .*add one to the engine directory"):
            await ask(engine)
        engine.set_urls(["http://127.0.0.1:9"])
        with pytest.raises(EngineError, match=r"no server passes its health check: http://127\.0\.0\.1:9") as failed:
            await ask(engine)
        assert failed.value.retryable
        waiting = asyncio.ensure_future(ask(engine, request_id="aborted"))
        await until(lambda: bool(engine.activity("aborted")))
        await engine.abort("aborted")
        assert (await waiting).token_ids == []


async def test_if_all_servers_die_requests_wait_for_the_first_to_return() -> None:
    async with EngineServer() as one, EngineServer() as two:
        urls = [one.url, two.url]
        async with SglangEngine(urls, waits_for_servers=True, retries=0) as engine, asyncio.TaskGroup() as tasks:
            await one.kill()
            await two.kill()
            waiting = [tasks.create_task(ask(engine, request_id=f"r-{n}")) for n in range(4)]
            await until(lambda: all("cannot connect" in engine.activity(f"r-{n}") for n in range(4)))
            await two.start()
        assert all(task.result().token_ids for task in waiting)


async def test_a_bad_list_changes_nothing() -> None:
    async with EngineServer() as server, SglangEngine(server.url, waits_for_servers=True) as engine:
        with pytest.raises(ConfigError, match="nonsense"):
            engine.set_urls(["http://10.0.0.1:1", "nonsense"])
        assert engine.urls == [server.url]
        assert await ask(engine)


async def test_an_engine_with_fixed_urls_can_be_given_others() -> None:
    async with EngineServer() as one, EngineServer() as two, VllmEngine(one.url) as engine:
        await ask(engine)
        engine.set_urls([two.url])
        await until(lambda: engine.urls == [two.url])
        await ask(engine)
        assert answered(two)


# Weights and load -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "routes"), [(SglangEngine, [SGLANG]), (VllmEngine, [VLLM, VLLM_TOKENS])])
async def test_new_requests_go_to_the_newest_weights(kind: Any, routes: list[str]) -> None:
    async with EngineServer(routes) as one, EngineServer(routes) as two:
        one.weight_version, two.weight_version = "step-9", "step-10"
        async with kind([one.url, two.url], waits_for_servers=True) as engine:
            got = await asyncio.gather(*(ask(engine, request_id=f"r-{n}") for n in range(8)))
            assert {answer.weight_version for answer in got} == {"step-10"}
            one.weight_version = "step-11"
            async with asyncio.timeout(patient(10)):
                while (await ask(engine, request_id=f"{time.monotonic()}")).weight_version != "step-11":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await ask(engine, request_id="r-0")).weight_version == "step-10", "it stays at its server"


async def test_a_request_that_moves_to_other_weights_says_so_in_each_turn() -> None:
    model = ByteModel(call("echo", {"text": "hello"}))
    model.vocabulary = TOKENIZER.vocab_size
    held = limits(max_assistant_turns=3)
    async with EngineServer([SGLANG], model=model) as one, EngineServer([SGLANG], model=model) as two:
        one.weight_version, two.weight_version = "2", "1"

        async def leave(_: str) -> None:
            engine.set_urls([two.url])
            await until(lambda: engine.urls == [two.url])

        class Leaving(Echo):
            async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
                await leave(instance_id)
                return await super().execute(instance_id, parameters, **kwargs)

        async with SglangEngine([one.url, two.url], waits_for_servers=True) as engine:
            place = Setting(TokenSpeaker(engine, CHAT, Sampling(max_tokens=400), held), {"echo": Leaving()}, held)
            async with RolloutRun(place, [request_for(place)]) as run:
                [trajectory] = [trajectory async for trajectory in run]
    assert [turn.sampled.weight_versions for turn in trajectory.turns] == [("2",), ("1",), ("1",)]


@pytest.mark.parametrize(
    ("kind", "routes"), [(SglangEngine, [SGLANG]), (VllmEngine, [VLLM]), (OpenaiEngine, [OPENAI, VLLM])]
)
async def test_servers_say_how_much_they_have_to_do(kind: Any, routes: list[str]) -> None:
    async with (
        EngineServer(routes, slots=2, token_seconds=0.01) as busy,
        EngineServer([OPENAI]) as silent,
        kind([busy.url, silent.url]) as engine,
    ):
        urls = engine.urls
        engine.set_urls(urls[:1])
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(ask(engine, Sampling(max_tokens=900), request_id=f"r-{n}")) for n in range(5)]
            await until(lambda: busy.waiting == 3)
            engine.set_urls(urls)
            await until(lambda: len(engine.urls) == 2)
            assert await engine.loads() == [Load(2, 3, 0.1)]
            for task_ in running:
                task_.cancel()
        assert await engine.loads() == [Load(0, 0, 0.1)]


async def test_concurrency_follows_the_servers_queue() -> None:
    held = limits(max_assistant_turns=1)
    async with EngineServer([SGLANG], slots=4, token_seconds=0.003) as server, SglangEngine(server.url) as engine:
        speaker = TokenSpeaker(engine, CHAT, Sampling(max_tokens=64), held)
        place = Setting(speaker, {}, held, loads=engine.loads)
        requests = [request_for(place, task(id=str(number))) for number in range(250)]
        async with RolloutRun(place, requests, concurrency=128) as run:
            seen = [(trajectory, run.limit, server.waiting) async for trajectory in run]
    assert len(seen) == 250
    assert server.most_waiting < 40, "124 would wait without it"
    assert max(limit for _, limit, _ in seen[-50:]) <= 16
    assert sum(waiting for *_, waiting in seen[-50:]) / 50 < 8


# A run with a directory -----------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    make_model(tmp_path / "model")
    rows = [{"id": f"task-{number}", "prompt": f"Count, {number}!", "answer": "0"} for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def settings(job: Path, **more: Any) -> Any:
    given: dict[str, Any] = {
        "tasks": {"path": str(job / "tasks.jsonl")},
        "engine": {"kind": "sglang", "model": str(job / "model"), "directory": str(job / "engines.yaml")},
        "chat": {"format": "hermes"},
        "rewards": {"final": "none"},
        "sampling": {"max_tokens": 96},
        "n": 8,
        "concurrency": 8,
        "rollout_data_dir": str(job / "out"),
    }
    return load_config(None, {**given, **more})


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.done = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ended(self, trajectory: Any, summary: Any) -> None:
        self.done += 1


async def test_servers_come_and_go_during_a_run_and_nothing_fails(job: Path) -> None:
    file, observer = job / "engines.yaml", Notes()
    servers = [EngineServer([SGLANG], token_seconds=0.005) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        one, two, three = [await stack.enter_async_context(server) for server in servers]
        add_urls(file, [one.url])
        running = asyncio.create_task(run_rollouts(settings(job, n=32, concurrency=4), observer))
        await until(lambda: observer.done >= 4)
        add_urls(file, [two.url])
        await until(lambda: bool(answered(two)))
        remove_urls(file, [one.url])
        await until(lambda: any("removed" in note for note in observer.notes))
        await until(lambda: not one.running)
        seen = len(answered(one))
        file.write_text("half a li")
        await until(lambda: any("stays in use" in note for note in observer.notes))
        file.write_text(f"{two.url}\n{three.url}\n")
        await until(lambda: bool(answered(three)))
        await two.kill()
        assert not running.done()
        three.token_seconds = 0.0
        result = await asyncio.wait_for(running, patient(60))
    assert result.summary.completed == 256
    assert len(answered(one)) == seen, "a server that was removed gets nothing"
    result.accounting.check()


async def test_a_run_that_starts_before_its_servers_waits_for_them(job: Path) -> None:
    (job / "engines.yaml").write_text("# none yet\n")
    running = asyncio.create_task(run_rollouts(settings(job, n=1)))
    async with EngineServer([SGLANG]) as server:
        await asyncio.sleep(0.2)
        add_urls(job / "engines.yaml", [server.url])
        assert (await asyncio.wait_for(running, patient(30))).summary.completed == 8


@pytest.mark.parametrize(
    ("engine", "more", "why"),
    [
        ({"directory": "nowhere.yaml"}, {}, "nowhere.yaml.*No such file"),
        ({"urls": ["http://127.0.0.1:9"]}, {}, "engine.urls is set, too; choose one"),
        ({"kind": "scripted"}, {}, "scripted has no servers"),
        ({"kind": "scripted", "directory": None}, {"adaptive_concurrency": True}, "adaptive_concurrency"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(job: Path, engine: Any, more: Any, why: str) -> None:
    (job / "engines.yaml").write_text("")
    (job / "script.json").write_text("[]")
    base = settings(job).engine.model_dump()
    with pytest.raises(ConfigError, match=why):
        async with open_rollout(settings(job, engine=base | {"script": str(job / "script.json")} | engine, **more)):
            pass


# The commands ---------------------------------------------------------------------------------------------------------


def engines(job: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["engines", *arguments, "--directory", str(job / "engines.yaml")])


@pytest.mark.slow
def test_a_server_that_is_killed_in_a_run_costs_nothing_and_the_commands_show_it(job: Path) -> None:
    with engine_process("step-1") as (killed, first), engine_process("step-1") as (_, second):
        assert engines(job, "add", first, second).exit_code == 0
        said = engines(job, "check", "--json")
        assert said.exit_code == 0
        assert [row["weight_version"] for row in json.loads(said.stdout)] == ["step-1", "step-1"]
        config = settings(job).model_dump(mode="json")
        (job / "rollout.yaml").write_text(json.dumps(config | {"n": 16, "adaptive_concurrency": True}))
        command = [str(Path(sys.executable).with_name("toolyard")), "rollout", "rollout.yaml", "--json"]
        with subprocess.Popen(command, cwd=job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            end = time.monotonic() + patient(30)
            while not (job / "out" / "0.jsonl").exists() or not (job / "out" / "0.jsonl").stat().st_size:
                assert running.poll() is None, running.communicate()
                assert time.monotonic() < end
                time.sleep(0.02)
            killed.kill()
            stdout, stderr = running.communicate(timeout=patient(60))
        assert running.returncode == 0, stderr
        assert json.loads(stdout)["completed"] == 128
        checked = engines(job, "check")
        assert checked.exit_code == 1
        assert f"{first}   no        –" in checked.stdout
        assert f"{second}   yes       step-1" in checked.stdout
        assert engines(job, "remove", first).exit_code == 0
        assert engines(job, "list").stdout == f"{second}\n"
