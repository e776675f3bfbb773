"""Engines over HTTP with several servers, and with requests that are cancelled, aborted and left behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from engine_asking import KINDS, LONG, PROMPT, SHORT, answered, ask, until

from patience import patient
from toolyard.engines.http.sglang import SglangEngine
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import Finish, Sampling
from toolyard.errors import EngineError
from toolyard.testing.engine.servers import EngineServer, Fault

# Several servers ----------------------------------------------------------------------------------------------------


async def test_a_request_stays_at_its_server_and_requests_are_spread() -> None:
    async with EngineServer() as one, EngineServer() as two, SglangEngine([one.url, two.url]) as engine:
        for _turn in range(3):
            async with asyncio.TaskGroup() as tasks:
                for n in range(20):
                    tasks.create_task(ask(engine, request_id=f"r-{n}"))
        assert len(answered(one)) + len(answered(two)) == 60
        assert len(answered(one)) in range(21, 40), "with one prompt for all, one server may have 1.25 times the mean"
        keys = [{h["x-smg-routing-key"] for p, _, h in server.requests if p == "/generate"} for server in (one, two)]
        assert not keys[0] & keys[1]


async def test_requests_move_when_their_server_dies_and_it_is_used_again_when_it_is_back() -> None:
    async with (
        EngineServer(token_seconds=0.001) as one,
        EngineServer(token_seconds=0.001) as two,
        SglangEngine([one.url, two.url]) as engine,
    ):
        sampling = Sampling(max_tokens=200, temperature=0)
        right = await ask(engine, sampling)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(ask(engine, sampling, request_id=f"r-{n}")) for n in range(20)]
            await until(lambda: len(one.running) + len(two.running) == 20)
            assert len(one.running) in range(7, 14)
            await one.kill()
        assert all(task.result() == right for task in running)
        before = len(answered(one))
        await asyncio.gather(*(ask(engine, request_id=f"r-{n}") for n in range(20)))
        assert len(answered(one)) == before, "they stay where they moved to"
        await one.start()
        await asyncio.sleep(1.1)
        await asyncio.gather(*(ask(engine, request_id=f"new-{n}") for n in range(10)))
        assert len(answered(one)) > before


async def test_a_server_that_is_busy_keeps_its_requests() -> None:
    async with EngineServer() as one, EngineServer() as two, SglangEngine([one.url, two.url]) as engine:
        await ask(engine)
        busy = one if answered(one) else two
        busy.faults = [Fault(status=429)] * 2
        await ask(engine)
        assert len(answered(busy)) == 4


async def test_all_servers_down_is_an_engine_error_and_the_first_to_return_is_found() -> None:
    async with EngineServer() as one, EngineServer() as two, SglangEngine([one.url, two.url], retries=2) as engine:
        await one.kill()
        await two.kill()
        with pytest.raises(EngineError, match="cannot connect"):
            await ask(engine)
        await two.start()
        assert await ask(engine)


# Cancelling, aborting, leaving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SglangEngine, VllmEngine])
async def test_cancelling_tells_the_server(kind: Any) -> None:
    async with EngineServer(token_seconds=0.005) as server, kind(server.url) as engine:
        asking = asyncio.ensure_future(ask(engine, LONG))
        await until(lambda: bool(server.running))
        (name,) = server.running
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        # The closed connection and the abort reach the server in any order.
        await until(lambda: not server.running)
        await until(lambda: name in str(server.posts("/abort_request") + server.posts("/inference/v1/abort_requests")))


async def test_cancelling_does_not_wait_for_a_server_that_is_silent() -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        server.faults = [Fault(silent=True)]
        asking = asyncio.ensure_future(ask(engine))
        await until(lambda: bool(answered(server)))
        began = time.monotonic()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert time.monotonic() - began < patient(0.5)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_between_two_tries_ends_the_request_at_once(kind: Any) -> None:
    async with EngineServer() as server, kind(server.url) as engine:
        server.faults = [Fault(status=429, headers={"Retry-After": "30"})]
        asking = asyncio.ensure_future(ask(engine))
        await until(lambda: bool(answered(server)))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(patient(1)):
            await engine.abort("r-1")
            assert (await asking).finish is Finish.ABORT


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_that_the_server_does_not_hear_closes_the_connection(kind: Any) -> None:
    async with EngineServer() as server, kind(server.url, abort_timeout=0.3) as engine:
        server.faults = [Fault(silent=True)]
        asking = asyncio.ensure_future(ask(engine))
        await until(lambda: bool(answered(server)))
        async with asyncio.timeout(4):
            await engine.abort("r-1")
            assert (await asking).finish is Finish.ABORT
        await until(lambda: server.hung_up == 1)


async def test_an_abort_when_the_server_is_dead_ends_the_request() -> None:
    async with EngineServer(token_seconds=0.005) as server, SglangEngine(server.url) as engine:
        asking = asyncio.ensure_future(ask(engine, LONG))
        await until(lambda: bool(server.running))
        await server.kill()
        async with asyncio.timeout(4):
            await engine.abort("r-1")
            assert (await asking).finish is Finish.ABORT


async def test_leaving_aborts_what_runs_also_where_nobody_answers() -> None:
    async with EngineServer(token_seconds=0.005) as server:
        async with asyncio.timeout(5):
            async with SglangEngine(server.url, abort_timeout=0.5) as engine:
                server.faults = [None] * 10 + [Fault(silent=True)] * 10
                asking = [asyncio.ensure_future(ask(engine, LONG, request_id=f"r-{n}")) for n in range(20)]
                await until(lambda: len(answered(server)) == 20 and len(server.running) == 10)
            found = await asyncio.gather(*asking)
        assert [generation.finish for generation in found] == [Finish.ABORT] * 20
        await until(lambda: not server.running)


async def test_leaving_while_being_cancelled_leaves_nothing() -> None:
    before = asyncio.all_tasks()
    async with EngineServer(token_seconds=0.005) as server:

        async def use() -> None:
            async with SglangEngine(server.url) as engine:
                await ask(engine, LONG)

        using = asyncio.ensure_future(use())
        await until(lambda: bool(server.running))
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        await until(lambda: not server.running)
    await until(lambda: asyncio.all_tasks() <= before)


async def test_an_abort_of_the_server_itself_is_an_abort_with_what_there_is() -> None:
    """As a trainer does before it sends new weights."""
    async with EngineServer(token_seconds=0.005) as server, SglangEngine(server.url) as engine:
        asking = asyncio.ensure_future(ask(engine, LONG))
        await until(lambda: bool(server.running))
        await engine.pause_generation("abort")
        found = await asking
        assert found.finish is Finish.ABORT
        assert 0 < len(found.token_ids) < 2000
        waiting = asyncio.ensure_future(engine.generate([*PROMPT, *found.token_ids], SHORT, request_id="r-1"))
        await engine.update_weight_version("step-2")
        await asyncio.sleep(0.05)
        assert not waiting.done(), "sampled while it was paused"
        await engine.continue_generation()
        assert (await waiting).weight_version == await engine.weight_version() == "step-2"


async def test_servers_of_different_weights_are_noticed() -> None:
    async with EngineServer() as one, EngineServer() as two, SglangEngine([one.url, two.url]) as engine:
        assert await engine.weight_version() == "default"
        two.weight_version = "another"
        with pytest.raises(EngineError, match="different weights"):
            await engine.weight_version()
        await two.kill()
        with pytest.raises(EngineError, match=two.url):
            await engine.pause_generation()


# New weights --------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").touch()
    return folder


async def test_new_weights_reach_all_servers_and_everything_after_has_their_version(tmp_path: Path) -> None:
    async with EngineServer() as one, EngineServer() as two, SglangEngine([one.url, two.url]) as engine:
        await engine.update_weights_from_disk(checkpoint(tmp_path / "step-2"), "2")
        sent = {
            "model_path": str(tmp_path / "step-2"),
            "weight_version": "2",
            "flush_cache": True,
            "abort_all_requests": True,
        }
        assert one.posts("/update_weights_from_disk") == two.posts("/update_weights_from_disk") == [sent]
        assert await engine.weight_version() == "2"
        found = await asyncio.gather(*(ask(engine, request_id=f"r-{n}") for n in range(4)))
        assert {generation.weight_version for generation in found} == {"2"}


async def test_a_folder_is_named_to_the_servers_from_the_root_on(tmp_path: Path, monkeypatch) -> None:
    checkpoint(tmp_path / "step-2")
    monkeypatch.chdir(tmp_path)
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        await engine.update_weights_from_disk("step-2", "2")
        assert server.posts("/update_weights_from_disk")[0]["model_path"] == str(tmp_path / "step-2")


async def test_what_is_sampled_when_new_weights_come_ends_with_the_old_and_what_waits_gets_the_new(tmp_path) -> None:
    folder = checkpoint(tmp_path / "step-2")
    async with EngineServer(token_seconds=0.005) as server, SglangEngine(server.url) as engine:
        asking = asyncio.ensure_future(ask(engine, LONG))
        await until(lambda: bool(server.running))
        await engine.update_weights_from_disk(folder, "2")
        ended = await asking
        assert (ended.finish, ended.weight_version) == (Finish.ABORT, "default")
        assert 0 < len(ended.token_ids) < 2000
        again = await engine.generate([*PROMPT, *ended.token_ids], SHORT, request_id="r-1")
        assert again.weight_version == "2"


async def test_without_abort_what_is_sampled_is_waited_for(tmp_path: Path) -> None:
    folder, sampling = checkpoint(tmp_path / "step-2"), Sampling(max_tokens=300, temperature=0)
    async with EngineServer(token_seconds=0.002) as server, SglangEngine(server.url) as engine:
        asking = asyncio.ensure_future(ask(engine, sampling))
        await until(lambda: bool(server.running))
        loading = asyncio.ensure_future(engine.update_weights_from_disk(folder, "2", abort=False))
        await until(lambda: bool(server.posts("/update_weights_from_disk")))
        late = asyncio.ensure_future(ask(engine, SHORT, request_id="late"))
        ended = await asking
        await loading
        assert (ended.finish is Finish.ABORT, ended.weight_version) == (False, "default")
        assert (await late).weight_version == "2"
        assert not server.aborted


async def test_a_server_that_does_not_take_new_weights_is_named_with_its_words(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "step-2")
    async with (
        EngineServer() as one,
        EngineServer() as two,
        SglangEngine([one.url, two.url], request_timeout=1.0) as engine,
    ):
        with pytest.raises(EngineError, match=r"update_weights_from_disk refused .*Cannot find any model weights"):
            await engine.update_weights_from_disk(tmp_path / "step-3", "3")
        assert await engine.weight_version() == "default"
        await two.kill()
        with pytest.raises(EngineError, match=rf"{two.url}/update_weights_from_disk: cannot connect"):
            await engine.update_weights_from_disk(folder, "2")
        await two.start()
        with pytest.raises(EngineError, match="different weights"):
            await engine.weight_version()
        await engine.update_weights_from_disk(folder, "2")
        assert await engine.weight_version() == "2"
        two.faults = [Fault(silent=True)]
        with pytest.raises(EngineError, match=rf"{two.url}/update_weights_from_disk: no answer within 1 s"):
            await engine.update_weights_from_disk(folder, "3")
        two.rewrite = lambda answer: answer | {"success": False, "message": "Draft model failed."}
        with pytest.raises(EngineError, match=rf"{two.url}/update_weights_from_disk: .*Draft model failed"):
            await engine.update_weights_from_disk(folder, "3")
