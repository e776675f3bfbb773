"""Agents of the user's as rollouts: commands and functions that talk to the gateway."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from toolyard.errors import ConfigError
from toolyard.records.audit import audit
from toolyard.records.dump import read_dump
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.agent.run import AgentTask
from toolyard.rollout.config import RolloutConfig, load_config
from toolyard.rollout.run import RolloutResult, run_rollouts
from toolyard.train.config import AsynchronousConfig
from toolyard.train.groups import grouped
from toolyard.train.samples import samples_of
from training import make_model
from training_trl import make_trainer, recomputed, write_tasks

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SCRIPT = [f"I add. {CALL}", "It is 3.\n#### 3"]
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
AGENT = """
import json, sys
from openai import OpenAI

task = json.load(open(sys.argv[1]))
assert task == json.load(sys.stdin) and "ground_truth" not in task
messages = task["messages"]
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
client = OpenAI()
while True:
    message = client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0].message
    messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
    if not message.tool_calls:
        break
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls]
print(message.content)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def config(small: Path, tmp_path: Path) -> Callable[..., RolloutConfig]:
    write_tasks(tmp_path / "tasks.jsonl", 2)
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    (tmp_path / "agent.py").write_text(AGENT)

    def make(agent: Any, **changes: Any) -> RolloutConfig:
        given = {
            "tasks": {"path": str(tmp_path / "tasks.jsonl")},
            "engine": {"kind": "scripted", "model": str(small), "script": str(tmp_path / "script.json")},
            "chat": {"format": "hermes"},
            "sampling": {"max_tokens": 400},
            "rollout_data_dir": str(tmp_path / "dump"),
            "agent": agent,
            "n": 2,
        }
        return load_config(None, {**given, **changes})

    return make


def command(tmp_path: Path) -> str:
    return f"{sys.executable} {tmp_path / 'agent.py'} {{task}}"


def dumped(tmp_path: Path) -> list[Trajectory]:
    found = [line.trajectory for line in read_dump(tmp_path / "dump")]
    assert [audit(one) for one in found] == [[]] * len(found)
    return found


def accounted(result: RolloutResult) -> RolloutResult:
    result.accounting.check()
    return result


# Agents for `package.module:function` ---------------------------------------------------------------------------------


async def asks(task: AgentTask, *questions: list[dict[str, Any]]) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        return [
            (await client.chat.completions.create(model="m", messages=messages, tools=[ADD])).choices[0].message
            for messages in questions
        ]


async def one_turn(task: AgentTask) -> None:
    await asks(task, task.messages)


async def with_a_sub_agent(task: AgentTask) -> float:
    """The score tells the samples of a task apart."""
    await asks(task, task.messages, [{"role": "user", "content": "A sub-agent."}])
    return float(int(task.session, 16) % 2)


def in_a_thread(task: AgentTask) -> dict[str, Any]:
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        said = client.chat.completions.create(model="m", messages=task.messages, tools=[ADD])
    return {"output": said.choices[0].message.content, "score": 0.25}


async def raises(task: AgentTask) -> None:
    await asks(task, task.messages)
    raise ValueError("a bug in the agent")


async def asks_nothing(task: AgentTask) -> str:
    return "done"


async def never_ends(task: AgentTask) -> None:
    """It goes on after every error, as badly written agents do."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        while True:
            try:
                await client.chat.completions.create(model="m", messages=task.messages, tools=[ADD])
            except openai.PermissionDeniedError:
                time.sleep(0.01)  # noqa: ASYNC251 - as badly written agents do


def here(name: str) -> str:
    return f"{__name__}:{name}"


# Tests ----------------------------------------------------------------------------------------------------------------


async def test_a_command_plays_every_task_and_a_replay_is_the_same_to_the_bit(
    config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    tape = str(tmp_path / "a.tape")
    result = accounted(await run_rollouts(config(command(tmp_path), record=tape)))
    assert result.summary.completed == 4
    found = dumped(tmp_path)
    assert {len(one.turns) for one in found} == {2}
    assert {one.messages[-1].content for one in found} == {"It is 3.\n#### 3"}
    assert sorted(one.score or 0.0 for one in found) == [0.0, 0.0, 0.0, 0.0]  # the answers are 1 and 2
    assert {one.metrics["agent"]["output"] for one in found} == {"It is 3.\n#### 3\n"}
    before = (tmp_path / "dump" / "0.jsonl").read_bytes()
    again = config("this-is-not-run {task}", replay=tape, rollout_data_dir=str(tmp_path / "again"))
    accounted(await run_rollouts(again))
    assert (tmp_path / "again" / "0.jsonl").read_bytes() == before


async def test_a_resumed_run_plays_what_is_missing_and_torn_branches_are_replaced(
    config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    settings = config({"run": here("with_a_sub_agent"), "score_from": "printed"})
    accounted(await run_rollouts(settings))
    path = tmp_path / "dump" / "0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 8
    path.write_bytes(b"".join(lines[:5]))  # two sessions, and one branch of the third
    result = accounted(await run_rollouts(settings))
    assert (result.accounting.before, len(result.accounting.dumped)) == (2, 2)
    found = dumped(tmp_path)
    assert len({one.request_id for one in found}) == len(found) == 8


@pytest.mark.parametrize(
    ("agent", "score"),
    [
        ({"run": here("in_a_thread"), "score_from": "printed"}, 0.25),
        ({"run": here("one_turn"), "score_from": "messages"}, 0.0),
        ({"run": f"{sys.executable} -c \"import os; open(os.environ['TOOLYARD_REWARD'], 'w').write('0.75')\""}, None),
    ],
)
async def test_the_score_comes_from_where_the_settings_say(
    config: Callable[..., RolloutConfig], tmp_path: Path, agent: dict[str, Any], score: float | None
) -> None:
    accounted(await run_rollouts(config(agent, n=1)))
    assert {one.score for one in dumped(tmp_path)} == {score}


@pytest.mark.slow
async def test_a_command_reports_its_score_in_a_file_or_in_its_last_line(
    config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    tail = "open(__import__('os').environ['TOOLYARD_REWARD'], 'w').write('0.75')\nprint(0.5)\n"
    (tmp_path / "agent.py").write_text(AGENT + tail)
    for score_from, score in (("file", 0.75), ("printed", 0.5)):
        folder = str(tmp_path / score_from)
        agent = {"run": command(tmp_path), "score_from": score_from}
        accounted(await run_rollouts(config(agent, n=1, rollout_data_dir=folder)))
        assert {line.trajectory.score for line in read_dump(folder)} == {score}


@pytest.mark.parametrize(
    ("agent", "reason", "whose", "told"),
    [
        ("raises", "agent_failure", "task", "a bug in the agent"),
        ("asks_nothing", "agent_failure", "task", "without a request to the gateway"),
    ],
)
async def test_an_agent_that_fails_is_named_and_has_no_score(
    config: Callable[..., RolloutConfig], tmp_path: Path, agent: str, reason: str, whose: str, told: str
) -> None:
    accounted(await run_rollouts(config(here(agent), n=1)))
    for one in dumped(tmp_path):
        assert (one.state, one.finish_reason, one.score) == ("FAILED", reason, None)
        assert one.failure is not None
        assert one.failure.whose == whose
        assert told in one.failure.error


@pytest.mark.slow
async def test_an_agent_that_ignores_its_turn_limit_is_ended_and_scored(
    config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    agent = {"run": here("never_ends"), "grace_seconds": 0.2}
    accounted(await run_rollouts(config(agent, n=1, limits={"max_assistant_turns": 2})))
    found = dumped(tmp_path)
    assert {(one.state, one.finish_reason) for one in found} == {("COMPLETED", "max_assistant_turns")}
    assert all(one.metrics["session"]["refused"] >= 1 for one in found)


@pytest.mark.slow
async def test_an_agent_over_its_time_is_killed_and_its_turns_are_kept(
    config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(f"{AGENT}\nimport time\ntime.sleep(60)\n")
    agent = {"run": command(tmp_path), "grace_seconds": 0.2}
    began = time.monotonic()
    accounted(await run_rollouts(config(agent, n=1, limits={"request_seconds": 8})))
    assert time.monotonic() - began < 40
    found = dumped(tmp_path)
    assert {(one.state, one.finish_reason, len(one.turns)) for one in found} == {("FAILED", "request_deadline", 2)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"agent": "no-such-program {task}"}, "there is no program"),
        ({"agent": "no.such:function"}, "No module named"),
        ({"agent": f"{__name__}:SCRIPT"}, "not a function"),
        ({"agent": "'"}, "No closing quotation"),
        ({"agent": "true", "interaction": {"class_name": "a.B"}}, "cannot be used together"),
        ({"agent": "true", "cluster": {}}, "cannot be used together"),
    ],
)
async def test_settings_that_cannot_work_are_refused_before_anything_runs(
    config: Callable[..., RolloutConfig], changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        await run_rollouts(config(**changes))


async def test_branches_share_their_turns_once_and_a_session_counts_once_in_its_group(
    config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    accounted(await run_rollouts(config({"run": here("with_a_sub_agent"), "score_from": "printed"})))
    found = dumped(tmp_path)
    samples = samples_of(found).samples
    assert len(samples) == 8  # a sample per leaf
    for group in grouped(samples):
        assert len(group.samples) == 4
        assert len(group.rewards) == 2  # one per session
        by_session = {
            sample.session: advantage for sample, advantage in zip(group.samples, group.advantages(), strict=True)
        }
        assert len(by_session) == 2


async def forks(task: AgentTask) -> None:
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        first = (await client.chat.completions.create(model="m", messages=task.messages)).choices[0].message
        known = [*task.messages, {"role": "assistant", "content": first.content}]
        for text in ("Go on.", "Go back."):
            await client.chat.completions.create(model="m", messages=[*known, {"role": "user", "content": text}])


async def test_a_shared_turn_is_trained_once_or_in_each_branch_as_asked(
    config: Callable[..., RolloutConfig], tmp_path: Path
) -> None:
    (tmp_path / "script.json").write_text(json.dumps(["One.", "Two."]))
    accounted(await run_rollouts(config(here("forks"), n=1, tasks={"path": str(tmp_path / "tasks.jsonl"), "limit": 1})))
    found = dumped(tmp_path)
    assert [one.metrics["branch"]["shared_turns"] for one in found] == [0, 1]
    once, each = (samples_of(found, shared_turns=how).samples for how in ("once", "each"))
    shared = found[1].turns[0].sampled.end
    assert [sum(sample.response_mask[:shared]) for sample in each] == [shared, shared]
    assert [sum(sample.response_mask[:shared]) for sample in once] == [shared, 0]
    assert once[1].response_mask[shared:] == each[1].response_mask[shared:]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_grpo_step_trains_on_what_an_agent_sampled(small: Path, tmp_path: Path, ahead: bool) -> None:
    """The embedded engine, an agent with a sub-agent, the real trainer: log-probabilities agree with a forward pass."""
    from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer
    from toolyard.train.trl.rollout import ToolyardRollout
    from toolyard.train.trl.stream import StreamSettings

    handed: list[dict[str, Any]] = []

    class Listening(ToolyardRollout):
        def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
            columns = super().__call__(prompts, trainer)
            rows = zip(columns["prompt_ids"], columns["completion_ids"], strict=True)
            handed.append({**columns, "recomputed": [recomputed(trainer.model, *row) for row in rows]})
            return columns

    config = load_config(
        None,
        {
            "tasks": {"path": str(write_tasks(tmp_path / "tasks.jsonl"))},
            "engine": {"kind": "transformers", "model": str(small), "device": "cpu"},
            "sampling": {"temperature": 1.0, "max_tokens": 8},
            "limits": {"response_length": 600, "prompt_length": 900},
            "agent": {"run": here("with_a_sub_agent"), "score_from": "printed"},
            "rollout_data_dir": str(tmp_path / "dump"),
            "n": 2,
        },
    )
    stream = StreamSettings(asynchronous=AsynchronousConfig()) if ahead else None
    with Listening(config, stream=stream) as rollout:
        # The score of a session may be that of the other: groups of equal rewards would change no weights.
        rollout.reward = lambda *, score, **_: [float(at % 2) for at in range(len(score))]  # type: ignore[assignment]
        kind = OffPolicyGRPOTrainer if ahead else None
        trainer = make_trainer(rollout, small, tmp_path / "out", kind=kind, max_completion_length=700, max_steps=1)
        before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        assert any(not value.equal(before[name]) for name, value in trainer.model.named_parameters())
    for columns in handed:
        for mask, told, expected in zip(columns["env_mask"], columns["logprobs"], columns["recomputed"], strict=True):
            sampled = [(one, other) for one, other, is_sampled in zip(told, expected, mask, strict=True) if is_sampled]
            assert sampled
            assert max(abs(one - other) for one, other in sampled) < 1e-4
    found = dumped(tmp_path)
    assert len(found) == 8  # two branches each, also those that TRL has no row for
    assert {len(turn.sampled.weight_versions) for one in found for turn in one.turns} == {1}


@pytest.mark.kernel("namespaces")
async def test_an_agent_in_the_sandbox_reaches_the_gateway_and_nothing_else(
    config: Callable[..., RolloutConfig], tmp_path: Path, unused_tcp_port: int
) -> None:
    (tmp_path / "agent").mkdir()
    tries = f"""
import os, socket
from pathlib import Path
found = []
for port in ({unused_tcp_port}, 80):
    try:
        socket.create_connection(("127.0.0.1", port), 5)
    except PermissionError:
        found.append("refused")
try:
    os.listdir({str(tmp_path)!r} + "/dump")
except FileNotFoundError:
    found.append("unseen")
Path(os.environ["TOOLYARD_REWARD"]).write_text("0.25" if found == ["refused", "refused", "unseen"] else str(found))
"""
    (tmp_path / "agent/agent.py").write_text(AGENT + tries)
    agent = {"run": "python agent.py {task}", "sandbox": str(tmp_path / "agent"), "score_from": "file"}
    accounted(await run_rollouts(config(agent)))
    found = dumped(tmp_path)
    assert [(one.finish_reason, one.score, len(one.turns)) for one in found] == [("stop", 0.25, 2)] * 4
