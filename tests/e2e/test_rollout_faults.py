"""What can go wrong in a run, one test for each: the real command in a real process, against real servers.

Afterwards the tests count independently: lines, groups, tool instances, permits, calls, processes, the exit status.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import AsyncExitStack

import pytest
from faulting import (
    CALL,
    GOOD,
    SAMPLES,
    Done,
    bad_server,
    check_accounts,
    ended,
    fails,
    lines_in,
    loses_its_health,
    make_place,
    read_tasks,
    resets,
    rolled,
    stalls,
    start,
    swallows,
    until,
    write_tasks,
)
from ray_head import ray_head
from soak import Service, is_mcp_server, write_servers

from patience import patient
from ray_node import free_port, processes_of
from toolyard.testing.engine.byte_model import ByteModel
from toolyard.testing.engine.servers import EngineServer

ALL = GOOD * SAMPLES

# Tools ----------------------------------------------------------------------------------------------------------------

GOES_OFF = [
    "task group",
    "GeneratorExit",
    "BaseExceptionGroup",
    "SystemExit",
    "CancelledError",
    "cancels itself",
    "raises",
]
STAGES = ["create", "execute", "calc_reward", "release"]
FAULTS = [(stage, fault) for stage in STAGES for fault in GOES_OFF]


@pytest.fixture(scope="module")
def gone_off(tmp_path_factory, model) -> Done:
    """One run in which tools do all of that at once."""
    place = make_place(tmp_path_factory.mktemp("gone_off"), model, *({stage: fault} for stage, fault in FAULTS))
    return asyncio.run(rolled(place))


def test_tools_that_go_off_do_not_end_the_run(gone_off):
    check_accounts(gone_off)
    assert {line["score"] for line in gone_off.of("good")} == {1.0}
    accounting = gone_off.summary["accounting"]
    assert accounting["planned"] == accounting["dumped"] == (GOOD + len(FAULTS)) * SAMPLES
    assert (accounting["missing"], accounting["problems"]) == ({}, [])


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[f"{stage}: {fault}" for stage, fault in FAULTS])
def test_a_tool_that_goes_off_harms_its_own_trajectory_alone(gone_off, number):
    stage, _ = FAULTS[number]
    for line in gone_off.of(f"bad-{number}"):
        if stage == "create":
            assert (line["finish_reason"], line["score"]) == ("tool_failure", None)
            assert (line["failure"]["whose"], line["failure"]["source"]) == ("task", "tool 'ask'")
            assert line["failure"]["cause"]
            continue
        assert (line["finish_reason"], line["score"]) == ("stop", 1.0), "the model was told, and answered"
        assert line["turns"][0]["tool_calls"][0]["outcome"] == ("raised" if stage == "execute" else "ok")
        assert ("problems" in line["metrics"]) == (stage in ("calc_reward", "release"))


async def test_a_tool_that_swallows_cancellation_is_abandoned_named_and_counted(tmp_path, model):
    call = {"timeout_seconds": 0.5, "finish_seconds": 0.5}
    done = await rolled(make_place(tmp_path, model, *({stage: "swallows"} for stage in STAGES), call=call))
    check_accounts(done, abandoned=SAMPLES)
    assert {line["score"] for line in done.of("good")} == {1.0}
    named = done.summary["abandoned"]
    assert sorted(what.partition(", at ")[0] for what in named) == sorted(f"tool 'ask': {stage}" for stage in STAGES)
    assert set(named.values()) == {SAMPLES}
    assert all("faulty.py" in what and "await asyncio.sleep(3600)" in what for what in named), "the line where it hangs"


@pytest.mark.slow
async def test_a_run_whose_tools_swallow_cancellation_can_be_ended(tmp_path, model):
    place = make_place(tmp_path, model, {"execute": "swallows"}, limits={"stuck_after_seconds": 1})
    process, marker = await start(place)
    assert process.stderr is not None
    while b"slow: " not in (line := await process.stderr.readline()):
        assert line, "it ended"
    assert b"waiting for ask" in line
    process.send_signal(signal.SIGINT)
    done = await ended(place, process, marker, seconds=30)
    assert (done.status, len(done.lines)) == (130, ALL)
    assert list(done.summary["accounting"]["missing"].values()) == ["stopped while it ran"] * SAMPLES
    assert not processes_of(marker)


async def test_a_worker_that_ends_without_its_trajectory_is_an_error_of_the_run(tmp_path, model):
    """A worker's task is cancelled from outside. Its request gets a record, the others end as usual, and the run
    reports it."""
    place = make_place(tmp_path, model, {"execute": "cancels a worker"}, call={"timeout_seconds": 1})
    done = await rolled(place, "--concurrency", "1")
    check_accounts(done, status=1)
    assert {line["score"] for line in done.of("good")} == {1.0}
    assert {(line["finish_reason"], line["failure"]["whose"]) for line in done.of("bad")} == {
        ("internal_error", "ours")
    }
    assert "the run does not add up: workers ended without a trajectory: " in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["leaves a task", pytest.param("leaves a thread", marks=pytest.mark.exhaustive)])
async def test_what_a_tool_leaves_behind_does_not_keep_the_process_alive(tmp_path, model, fault):
    check_accounts(await rolled(make_place(tmp_path, model, {"execute": fault}, call={"timeout_seconds": 1})))


async def test_a_tool_that_blocks_the_event_loop_is_named_with_its_line_and_costs_the_others_nothing(tmp_path, model):
    """Two samples block for 3 s each, and a request may take 4 s in all."""
    done = await rolled(make_place(tmp_path, model, {"execute": "blocks"}, limits={"request_seconds": 4}))
    check_accounts(done)
    assert {line["score"] for line in done.of("good")} == {1.0}
    seen = done.summary["stalls"]
    assert seen
    assert all("tool 'ask': execute of request " in stall["what"] for stall in seen)
    assert all("faulty.py" in stall["line"] and "time.sleep(3)" in stall["line"] for stall in seen)
    assert "blocked: tool 'ask': execute" in done.stderr, "told while it happens"


@pytest.mark.slow
async def test_a_run_whose_event_loop_is_blocked_for_ever_can_be_ended(tmp_path, model):
    place = make_place(tmp_path, model, {"execute": "blocks for ever"})
    process, marker = await start(place)
    assert process.stderr is not None
    while b"blocked: " not in (line := await process.stderr.readline()):
        assert line, "it ended"
    process.send_signal(signal.SIGINT)
    done = await ended(place, process, marker, seconds=30)
    assert done.status == 130
    assert not processes_of(marker)


@pytest.mark.slow
async def test_a_plain_method_runs_in_a_thread_and_blocks_nobody(tmp_path, model):
    done = await rolled(make_place(tmp_path, model, class_name="faulty.Blocking"))
    check_accounts(done)
    assert {line["score"] for line in done.lines} == {1.0}
    assert done.summary["stalls"] == []


async def test_a_tool_that_hangs_is_told_to_the_model(tmp_path, model):
    done = await rolled(make_place(tmp_path, model, {"execute": "hangs"}, call={"timeout_seconds": 0.5}))
    check_accounts(done)
    assert {line["turns"][0]["tool_calls"][0]["outcome"] for line in done.of("bad")} == {"timed_out"}
    assert done.summary["abandoned"] == {}


# Rewards --------------------------------------------------------------------------------------------------------------


async def test_a_reward_that_goes_off_fails_its_own_trajectory_alone(tmp_path, model):
    place = make_place(tmp_path, model, {}, {}, {}, rewards={"final": "judging.py:score"})
    (place / "judging.py").write_text(
        "import asyncio\n"
        "async def fail():\n    raise ValueError('a child failed')\n"
        "async def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if 'bad-1' in str(extra_info):\n"
        "        asyncio.current_task().cancel()\n        await asyncio.sleep(60)\n"
        "    if 'bad-2' in str(extra_info):\n        raise SystemExit(3)\n"
        "    if 'bad' in str(extra_info):\n"
        "        async with asyncio.TaskGroup() as group:\n"
        "            group.create_task(fail())\n            await asyncio.sleep(60)\n"
        "    return 1.0\n"
    )
    write_tasks(place, [row | {"extra_info": {"kind": row["id"]}} for row in read_tasks(place)])
    done = await rolled(place)
    check_accounts(done)
    assert {line["score"] for line in done.of("good")} == {1.0}
    failures = [line["failure"] for line in done.of("bad")]
    assert {(failure["whose"], failure["source"]) for failure in failures} == {("task", "reward 'judging.py:score'")}


@pytest.mark.slow
async def test_a_reward_that_is_lost_to_our_sandbox_is_our_failure(tmp_path, model):
    options = {"sandbox_fusion_url": "http://127.0.0.1:9", "retries": 0}
    place = make_place(tmp_path, model, rewards={"final": "code", "options": options})
    (place / "script.json").write_text(json.dumps([CALL, "```python\nprint(42)\n```"]))
    cases = json.dumps({"inputs": [""], "outputs": ["42\n"]})
    write_tasks(place, [row | {"answer": cases} for row in read_tasks(place)])
    done = await rolled(place)
    check_accounts(done, status=1)
    assert {(line["finish_reason"], line["failure"]["whose"]) for line in done.lines} == {("reward_failure", "ours")}
    assert all("127.0.0.1:9" in line["failure"]["error"] for line in done.lines)


# Engines --------------------------------------------------------------------------------------------------------------


def engine(*urls: str, **more) -> dict:
    return {"kind": "sglang", "urls": list(urls), **more}


@pytest.mark.parametrize(
    "bad", [stalls, *(pytest.param(bad, marks=pytest.mark.exhaustive) for bad in (resets, fails, loses_its_health))]
)
async def test_requests_leave_a_bad_server_and_complete_elsewhere_with_the_default_settings(tmp_path, model, bad):
    async with bad_server(bad) as broken, EngineServer(model=ByteModel("#### 42")) as good:
        place = make_place(tmp_path, model, engine=engine(broken, good.url))
        done = await rolled(place, seconds=110)
    check_accounts(done)
    assert done.summary["completed"] == ALL


@pytest.mark.exhaustive
async def test_requests_leave_a_server_that_fails_its_health_check_however_long_silence_may_last(tmp_path, model):
    async with bad_server(loses_its_health) as broken, EngineServer(model=ByteModel("#### 42")) as good:
        done = await rolled(make_place(tmp_path, model, engine=engine(broken, good.url, silence_seconds=600)))
    check_accounts(done)
    assert done.summary["completed"] == ALL


@pytest.mark.exhaustive
async def test_requests_leave_a_server_that_says_it_is_well_and_answers_nothing(tmp_path, model):
    async with bad_server(swallows) as broken, EngineServer(model=ByteModel("#### 42")) as good:
        done = await rolled(make_place(tmp_path, model, engine=engine(broken, good.url, silence_seconds=2)))
    check_accounts(done)
    assert done.summary["completed"] == ALL


@pytest.mark.slow
@pytest.mark.parametrize("bad", [pytest.param(resets, marks=pytest.mark.exhaustive), fails])
async def test_a_persistent_failure_names_the_server_the_try_and_the_last_error(tmp_path, model, bad):
    async with bad_server(bad) as broken:
        limits = {"generate_seconds": patient(4), "stuck_after_seconds": 1}
        done = await rolled(make_place(tmp_path, model, engine=engine(broken), limits=limits))
    check_accounts(done, status=1)
    last = "HTTP 500: boom" if bad is fails else "the connection broke"
    for line in done.lines:
        failure = line["failure"]
        assert failure["whose"] == "ours"
        assert broken in failure["error"]
        assert last in failure["error"]
        assert re.search(r"\btr(y|ies)\b", failure["error"]), "which try it was"
    stuck = [line for line in done.stderr.splitlines() if line.startswith("slow: request ")]
    stuck = [line for line in stuck if not line.endswith("try 1")]
    assert stuck
    named = re.compile(r"(try|attempt) \d+ \(last error: ")
    assert [line for line in stuck if not (named.search(line) and broken in line and last in line)] == []


LIES = {
    "ids outside the vocabulary": ("token id 1000000,", lambda said: said | _said(said, [10**6])),
    "huge ids": ("token id 1099511627776,", lambda said: said | _said(said, [2**40])),
    "fewer logprobs than tokens": (
        "log-probabilities",
        lambda said: said | {"meta_info": _meta(said, said["output_ids"][:1])},
    ),
    "logprobs that are no numbers": (
        "invalid log-probability",
        lambda said: said | {"meta_info": _meta(said, said["output_ids"], "high")},
    ),
    "stop without a stop token": ("not at a stop token", lambda said: said | _said(said, [65], "stop")),
    "aborts for ever": ("aborted the answer repeatedly", lambda said: said | _said(said, [], "abort")),
}


def _said(said, ids, finish="length"):
    """Ids that did not end with a stop token, or their lack would be the reason for the refusal."""
    return {"output_ids": ids, "meta_info": _meta(said, ids) | {"finish_reason": {"type": finish}}}


def _meta(said, ids, logprob=-0.5):
    return said["meta_info"] | {"output_token_logprobs": [[logprob, one, ""] for one in ids]}


@pytest.mark.parametrize(
    "lie", [lie if number < 2 else pytest.param(lie, marks=pytest.mark.exhaustive) for number, lie in enumerate(LIES)]
)
async def test_what_an_engine_cannot_have_sampled_is_its_failure_and_never_scored(tmp_path, model, lie):
    async with EngineServer(model=ByteModel("#### 42")) as server:
        told, server.rewrite = LIES[lie]
        limits = {"engine_retries": 1, "engine_retry_pause_seconds": 0.01}
        done = await rolled(make_place(tmp_path, model, engine=engine(server.url), limits=limits))
    check_accounts(done, status=1)
    assert {(line["finish_reason"], line["failure"]["whose"]) for line in done.lines} == {("engine_failure", "ours")}
    assert [line["failure"]["error"] for line in done.lines if told not in line["failure"]["error"]] == []


async def test_an_engine_that_dies_and_comes_back_costs_no_trajectory(tmp_path, model):
    # 32 tokens are sampled at a time: a shorter answer would not be under way when the server dies.
    async with EngineServer(model=ByteModel("." * 100 + "#### 42"), token_seconds=0.02) as server:
        process, marker = await start(make_place(tmp_path, model, engine=engine(server.url)))
        await until(lambda: len(server.posts("/generate")) == ALL, process)
        await server.kill()
        await asyncio.sleep(0.5)
        await server.start()
        done = await ended(tmp_path, process, marker)
        assert len(server.posts("/generate")) >= 2 * ALL, "all were cut off, and asked again"
    check_accounts(done)
    assert done.summary["completed"] == ALL


# Sandboxes and MCP servers --------------------------------------------------------------------------------------------


def use_tool(place, entry, call):
    """Have the model call another tool than `ask`."""
    tools = json.loads((place / "tools.yaml").read_text())
    (place / "tools.yaml").write_text(json.dumps({"tools": [*tools["tools"], entry]}))
    said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    (place / "script.json").write_text(json.dumps([said, "#### 42"]))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [fails, *(pytest.param(bad, marks=pytest.mark.exhaustive) for bad in (stalls, resets))])
async def test_programs_leave_a_bad_sandbox_server_and_complete_elsewhere(tmp_path, model, bad):
    service = Service(free_port())
    await service.start()
    try:
        async with bad_server(bad) as broken:
            place = make_place(tmp_path, model)
            use_tool(place, interpreter([broken, service.url], retries=0), RUN_CODE)
            done = await rolled(place, seconds=60)  # long before the requests to a server that stalls are given up
    finally:
        await service.kill()
    check_accounts(done)
    assert {line["turns"][0]["tool_calls"][0]["response"] for line in done.lines} == {"42\n"}


@pytest.mark.slow
async def test_a_sandbox_that_is_away_fails_the_trajectory_as_ours_and_is_named(tmp_path, model):
    place = make_place(tmp_path, model)
    use_tool(place, interpreter(f"http://127.0.0.1:{free_port()}"), RUN_CODE)
    done = await rolled(place)
    check_accounts(done, status=1)
    for line in done.lines:
        assert (line["finish_reason"], line["failure"]["whose"]) == ("tool_failure", "ours")
        assert "http://127.0.0.1:" in line["failure"]["source"]
        assert line["failure"]["cause"]


@pytest.mark.exhaustive
async def test_an_mcp_server_that_is_stopped_is_replaced_and_nothing_is_scored_for_it(tmp_path, model):
    place = make_place(tmp_path, model)
    write_servers(place)
    entry = {
        "class_name": "toolyard.tools.mcp.MCPTool",
        "config": {"type": "mcp", "timeout": 5, "ping_seconds": 1},
        "mcp": {"mcp_servers_config_path": "mcp.json", "tool_selected_list": ["slow"]},
    }
    use_tool(place, entry, {"name": "slow", "arguments": {"seconds": 2}})
    process, marker = await start(place)
    found: list[int] = []
    await until(lambda: found.extend(pid for pid in processes_of(marker) if is_mcp_server(pid)) or found, process)
    await until(lambda: (place / "diary.jsonl").exists(), process)
    os.kill(found[0], signal.SIGSTOP)
    done = await ended(place, process, marker)
    check_accounts(done)
    assert {line["turns"][0]["tool_calls"][0]["outcome"] for line in done.lines} == {"ok"}
    assert any(line["turns"][0]["tool_calls"][0]["attempts"] > 1 for line in done.lines)


RUN_CODE = {"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}


def interpreter(url, retries=1):
    """`retries`: the tool's. Without any, the sandbox's client must switch servers."""
    call = {"retries": retries}
    config = {"type": "native", "sandbox_fusion_url": url, "enable_global_rate_limit": False, "call": call}
    return {"class_name": "toolyard.tools.code_interpreter.SandboxFusionTool", "config": config}


# The limiter ----------------------------------------------------------------------------------------------------------


async def test_a_permit_that_does_not_come_harms_its_own_trajectory_alone_and_none_is_lost(tmp_path, model):
    faults = {"execute": "gets no permit in time"}, {"execute": "waits for a permit for ever"}
    done = await rolled(make_place(tmp_path, model, *faults, call={"timeout_seconds": 2, "retries": 0}))
    check_accounts(done)
    assert {line["score"] for line in done.of("good")} == {1.0}
    assert {line["turns"][0]["tool_calls"][0]["outcome"] for line in done.of("bad-1")} == {"timed_out"}


@pytest.mark.slow
async def test_killing_the_limiter_and_a_run_that_holds_permits_loses_no_permit_and_no_trajectory(tmp_path, model):
    place = make_place(tmp_path, model, *[{"execute": "takes a second"}] * 8, class_name="faulty.Limited")
    with ray_head() as ray:
        for run_is_killed_too in (True, False):
            before = lines_in(place)
            process, marker = await start(place, "--concurrency", "4", ray=ray.address)
            await until(lambda before=before: lines_in(place) >= before + 2, process)
            assert ray.kill_limiters() == 2
            await until(lambda before=before: lines_in(place) >= before + 6, process)
            if run_is_killed_too:
                process.kill()
            done = await ended(place, process, marker)
            await ray.check_permits("many", "one")
        (place / "diary.jsonl").unlink()  # what was killed released nothing
    check_accounts(done)
    assert {line["score"] for line in done.lines} == {1.0}


# Resuming -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_kill_nine_and_running_again_lose_nothing(tmp_path, model, kills):
    place = make_place(tmp_path, model, {"execute": "task group"})
    for _ in range(kills):
        before = lines_in(place)
        process, marker = await start(place, "--concurrency", "2")
        await until(lambda before=before: lines_in(place) > before + 2, process)
        process.kill()
        await ended(place, process, marker)
    (place / "diary.jsonl").unlink()  # what was killed released nothing
    check_accounts(await rolled(place))


async def test_ctrl_c_names_what_is_missing(tmp_path, model):
    place = make_place(tmp_path, model, {"execute": "hangs"})
    process, marker = await start(place, "--concurrency", "3")
    await until(lambda: lines_in(place), process)
    process.send_signal(signal.SIGINT)
    done = await ended(place, process, marker)
    accounting = done.summary["accounting"]
    assert done.status == 130
    assert accounting["dumped"] == len(done.lines)
    assert accounting["planned"] == accounting["dumped"] + len(accounting["missing"]) == ALL + SAMPLES
    assert set(accounting["missing"].values()) <= {"stopped while it ran", "stopped before it began"}
    assert list(accounting["missing"].values()).count("stopped while it ran") >= SAMPLES
    assert "aborted" not in done.finishes, "what was stopped is not in the dump, so that it is played again"
    assert not processes_of(marker)
    (place / "diary.jsonl").unlink()
    write_tasks(place, [row | {"tools_kwargs": {}} for row in read_tasks(place)])
    check_accounts(await rolled(place, "--accept-changes"))


@pytest.mark.slow
async def test_other_settings_are_refused_by_name_or_accepted_and_recorded(tmp_path, model):
    place = make_place(tmp_path, model)
    check_accounts(await rolled(place, "--limit", "4"), tasks=4)
    refused = await rolled(place, "--temperature", "0.25")
    assert refused.status == 1
    assert "sampling.temperature: 1.0 → 0.25" in refused.stderr
    assert "--accept-changes" in refused.stderr
    assert len(refused.lines) == 4 * SAMPLES
    done = await rolled(place, "--temperature", "0.25", "--accept-changes")
    check_accounts(done)
    marked = [line["metrics"].get("accepted_changes") for line in done.lines]
    assert marked == [None] * 4 * SAMPLES + [["sampling.temperature: 1.0 → 0.25"]] * (GOOD - 4) * SAMPLES


@pytest.mark.exhaustive
async def test_an_edited_task_is_refused_by_its_id(tmp_path, model):
    place = make_place(tmp_path, model)
    check_accounts(await rolled(place))
    rows = (place / "tasks.jsonl").read_text()
    (place / "tasks.jsonl").write_text(rows.replace("How much is good-5?", "How much is five?"))
    refused = await rolled(place, "--n", "3")
    assert refused.status == 1
    assert "the contents of 1 have changed: good-5" in " ".join(refused.stderr.split())


@pytest.mark.exhaustive
async def test_a_damaged_line_is_refused_by_its_number(tmp_path, model):
    place = make_place(tmp_path, model)
    check_accounts(await rolled(place))
    dump = place / "runs/0.jsonl"
    lines = dump.read_text().splitlines(keepends=True)
    lines[3] = json.dumps(json.loads(lines[3]) | {"tokens": None}) + "\n"
    dump.write_text("".join(lines))
    refused = await rolled(place)
    assert refused.status == 1
    assert "0.jsonl:4: this line is damaged" in " ".join(refused.stderr.split())


@pytest.mark.slow
async def test_a_second_writer_is_refused_also_if_the_lock_file_was_deleted(tmp_path, model):
    place = make_place(tmp_path, model, {"execute": "hangs"})
    process, marker = await start(place)
    await until(lambda: lines_in(place), process)
    (place / "runs/.lock").unlink()
    second = await rolled(place)
    assert second.status == 1
    assert "another run is writing to" in second.stderr
    process.send_signal(signal.SIGINT)
    first = await ended(place, process, marker)
    ids = [line["request_id"] for line in first.lines]
    assert len(ids) == len(set(ids))


@pytest.mark.slow
async def test_a_dump_that_somebody_else_cut_is_an_error_of_the_run(tmp_path, model):
    place = make_place(tmp_path, model, {"execute": "hangs"}, call={"timeout_seconds": 5})
    process, marker = await start(place)
    await until(lambda: lines_in(place) > 3, process)
    dump = place / "runs/0.jsonl"
    with dump.open("rb+") as file:
        file.truncate(len(file.readline()))
    done = await ended(place, process, marker)
    assert done.status == 1
    assert "the run does not add up" in done.stderr


# The defaults ---------------------------------------------------------------------------------------------------------


async def test_a_tool_that_the_format_cannot_offer_is_refused(tmp_path, model):
    place = make_place(tmp_path, model)
    refused = await rolled(place, "--format", "code_block")
    assert refused.status == 1
    assert "code_block cannot offer all of them to the model" in " ".join(refused.stderr.split())


@pytest.mark.parametrize("what", ["ignore", "tell"])
@pytest.mark.exhaustive
async def test_near_misses_are_counted_and_answered_on_request(tmp_path, model, what):
    place = make_place(tmp_path, model)
    near = '```json\n{"name": "ask", "arguments": {"question": "?"}}\n```'
    (place / "script.json").write_text(json.dumps([near, CALL, "#### 42"]))
    done = await rolled(place, "--set", f"chat.near_miss={what}")
    check_accounts(done)
    assert done.summary["near_misses"] == ALL
    assert {len(line["turns"]) for line in done.lines} == {1 if what == "ignore" else 3}
    if what == "tell":
        assert {line["turns"][0]["tool_calls"][0]["outcome"] for line in done.lines} == {"malformed"}


@pytest.mark.exhaustive
async def test_several_servers_of_which_all_fail_are_all_tried(tmp_path, model):
    asked: set[int] = set()

    def resetting(number):
        return lambda line: asked.add(number) or b""

    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(bad_server(resetting(number))) for number in range(3)]
        limits = {"generate_seconds": 5}
        place = make_place(tmp_path, model, engine=engine(*urls), limits=limits)
        done = await rolled(place, "--limit", "1", "--n", "1")  # one request: several would be spread over them anyway
    assert (done.status, len(done.lines)) == (1, 1)
    assert {line["finish_reason"] for line in done.lines} <= {"engine_failure", "stage_deadline"}
    assert asked == {0, 1, 2}
