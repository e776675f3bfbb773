"""The same command on four nodes, and what happens when something dies. A checker outside counts ids and calls."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from cluster_rollouts import Job, Nodes, call, kill, ray_nodes, until
from prometheus_client.parser import text_string_to_metric_families
from referee import Referee

from collector import collector
from engine_process import engine_process
from patience import patient
from toolyard.engines.http.directory import add_urls

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own processes and files
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as nodes:
        yield nodes


@pytest.mark.slow
def test_the_dump_is_what_one_process_writes(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=12, n=2)
    job.run(out="alone")
    (job.folder / "calls.jsonl").unlink()
    told = job.run("--ray", nodes.address)
    assert told["trajectories"] == 24
    said = job.stderr.read_text()
    assert "started after " in said, "the screen says what took so long before the first request"
    assert not [char for char in said if not char.isprintable() and char != "\n"]
    ended = job.check()
    assert set(ended.values()) == {1}
    assert len(ended) == 24 * 3
    job.same_as("alone")
    assert not nodes.workers
    assert not nodes.ledgers


@pytest.mark.slow
def test_the_driver_serves_the_figures_of_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=12, n=2)
    run = job.start("--ray", nodes.address, "--metrics-port", "0", seconds=5)
    address = job.folder / "out" / ".metrics"
    until(address.exists, "the endpoint")
    url, seen = address.read_text(), list[dict[str, float]]()

    def scraped() -> bool:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            found = text_string_to_metric_families(answer.read().decode())
        seen.append({f"{one.name} {sorted(one.labels.values())}": one.value for two in found for one in two.samples})
        if seen[-1].get("toolyard_ledger_workers []") == 4:
            job.set_seconds(0.1)  # all are there: the calls that follow are short
        return seen[-1]["toolyard_rollout_done []"] == 24

    until(scraped, "the end")  # the driver still has to end its workers then
    told = job.end(run)
    last, most = seen[-1], {name: max(one.get(name, 0) for one in seen) for one in seen for name in one}
    assert last["toolyard_rollout_trajectories_total ['COMPLETED', 'stop']"] == told["trajectories"] == 24
    assert last["toolyard_tool_calls_total ['', 'count', 'ok']"] == sum(job.check().values()) == 72
    assert last["toolyard_rollout_tokens_total ['sampled']"] == told["sampled_tokens"]
    assert last["toolyard_rollout_turns_total []"] == told["turns"]
    assert most["toolyard_ledger_committed_total []"] == 24
    assert most["toolyard_ledger_workers []"] == 4
    assert 4 <= most["toolyard_ledger_leased []"] <= 24
    assert most["toolyard_ledger_refused_total []"] == most["toolyard_ledger_lost_workers_total []"] == 0
    assert most["toolyard_rollout_running ['TOOL_CALLING']"] >= 4
    assert len([name for name in most if name.startswith("toolyard_node_requests")]) == 4
    assert not address.exists()


def begun(job: Job, number: int) -> None:
    """Wait until so many calls have ended."""
    until(lambda: sum(line[0] == "end" for line in job.log()) >= number, f"{number} calls")


def ran_once(job: Job, ended: Counter[tuple[str, int]], kills: Sequence[float] = ()) -> None:
    """Finished calls ran once. A kill in the moment between the end of a call and its entry in the journal is excused:
    nobody can know of such a call."""
    assert len(ended) == job.tasks * job.n * job.calls
    times: dict[tuple[str, int], list[float]] = {}
    for what, instance, number, _, at in job.log():
        if what == "end":
            times.setdefault((instance, number), []).append(at)
    for one, ends in times.items():
        again = [at for at in sorted(ends)[:-1] if not any(0 <= kill - at < 0.5 for kill in kills)]
        assert not again, f"{one} ended {len(ends)} times: {ends}; kills at {kills}"


@pytest.mark.slow
def test_killed_workers_cost_nothing(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=16, n=2, calls=6)
    job.tools(repeatable=True)
    with collector() as there:
        run, kills = job.start("--ray", nodes.address, "--otel", there.url), []
        for number in (10, 60):
            begun(job, number)
            kill([random.choice(nodes.workers)])
            kills.append(time.time())  # after the kill: looking for workers takes a while
        told = job.end(run)
    assert told["completed"] == 32
    ran_once(job, job.check(), kills)
    assert job.stderr.read_text().count("died; others play its requests") == 2
    # The traces are those of the trajectories in the dump, each once, with all their turns.
    roots = [span for span in there.spans if not span.parent]
    lines = {line["request_id"]: line["started_at"] for line in job.lines()}
    assert sorted(span.attributes["toolyard.request_id"] for span in roots) == sorted(lines)
    assert all(span.start == pytest.approx(lines[span.attributes["toolyard.request_id"]] * 1e9) for span in roots)
    names = Counter(span.name for span in there.spans)
    assert (names["turn"], names["tool count"]) == (32 * 7, 32 * 6)
    assert told["traces"]["spans_sent"] == len(there.spans) == len({(span.trace, span.id) for span in there.spans})


@pytest.mark.slow
def test_a_killed_ledger_costs_nothing(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=16, n=2, calls=6)
    run = job.start("--ray", nodes.address)
    for number in (10, 80):
        begun(job, number)
        kill(until(lambda: nodes.ledgers, "a ledger"))
    assert job.end(run)["completed"] == 32
    ran_once(job, job.check())


@pytest.mark.slow
def test_a_killed_driver_is_resumed_and_finished_turns_are_not_repeated(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=16, n=2, calls=6)
    job.tools(repeatable=True)
    run = job.start("--ray", nodes.address)
    begun(job, 60)
    run.kill()
    kills = [time.time()]
    run.communicate()
    gone = until(lambda: not nodes.workers and [time.time()], "the end of its workers")
    told = job.run("--ray", nodes.address)
    assert told["accounting"]["dumped"] == 32
    # Workers go on until Ray ends them.
    ran_once(job, job.check(), [*kills, *gone, *(kills[0] + 0.4 * step for step in range(20))])


@pytest.mark.exhaustive
def test_a_stopped_worker_is_given_up_within_five_seconds_and_spoils_nothing_when_it_returns(
    nodes: Nodes, tmp_path: Path
) -> None:
    job = Job(tmp_path / "job", tasks=16, n=2, calls=6)
    job.tools(repeatable=True)
    run = job.start("--ray", nodes.address)
    begun(job, 10)
    stopped = random.choice(nodes.workers)
    kill([stopped], signal.SIGSTOP)
    began = time.time()
    try:
        until(lambda: all(line[3] != stopped for line in job.log()[-1:]), "work elsewhere")
        told = None
        deadline = time.monotonic() + patient(60)
        while told is None and time.monotonic() < deadline:
            if run.poll() is not None or time.time() - began > 6:
                kill([stopped], signal.SIGCONT)
                told = job.end(run)
            time.sleep(0.1)
    finally:
        kill([stopped], signal.SIGCONT)
    assert told is not None
    assert told["completed"] == 32
    # What was under way when it was stopped runs twice: the tool says that this is harmless. On a busy machine, others
    # may be silent for too long as well, which the driver says.
    said = job.stderr.read_text()
    processes = dict(re.findall(r"worker (\S+) \(process (\d+)\)", said))
    given_up = {stopped, *(int(processes[name]) for name in re.findall(r"worker ([^\s/]+)\S* was silent", said))}
    for one, ended in job.check().items():
        log = [(at, what, pid) for what, instance, number, pid, at in job.log() if (instance, number) == one]
        (_, _, first), *others = sorted(line for line in log if line[1] == "begin")
        assert ended == 1 or first in given_up, one
        if first == stopped:  # as in `ran_once`: nobody can know of a call that ended in the moment before
            known = [at for at, what, _ in log if what == "end" and not 0 <= began - at < 0.5]
            assert not any(at < again for at in known for again, _, _ in others), one


@pytest.mark.exhaustive
def test_a_node_that_is_cut_off_and_returns_spoils_nothing(nodes: Nodes, tmp_path: Path) -> None:
    """All of its processes are stopped for a while, so that nobody hears of it, and it hears of nobody."""
    job = Job(tmp_path / "job", tasks=24, n=2, calls=6)
    job.tools(repeatable=True)
    node = nodes.add("127.0.0.12")
    run = job.start("--ray", nodes.address, seconds=0.5)
    try:
        until(lambda: len({line[3] for line in job.log()}) == 5, "work of five nodes")
        told = rf"worker {node.node_id[:8]}-\w+ \(process (\d+)\)"  # after its first calls, on a busy machine
        (worker,) = until(lambda: re.findall(told, job.stderr.read_text()), "word of its worker")
        processes = [int(worker), *(one.process.pid for kind in node.all_processes.values() for one in kind)]
        kill(processes, signal.SIGSTOP)
        cut = time.time()
        try:
            until(lambda: re.search(rf"worker {node.node_id[:8]}\S* was silent", job.stderr.read_text()), "its loss")
            gone = time.time()
            until(lambda: any(line[0] == "begin" and line[4] > gone for line in job.log()), "work elsewhere")
            assert time.time() - cut < patient(6)
        finally:
            kill(processes, signal.SIGCONT)
        assert job.end(run)["completed"] == 48
    finally:
        nodes.remove(node)
    ran_again = {one for one, ended in job.check().items() if ended > 1}
    begun_there = {line[1:3] for line in job.log() if line[0] == "begin" and line[3] == int(worker)}
    assert ran_again <= begun_there
    ended_there = {line[1:3]: line[4] for line in job.log() if line[0] == "end" and line[3] == int(worker)}
    assert not [one for one in ran_again if ended_there.get(one, cut) < cut - 0.5], "their ends were known"


@pytest.mark.exhaustive
def test_workers_that_are_cut_off_from_the_ledger_go_on_when_it_returns(nodes: Nodes, tmp_path: Path) -> None:
    """They run all the time, unlike those of a node that is stopped, and start no call that others might make."""
    job = Job(tmp_path / "job", tasks=24, n=2, calls=6)
    run = job.start("--ray", nodes.address, seconds=0.5)
    begun(job, 20)
    (ledger,) = until(lambda: len(found := nodes.ledgers) == 1 and found, "the end of other ledgers")
    kill([ledger], signal.SIGSTOP)
    cut = time.time()
    try:
        time.sleep(7)
    finally:
        kill([ledger], signal.SIGCONT)
    back = time.time()
    assert job.end(run)["completed"] == 48
    assert set(job.check().values()) == {1}
    late = [line[4] - cut for line in job.log() if line[0] == "begin" and cut + 4 < line[4] < back]
    assert not late, "calls began after their leases had ended"


@pytest.mark.slow
def test_a_lost_node_is_replaced_by_the_others_and_one_that_joins_gets_work(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=32, n=2, calls=6)
    job.tools(repeatable=True)
    node = nodes.add("127.0.0.9")
    run = job.start("--ray", nodes.address, seconds=1)
    before = until(lambda: len(pids := {line[3] for line in job.log()}) == 5 and pids, "work of five nodes")
    killed = time.time()
    nodes.remove(node)
    another = nodes.add("127.0.0.10")
    try:
        until(lambda: any(line[3] not in before for line in job.log()), "work of the node that joined", seconds=30)
        assert job.end(run)["completed"] == 64
    finally:
        nodes.remove(another)
    ran_once(job, job.check(), [killed + 0.4 * step for step in range(5)])


@pytest.mark.slow
def test_a_drained_node_hands_over_and_finishes_what_it_has_begun(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=24, n=2, calls=6)
    node = nodes.add("127.0.0.11")
    run = job.start("--ray", nodes.address, seconds=5)
    until(lambda: len({line[3] for line in job.log()}) == 5, "work of five nodes")
    subprocess.run(
        [Path(sys.executable).with_name("ray"), "drain-node", f"--address={nodes.address}", f"--node-id={node.node_id}",
         "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=60"],
        check=True, capture_output=True, env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip
    drained = time.time()  # the command itself takes seconds
    try:
        until(lambda: f"node {node.node_id[:8]} is being drained" in job.stderr.read_text(), "word of the drained node")
        job.set_seconds(0.5)
        assert job.end(run)["completed"] == 48
    finally:
        nodes.remove(node)
    assert set(job.check().values()) == {1}
    told = job.stderr.read_text()
    (pid,) = re.findall(rf"worker {node.node_id[:8]}-\w+ \(process (\d+)\)", told)
    assert not [
        line for line in job.log() if line[:1] == ("begin",) and line[2:4] == (0, int(pid)) and line[4] > drained + 3
    ]


@pytest.mark.slow
def test_without_a_shared_folder_results_and_journals_are_sent(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=16, n=2, calls=6)
    job.tools(repeatable=True)
    run = job.start("--ray", nodes.address, "--set", "cluster.shared_folder=false")
    begun(job, 40)
    kill([random.choice(nodes.workers)])
    killed = time.time()
    assert job.end(run)["completed"] == 32
    # What was not yet reported is repeated.
    ran_once(job, job.check(), [killed])
    assert "sends its results and journals" in job.stderr.read_text()


@pytest.mark.slow
def test_a_call_under_way_is_repeated_only_if_its_tool_says_so(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=8, calls=2)
    run = job.start("--ray", nodes.address, seconds=2)
    begun(job, 2)
    until(lambda: sum(line[0] == "begin" for line in job.log()) > 10, "second calls")
    kill([[pid for what, _, number, pid, _ in job.log() if what == "begin" and number == 1][-1]])
    told = job.end(run)
    ended = job.check()
    assert set(ended.values()) == {1}
    failed = [line for line in job.lines() if line["state"] == "FAILED"]
    assert failed
    assert told["failed"] == len(failed)
    assert {line["finish_reason"] for line in failed} == {"tool_failure"}
    assert "nobody knows whether the call was made" in failed[0]["failure"]["error"]
    begins = Counter((instance, number) for what, instance, number, _, _ in job.log() if what == "begin")
    assert set(begins.values()) == {1}


@pytest.mark.slow
def test_programs_run_in_the_sandboxes_of_the_nodes_and_sessions_are_built_up_again(
    nodes: Nodes, tmp_path: Path
) -> None:
    job = Job(tmp_path / "job", tasks=8)
    entry = {"class_name": "toolyard.tools.code_interpreter.SandboxFusionTool"}
    config = {"type": "native", "stateful": True, "rate_limit": 4}
    (job.folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [{**entry, "config": config}]}))
    steps = ["x = 1", "import time; time.sleep(1); x += 1", "time.sleep(1); x += 1; print(x)", "print(x + 39)"]
    (job.folder / "script.json").write_text(
        json.dumps([*(call("code_interpreter", code=step) for step in steps), "42"])
    )
    run = job.start("--ray", nodes.address)
    until(lambda: len(list((job.folder / "out" / ".cluster").rglob("journals/*"))) == 8, "all requests")
    time.sleep(2)
    kill(nodes.workers[:1])
    assert job.end(run)["completed"] == 8
    assert {line["turns"][3]["tool_calls"][0]["response"] for line in job.lines()} == {"42\n"}


def test_a_cluster_of_this_machine_alone_is_started_and_ended(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=4)
    assert job.run("--ray", "local")["completed"] == 4
    job.check()


@pytest.mark.exhaustive
def test_a_recorded_run_is_replayed_without_a_cluster_to_the_bit(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=8, n=2, calls=4)
    job.tools(repeatable=True)
    run = job.start("--ray", nodes.address, "--record", "run.tape")
    begun(job, 20)
    kill(nodes.workers[:1])
    job.end(run)
    job.check()
    job.run("--replay", "run.tape", out="replayed")
    assert sorted((job.folder / "out" / "0.jsonl").read_bytes().splitlines()) == sorted(
        (job.folder / "replayed" / "0.jsonl").read_bytes().splitlines()
    )


@pytest.mark.slow
def test_ctrl_c_keeps_what_ended_and_the_same_command_goes_on(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=16, n=2, calls=6)
    job.tools(repeatable=True)
    run = job.start("--ray", nodes.address)
    begun(job, 60)
    stopped = time.time()
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=patient(60))
    assert run.returncode == 130
    assert json.loads(out)["missing"] > 0
    assert not nodes.workers
    assert job.run("--ray", nodes.address)["accounting"]["dumped"] == 32
    ran_once(job, job.check(), [stopped + 0.4 * step for step in range(5)])


@pytest.mark.slow
def test_what_is_wrong_with_the_settings_is_said_once(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=2)
    (job.folder / "script.json").write_text("{")
    run = job.start("--ray", nodes.address)
    run.communicate(timeout=patient(60))
    assert run.returncode == 1
    assert "engine.script" in job.stderr.read_text()
    assert "Traceback" not in job.stderr.read_text()


@pytest.mark.slow
def test_there_is_no_cluster(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=2)
    run = job.start("--ray", "127.0.0.77:1")
    run.communicate(timeout=patient(60))
    assert run.returncode == 1
    assert "cluster.address '127.0.0.77:1'" in job.stderr.read_text()
    assert "Traceback" not in job.stderr.read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", [True, False])
def test_engines_come_and_go_while_a_cluster_plays(nodes: Nodes, tmp_path: Path, shared: bool) -> None:
    job = Job(tmp_path / "job", tasks=40, n=8)
    settings = yaml.safe_load((job.folder / "rollout.yaml").read_text())
    settings["engine"] = {"kind": "sglang", "model": "model", "directory": "engines.yaml"}
    settings |= {"sampling": {"max_tokens": 96}, "cluster": {"shared_folder": shared}, "adaptive_concurrency": True}
    (job.folder / "rollout.yaml").write_text(yaml.safe_dump(settings))
    dump, directory = job.folder / "out" / "0.jsonl", job.folder / "engines.yaml"
    directory.write_text("")
    run = job.start("--ray", nodes.address)
    with engine_process("step-1") as (_, first), engine_process("step-2") as (killed, second):
        add_urls(directory, [first])
        until(lambda: dump.exists() and "step-1" in dump.read_text(), "the first server")
        add_urls(directory, [second])
        until(lambda: "step-2" in dump.read_text(), "the second server")
        killed.kill()
        told = job.end(run)
    assert told["completed"] == 320
    job.check()
    versions = Counter(version for line in job.lines() for version in line["turns"][0]["sampled"]["weight_versions"])
    assert versions["step-1"] + versions["step-2"] == 320
    assert len(versions) == 2
    assert f"added {second}" in job.stderr.read_text()


LIMITED = '''
import asyncio, socket
from pathlib import Path
from toolyard.limits import RayLimiter
from toolyard.tools.function import tool

limiters = []


@tool
async def count(number: int, instance_id: str) -> str:
    """Count, with one of three permits of the cluster.

    Args:
        number: Which call of its trajectory it is.
    """
    if not limiters:
        limiters.append(RayLimiter("three", 3))
    async with limiters[0].permit(tenant=instance_id):
        with socket.socket(socket.AF_UNIX) as held:
            held.connect(Path(__file__).with_name("referee").read_text())
            await asyncio.sleep(0.1)
    return f"counted {number}"
'''


@pytest.mark.slow
def test_the_limit_of_the_cluster_holds_while_workers_and_the_ledger_are_killed(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=20, n=2)
    job.tools(repeatable=True)
    (job.folder / "counting.py").write_text(LIMITED)
    most = 0
    with contextlib.closing(Referee()) as referee:
        (job.folder / "referee").write_text(referee.path)
        run = job.start("--ray", nodes.address)
        for victims in (lambda: nodes.workers[:1], lambda: nodes.ledgers, lambda: nodes.workers[:2]):
            until(lambda: referee.started >= 20, "20 calls")
            most = max(most, referee.most)
            killed = victims()
            kill(killed)
            # The connections of a dying process are closed one after the other, that to the limiter perhaps first.
            until(lambda killed=killed: not any(Path(f"/proc/{pid}").exists() for pid in killed), "they are gone")
            time.sleep(0.2)
            referee.reset()
        told = job.end(run)
        assert told["completed"] == 40
        job.check()
        assert max(most, referee.most) == 3
        until(lambda: not referee.running, "every permit is back")


# Faults on purpose ----------------------------------------------------------------------------------------------------


def faults_of(job: Job, out: str) -> dict[str, list[tuple[str, int, int | None]]]:
    return {
        line["request_id"]: [
            (one["kind"], one["turn"], one.get("call")) for one in line["metrics"]["faults"]["injected"]
        ]
        for line in job.lines(out)
    }


@pytest.mark.exhaustive
def test_injected_faults_are_those_of_one_process_though_workers_are_killed(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=8, n=2)
    job.tools(repeatable=True)
    faults = {
        "tool_timeout": {"rate": 0.2, "seconds": 0.1},
        "malformed_call": {"rate": 0.2},
        "engine_error": {"rate": 0.2},
    }
    (job.folder / "mine.yaml").write_text(
        yaml.safe_dump({**faults, "if_missing": "skip", "worker_kill": {"rate": 0.15}})
    )
    job.run("--faults", "mine.yaml", out="alone")
    told = job.run("--faults", "mine.yaml", "--ray", nodes.address, "--record", "a.tape")
    job.check()
    assert faults_of(job, "out") == faults_of(job, "alone")
    kinds = told["faults"]["kinds"]
    killed = kinds.pop("worker_kill")
    assert killed["planned"] >= killed["injected"] >= 1
    assert job.stderr.read_text().count("died; others play its requests") >= 1
    assert sum(count["planned"] for count in kinds.values()) == sum(map(len, faults_of(job, "out").values()))
    job.run("--replay", "a.tape", out="replayed")
    there = set((job.folder / "out" / "0.jsonl").read_bytes().splitlines())
    assert set((job.folder / "replayed" / "0.jsonl").read_bytes().splitlines()) == there


@pytest.mark.slow
def test_the_limiter_of_a_run_is_killed_and_comes_back(nodes: Nodes, tmp_path: Path) -> None:
    job = Job(tmp_path / "job", tasks=12)
    entry = {"class_name": "toolyard.tools.code_interpreter.SandboxFusionTool", "config": {"type": "native"}}
    entry["config"]["rate_limit"] = 4  # that of the test above, whose limiter is still there
    (job.folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    said = [f"{number} {call('code_interpreter', code='print(1)')}" for number in range(3)]
    (job.folder / "script.json").write_text(json.dumps([*said, "Done."]))
    (job.folder / "mine.yaml").write_text(yaml.safe_dump({"limiter_kill": {"rate": 0.1}}))
    told = job.run("--faults", "mine.yaml", "--ray", nodes.address)
    assert told["completed"] == 12
    assert told["faults"]["kinds"]["limiter_kill"]["injected"] >= 1
