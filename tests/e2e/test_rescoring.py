"""Rescoring dumps: the reward's inputs, the parts of the score, and many lines at once."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import yaml
from scoring_again import SECONDS, answered, fill, function, lines_of, score, toolyard, verls
from serving import http, peer
from typer.testing import CliRunner

from left_behind import children
from playing import Echo, played, said, task
from toolyard.cli.app import app
from toolyard.errors import ConfigError, RecordError, RewardError
from toolyard.messages import Message
from toolyard.records.audit import audit
from toolyard.records.dump import read_dump
from toolyard.records.lines import to_line
from toolyard.rewards.combination import Weights
from toolyard.rewards.registry import FinalReward, FinalScore, load_reward
from toolyard.rollout.assembly import open_rollout
from toolyard.rollout.config import load_config
from toolyard.rollout.rescore.scoring import Change, Rescored, Rescoring

# Weights --------------------------------------------------------------------------------------------------------------

PARTS = {"final": 0.0, "step": -0.5, "tool/search": 2.0, "interaction": 0.25}


def test_the_other_parts_of_the_score_are_those_of_the_dump(tmp_path):
    fill(tmp_path / "1.jsonl", answered("#### 18", score=-0.25, rewards=PARTS))
    report = score(tmp_path, "gsm8k", out=tmp_path / "new")
    (line,) = lines_of(tmp_path / "new/1.jsonl")
    assert (line["score"], line["rewards"]) == (0.75, PARTS | {"final": 1.0})
    assert not report.notes


def test_the_final_reward_is_explained_anew_and_the_other_parts_keep_what_they_said(tmp_path):
    said = {"final": {"weight": 9.0, "reason": "old"}, "tool/search": {"weight": 9.0, "reason": "x" * 400}, "step": "?"}
    good = answered("#### 18", score=-0.25, rewards=PARTS, reward_details=said)
    bad = replace(good, request_id="bad", ground_truth="Paris")
    fill(tmp_path / "1.jsonl", good, bad, verls("It is 17", 1.0, reason="old"), verls("It is 18", 1.0, gts="Paris"))
    score(tmp_path, "gsm8k", weights=["tool.search=0.5"], out=tmp_path / "new")
    lines = lines_of(tmp_path / "new/1.jsonl")
    assert lines[0]["reward_details"] == {
        "final": {"weight": 1.0, "reason": "the answer 18 equals 18", "extracted": "18", "expected": "18"},
        "interaction": {"weight": 1.0},
        "step": {"weight": 1.0},
        "tool/search": {"weight": 0.5, "reason": "x" * 299 + "…"},
    }
    assert lines[1]["reward_details"]["final"]["reason"].startswith("reward 'gsm8k': ground_truth 'Paris'")
    # verl's lines have no parts: there the explanation stands beside the score, as whatever else a reward says.
    assert [lines[2][name] for name in ("score", "reason", "extracted", "expected")] == [
        0.0, "the answer 17 is not 18", "17", "18",
    ]  # fmt: skip
    assert ("reason" in lines[3], lines[3]["score"]) == (False, None)
    score(tmp_path / "new", "gsm8k", weights=["tool.search=0.5"], out=tmp_path / "again")
    assert (tmp_path / "again/1.jsonl").read_bytes() == (tmp_path / "new/1.jsonl").read_bytes()


def test_weights_are_those_of_the_run_unless_others_are_given(tmp_path):
    weights = {"final": 2.0, "step": 0.0, "tool": {"search": 0.5}, "interaction": 1.0}
    fill(tmp_path / "runs/1.jsonl", answered("#### 18", score=1.25, rewards=PARTS))
    (tmp_path / "runs/rollout.json").write_text(json.dumps({"seed": 5, "rewards": {"final": "x", "weights": weights}}))
    report = score(tmp_path / "runs", "gsm8k", out=tmp_path / "a")
    assert (report.total.after.mean, report.weights_are, report.notes) == (3.25, "of its run", [])
    settings = json.loads((tmp_path / "a/rollout.json").read_text())
    assert settings == {"seed": 5, "rewards": {"final": "gsm8k", "options": None, "weights": weights}}

    again = score(tmp_path / "a", "gsm8k", weights=["final=1", "tool.search=0"])
    assert (again.total.before.mean, again.total.after.mean, again.notes) == (3.25, 1.25, [])
    with pytest.raises(ConfigError, match=r"--weight finl: .*known: final, step, tool, interaction"):
        score(tmp_path / "a", "gsm8k", weights=["finl=1"])


def test_scores_that_the_weights_do_not_explain_are_told(tmp_path):
    fill(tmp_path / "1.jsonl", answered("#### 18", score=7.0, rewards=PARTS))
    (note,) = score(tmp_path, "gsm8k").notes
    assert note.startswith("scores in the dump that do not match the weights by default: 1; ")
    (tmp_path / "rollout.json").write_text("{}")
    with pytest.raises(RecordError, match=r"rollout\.json: cannot read the weights of the rewards: 'rewards'"):
        score(tmp_path, "gsm8k")


# After a rollout ------------------------------------------------------------------------------------------------------


async def test_a_run_and_its_dump_scored_again_give_the_reward_the_same_to_read(tmp_path):
    mine = function(
        tmp_path,
        """
        import zlib
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return zlib.crc32(f"{data_source} {solution_str} {ground_truth}".encode()) / 2**32
        """,
    )
    given = task()
    examples = (Message("user", "What is 1 + 1?"), Message("assistant", "#### 2"))
    given = replace(given, messages=(*examples, *given.messages))
    weights = Weights(final=2.0, tool={"echo": 0.5})
    trajectory = await played([said("one"), said("two"), "#### 42"], [Echo()], given, reward=mine, weights=weights)
    assert len(trajectory.rewards) == 3
    fill(tmp_path / "runs/0.jsonl", trajectory)
    seen: list[Rescored] = []
    await Rescoring(tmp_path / "runs", load_reward(mine), weights=weights).run(seen.append)
    assert [(rescored.change, rescored.score) for rescored in seen] == [(Change.UNCHANGED, trajectory.score)]


@pytest.mark.parametrize("how", ["ended", "failed", "cancelled"])
async def test_a_run_closes_its_reward_however_it_ends(how):
    settings = ["engine.kind=openai", "engine.model=m", "engine.urls=['http://127.0.0.1:9']", "rewards.final=code"]
    config = load_config(None, [*settings, "rewards.options.memory_limit_mb=512"])
    before, tasks = children(), asyncio.all_tasks()

    async def run_it() -> None:
        async with open_rollout(config) as opened:
            reward = opened.setting.final_reward
            assert reward is not None
            assert (await reward.score("", DOUBLE, CASES, {}, deadline_seconds=SECONDS)).value == 1.0
            assert children() != before
            if how == "cancelled":
                asyncio.current_task().cancel()
                await asyncio.sleep(60)
            if how == "failed":
                raise ZeroDivisionError

    ends = {"failed": ZeroDivisionError, "cancelled": asyncio.CancelledError}
    with pytest.raises(ends[how]) if how in ends else nullcontext():
        await asyncio.create_task(run_it())
    assert (children(), asyncio.all_tasks()) == (before, tasks)


def test_options_of_a_reward_are_settings_of_a_run():
    config = load_config(None, ["rewards.final=code", "rewards.options.comparison.mode=tokens"])
    assert config.rewards.options == {"comparison": {"mode": "tokens"}}
    command = ["rollout", "--reward", "code", "--reward-option", "memory_limit_mb=512", "--print-config"]
    shown = CliRunner().invoke(app, command)
    assert yaml.safe_load(shown.stdout)["rewards"]["options"] == {"memory_limit_mb": 512}


# Code -----------------------------------------------------------------------------------------------------------------

CASES = {"inputs": ["1\n", "2\n", "3\n", "4\n"], "outputs": ["2\n", "4\n", "6\n", "8\n"]}
DOUBLE = "```python\nprint(int(input()) * 2)\n```"
HALF_RIGHT = "```python\nn = int(input())\nprint(n * 2 if n < 3 else 0)\n```"


async def test_code_is_scored_by_running_it(tmp_path):
    fill(
        tmp_path / "runs/0.jsonl",
        answered(DOUBLE, CASES, score=None, seed=1),
        answered(HALF_RIGHT, json.dumps(CASES), score=0.0, seed=2),
        answered("I do not know.", CASES, score=0.5, seed=3),
        answered(DOUBLE, "no cases", score=0.5, seed=4),
        verls(HALF_RIGHT, 1.0, gts=CASES),
    )
    done = toolyard(tmp_path, "runs", "--reward", "code:fraction", "--out", "new")
    assert done.returncode == 1, done.stderr
    assert "1 without a score: reward 'code:fraction': " in done.stdout
    found = lines_of(tmp_path / "new/0.jsonl")
    assert [line["score"] for line in found] == [1.0, 0.5, 0.0, None, 0.5]
    assert [line["metrics"]["reward"]["verdicts"] for line in found[:2]] == [
        {"passed": 4},
        {"passed": 2, "wrong_answer": 2},
    ]
    assert (found[4]["passed"], found[4]["cases"]) == (2, 4)
    assert not any(audit(line.trajectory) for line in read_dump(tmp_path / "new"))

    async with peer(http(500, "out of order")) as broken:
        options = (f"--reward-option={one}" for one in (f"sandbox_fusion_url={broken.url}", "retries=0"))
        outage = await asyncio.to_thread(toolyard, tmp_path, "runs", "--reward", "code", "--json", *options)
    assert outage.returncode == 1
    told = json.loads(outage.stdout)
    assert (told["newly_absent"], told["still_absent"]) == (3, 1)
    assert (told["scores_after"], told["mean_after"]) == (1, 0.0), "of the answer without a program"


# Many -----------------------------------------------------------------------------------------------------------------


class Slow(FinalReward):
    """Takes longer for some than for others."""

    name = "slow"

    def __init__(self) -> None:
        self.running = self.most = self.asked = self.closed = 0

    async def score(self, data_source, solution_str, ground_truth, extra_info, *, deadline_seconds):
        self.running += 1
        self.asked += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.05 if self.asked % 100 == 1 else 0)
        self.running -= 1
        if self.asked % 10 == 0:
            raise RewardError("sometimes")
        return FinalScore(0.5)


async def test_a_thousand_are_scored_in_order_a_few_at_once(tmp_path):
    count = 1_000
    one = to_line(answered("#### 18"))
    fill(tmp_path / "1.jsonl", *(one.replace(b"request-1", b"request-%d" % at) for at in range(count)))
    reward, seen, ahead = Slow(), [], []

    def ended(rescored: Rescored) -> None:
        seen.append(rescored.trajectory.request_id)
        ahead.append(reward.asked - len(seen))

    scoring = Rescoring(tmp_path, reward, weights=Weights(), concurrency=8)
    await scoring.run(ended)
    assert seen == [f"request-{at}" for at in range(count)]
    assert reward.most == 8
    assert max(ahead) <= 32, "no more is read than that"


async def test_stopped_it_gives_up_what_runs_and_delivers_what_is_done(tmp_path):
    fill(tmp_path / "1.jsonl", *(answered("hang" if seed % 2 else "#### 18", seed=seed) for seed in range(40)))

    class Hanging(Slow):
        async def score(self, data_source, solution_str, ground_truth, extra_info, *, deadline_seconds):
            await asyncio.sleep(60 if "hang" in solution_str else 0)
            return FinalScore(1.0)

    seen: list[Rescored] = []
    scoring = Rescoring(tmp_path, Hanging(), weights=Weights(), concurrency=40)
    asyncio.get_running_loop().call_later(0.3, scoring.stop)
    async with asyncio.timeout(20):
        await scoring.run(seen.append)
    assert [rescored.number for rescored in seen] == list(range(1, 40, 2))
    assert {rescored.change for rescored in seen} == {Change.UNCHANGED}


async def test_cancelled_it_leaves_nothing_running(tmp_path):
    fill(tmp_path / "1.jsonl", *(answered("x", seed=seed) for seed in range(40)))

    class Hanging(Slow):
        async def score(self, *_, deadline_seconds):
            self.running += 1
            try:
                await asyncio.sleep(60)
            finally:
                self.running -= 1

    reward = Hanging()
    task = asyncio.create_task(Rescoring(tmp_path, reward, weights=Weights()).run(lambda _: None))
    await asyncio.sleep(0.1)
    assert reward.running == 32
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reward.running == 0
