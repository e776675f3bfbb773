"""Asynchronous training under the real GRPOTrainer: every token with the weights of its version, none too old, the loss
divided by what was sampled with, and nothing left running."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from toolyard.errors import ConfigError, TrainError
from toolyard.records.dump import read_dump
from toolyard.records.trajectory import Trajectory
from toolyard.rewards import blocking
from toolyard.train.config import AsynchronousConfig, load_train_config
from toolyard.train.metrics import read_metrics
from toolyard.train.observer import TrainObserver, TrainResult
from toolyard.train.order import TaskOrder
from toolyard.train.samples import token_versions
from toolyard.train.trl.rollout import ToolyardRollout
from toolyard.train.trl.stream import StreamSettings
from training import make_model, make_place
from training_trl import make_trainer, recomputed, small_config, write_tasks

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::UserWarning"),
]
REWARD = """
import asyncio
import time

def earned(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(ord, solution_str)) % 100) / 100

def late(data_source, solution_str, ground_truth, extra_info):
    '''Takes up to 0.3 s, so that groups overtake each other.'''
    time.sleep((sum(map(ord, solution_str)) % 4) / 10)
    return earned(data_source, solution_str, ground_truth, extra_info)

def known(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "unknown":
        raise RuntimeError("no idea")
    return earned(data_source, solution_str, ground_truth, extra_info)

async def hangs(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(100)

def broken(data_source, solution_str, ground_truth, extra_info):
    raise RuntimeError("out of order")
"""
TEMPERATURE = 0.8
SLOW_ENGINE = {"max_batch_size": 2}
"""So slow that requests are running whenever the weights change."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path, model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_place(tmp_path, model, reward=REWARD, module="async_reward")


def trained(*overrides: str, resume: bool = False, observer: TrainObserver | None = None) -> TrainResult:
    from toolyard.train.trl.run import run_training

    return run_training(load_train_config("train.yaml", overrides), observer, resume=resume)


def dumped_in(folder: str) -> list[Trajectory]:
    return [line.trajectory for line in read_dump(folder)]


def running() -> Counter[str]:
    """Tasks in the rollouts' event loop, and threads."""

    async def tasks() -> list[str]:
        return [str(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    kept = [one for one in blocking.run(tasks()) if "_serve" not in one]
    return Counter([*kept, *(thread.name for thread in threading.enumerate() if "toolyard-engine" in thread.name)])


# What is trained ------------------------------------------------------------------------------------------------------


class Kept:
    """What a rollout handed out in each step, the weights it did so with, and the losses that followed."""

    def __init__(self, model: Path, folder: Path, staleness: int, on_update: Any = "continue", **changes: Any) -> None:
        self.base, self.folder = model, folder
        config = small_config(
            model,
            write_tasks(folder / "tasks.jsonl"),
            engine={"kind": "transformers", "model": str(model), "device": "cpu", **SLOW_ENGINE},
            sampling={"temperature": TEMPERATURE, "max_tokens": 48},
        )
        asynchronous = AsynchronousConfig(max_staleness=staleness, on_update=on_update)
        self.rollout = ToolyardRollout(config, stream=StreamSettings(asynchronous=asynchronous))
        self.rollout.reward = lambda *, trajectory, **_: [sum(one.tokens.response_ids) % 7 for one in trajectory]
        self.weights: dict[str, Any] = {}
        self.batches: list[dict[str, Any]] = []
        self.losses: list[tuple[int, dict[str, Any], float]] = []
        given = {"max_steps": 5, "learning_rate": 1e-2, "loss_type": "grpo", "temperature": TEMPERATURE}
        self.changes = {**given, **changes}

    def train(self) -> Kept:
        from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer

        kept = self

        class Watched(OffPolicyGRPOTrainer):
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                kept.weights[str(self.state.global_step)] = copy.deepcopy(self.model.state_dict())
                return super()._generate_and_score_completions(inputs)

            def _compute_loss(self, model: Any, inputs: Any) -> Any:
                loss = super()._compute_loss(model, inputs)
                kept.losses.append((self.state.global_step, dict(inputs), float(loss.detach())))
                return loss

        class Handed(type(self.rollout)):
            def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
                kept.batches.append(super().__call__(prompts, trainer))
                return kept.batches[-1]

        self.rollout.__class__ = Handed
        with self.rollout:
            trainer = make_trainer(self.rollout, self.base, self.folder / "out", kind=Watched, **self.changes)
            trainer.train()
        return self

    def model_at(self, version: str) -> Any:
        """A plain model with the weights of a step."""
        import transformers

        models: Any = transformers.AutoModelForCausalLM
        plain = models.from_pretrained(self.base)
        plain.load_state_dict(self.weights[version])
        return plain

    @property
    def trajectories(self) -> list[list[Trajectory]]:
        return [batch["trajectory"] for batch in self.batches]


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory) -> Kept:
    return Kept(model, tmp_path_factory.mktemp("kept"), 2).train()


def test_across_updates_in_the_middle_of_an_answer_every_token_has_the_weights_of_its_version(kept):
    mixed = 0
    for batch in kept.trajectories:
        for one in batch:
            versions = token_versions(one)
            assert versions is not None
            mixed += any(len(turn.sampled.weight_versions) > 1 for turn in one.turns)
            assert [bool(version) for version in versions] == [bool(bit) for bit in one.tokens.response_mask]
            for version in {*versions} - {""}:
                told = recomputed(kept.model_at(version), one.tokens.prompt_ids, one.tokens.response_ids, TEMPERATURE)
                apart = [
                    abs(a - b)
                    for a, b, mine in zip(told, one.tokens.response_logprobs, versions, strict=True)
                    if mine == version
                ]
                assert max(apart) < 1e-4
    assert mixed, "no weights changed in the middle of an answer: there is nothing to see here"


def test_no_token_is_older_than_allowed_and_no_work_is_thrown_away(kept):
    for step, batch in enumerate(kept.trajectories):
        ages = [step - int(version) for one in batch for version in token_versions(one) or () if version]
        assert 0 <= min(ages) <= max(ages) <= 2
        assert {one.step for one in batch} == {step}
        groups = [one.batch_data_id for one in batch]
        assert groups[0::2] == groups[1::2], "whole groups"
    order = TaskOrder(4, seed=0, shuffle=True).first(10)
    names = [f"sum-{index}" for index in order]
    assert Counter(one.batch_data_id for batch in kept.trajectories for one in batch[::2]) == Counter(names)


def test_the_loss_divides_by_the_probabilities_that_were_sampled_with(kept):
    """By hand: the ratio is exp(now - sampled), and 1 for new samples."""
    import torch

    stale = 0
    for step, inputs, loss in kept.losses:
        plain = kept.model_at(str(step))
        rows: list[Any] = []
        for row in range(len(inputs["completion_ids"])):
            real, answered = inputs["prompt_mask"][row].bool(), inputs["completion_mask"][row].bool()
            prompt, response = inputs["prompt_ids"][row][real], inputs["completion_ids"][row][answered]
            one = next(
                one
                for one in kept.trajectories[step]
                if one.tokens.response_ids == response.tolist() and one.tokens.prompt_ids == prompt.tolist()
            )
            now = torch.tensor(recomputed(plain, prompt.tolist(), response.tolist(), TEMPERATURE))
            mask = inputs["tool_mask"][row][answered]
            ratio = torch.exp(now - torch.tensor(one.tokens.response_logprobs))
            is_new = torch.tensor([version in ("", str(step)) for version in token_versions(one) or ()])
            new = ratio[is_new & mask.bool()]
            assert not len(new) or float((new - 1).abs().max()) < 1e-4
            stale += int(((ratio - 1).abs() > 1e-3)[mask.bool()].sum())
            advantage = inputs["advantages"][row]
            lost = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            rows.append((lost * mask).sum() / mask.sum())
        assert loss == pytest.approx(float(torch.stack(rows).mean()), abs=1e-4)
    assert stale, "all samples were new: there is nothing to see here"


@pytest.mark.slow
def test_requests_that_are_finished_with_the_old_weights_have_one_version(model, tmp_path):
    found = Kept(model, tmp_path, 1, "finish", max_steps=3).train()
    versions = [{v for v in token_versions(one) or () if v} for batch in found.trajectories for one in batch]
    assert {len(some) for some in versions} == {1}
    assert {min(some) for some in versions} == {"0", "1"}, "played ahead"


@pytest.mark.slow
def test_without_staleness_it_is_synchronous_training(place):
    changes = ["learning_rate=1e-3", "rollout.rewards.final=async_reward:late"]
    plain = trained("output_dir=runs/plain", *changes)
    same = trained("output_dir=runs/same", "asynchronous={max_staleness: 0}", *changes)
    for one, other in zip(plain.lines, same.lines, strict=True):
        assert (one["reward"], one["loss"], one["grad_norm"]) == (other["reward"], other["loss"], other["grad_norm"])
        assert other["staleness"] == {"mean": 0.0, "max": 0}
    tokens = [
        {line.trajectory.request_id: line.trajectory.tokens.response_ids for line in read_dump(f"runs/{name}/rollouts")}
        for name in ("plain", "same")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_evaluations_and_replaced_groups_do_not_make_anything_older_than_allowed(place):
    result = trained(
        "output_dir=runs/a",
        "steps=5",
        "asynchronous={max_staleness: 2}",
        "dynamic_sampling={max_groups: 1.5}",
        f"rollout.sampling.temperature={TEMPERATURE}",
        "rollout.rewards.final=async_reward:late",
        "evaluate={tasks: {path: tasks.jsonl, limit: 1}, every: 2}",
    )
    assert [line["step"] for line in result.evaluations] == [0, 2, 4, 5]
    assert max(line["staleness"]["max"] for line in result.lines) in (1, 2)
    for line in read_dump("runs/a/rollouts"):
        ages = [line.trajectory.step - int(v) for v in token_versions(line.trajectory) or () if v]
        assert max(ages) <= 2


def test_an_evaluation_of_a_task_that_is_played_ahead_is_another_request(model, tmp_path):
    """Tools know their trajectories by id."""
    from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer

    config = small_config(model, write_tasks(tmp_path / "tasks.jsonl"))
    with ToolyardRollout(config, stream=StreamSettings(asynchronous=AsynchronousConfig(max_staleness=3))) as rollout:
        trainer = make_trainer(rollout, model, tmp_path / "out", kind=OffPolicyGRPOTrainer, max_steps=4)
        prompts = [row["prompt"] for row in rollout.dataset()]
        trained = rollout(prompts, trainer)["trajectory"]
        trainer.state.global_step = 1
        trainer.model.eval()
        evaluated = rollout(prompts, trainer)["trajectory"]
        trainer.model.train()
        for trainer.state.global_step in (1, 2, 3):
            trained += rollout(prompts, trainer)["trajectory"]
    assert {one.batch_data_id for one in evaluated} & {one.batch_data_id for one in trained}
    assert not {one.request_id for one in evaluated} & {one.request_id for one in trained}


def test_an_evaluation_shares_the_runs_endpoint_and_may_be_without_any_score(place):
    (place / "other.jsonl").write_text('{"id": "x", "prompt": "?", "answer": "unknown"}\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = trained(
        "output_dir=runs/a",
        "steps=1",
        f"rollout.metrics={{port: {port}}}",
        "rollout.rewards.final=async_reward:known",
        "evaluate={tasks: {path: other.jsonl}}",
    )
    assert [line["step"] for line in result.evaluations] == [0, 1]
    assert [one.score for one in dumped_in("runs/a/rollouts/eval")] == [None, None]


# Ending ---------------------------------------------------------------------------------------------------------------


class Stopped(TrainObserver):
    """Presses Ctrl-C before the second step."""

    def stepped(self, line: Any) -> None:
        if line["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing_running_and_trains_every_task_once_when_it_is_resumed(place):
    settings = [
        *("output_dir=runs/a", "steps=4", "asynchronous={max_staleness: 2}"),
        *("rollout.rewards.final=async_reward:late", f"rollout.engine.max_batch_size={SLOW_ENGINE['max_batch_size']}"),
    ]
    before = running()
    stopped = trained(*settings, observer=Stopped())
    assert (stopped.steps, stopped.interrupted_by) == (2, signal.SIGINT)
    assert running() == before
    again = trained(*settings, resume=True)
    assert (again.steps_before, again.steps) == (2, 4)
    assert running() == before
    dumped = [line.trajectory for line in read_dump("runs/a/rollouts")]
    names = [f"t{index}" for index in TaskOrder(4, seed=0, shuffle=True).first(8)]
    assert Counter(one.batch_data_id for one in dumped) == Counter({name: 4 * names.count(name) for name in names})
    assert len({one.request_id for one in dumped}) == 32
    assert [line["step"] for line in read_metrics(place / "runs/a/metrics.jsonl")] == [1, 2, 3, 4]


def test_closed_in_the_middle_it_leaves_nothing_running(model, tmp_path):
    before = running()
    found = Kept(model, tmp_path, 3)
    from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer

    with found.rollout as rollout:
        trainer = make_trainer(rollout, model, tmp_path / "out", kind=OffPolicyGRPOTrainer, temperature=TEMPERATURE)
        rollout([rollout.dataset()[0]["prompt"]] * 4, trainer)
        assert any("_work" in name for name in running())
    assert running() == before
    rollout.close()


def test_interrupted_while_it_waits_it_leaves_nothing_running(place):
    """A second Ctrl-C, or one outside of `toolyard train`."""

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer

    before = running()
    config = load_train_config("train.yaml", ["asynchronous={}", "rollout.rewards.final=async_reward:hangs"])
    earlier = signal.signal(signal.SIGALRM, press)
    try:
        with ToolyardRollout(config.rollout, stream=StreamSettings(asynchronous=config.asynchronous)) as rollout:
            model = Path(str(config.rollout.engine.model))
            trainer = make_trainer(rollout, model, place / "out", kind=OffPolicyGRPOTrainer, num_generations=4)
            signal.setitimer(signal.ITIMER_REAL, 2.0)
            with pytest.raises(KeyboardInterrupt):
                rollout([rollout.dataset()[0]["prompt"]] * 4, trainer)
            assert running() == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def test_what_breaks_all_rewards_ends_the_run_by_name_and_leaves_nothing_running(place):
    before = running()
    with pytest.raises(TrainError, match=r"step 1: none of the trajectories can be trained on.*out of order"):
        trained("output_dir=runs/a", "asynchronous={}", "rollout.rewards.final=async_reward:broken")
    assert running() == before


def test_an_engine_that_dies_while_the_trainer_updates_ends_the_run(model, tmp_path):
    from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer

    before = running()
    found = Kept(model, tmp_path, 1)
    with found.rollout as rollout:
        trainer = make_trainer(rollout, model, tmp_path / "out", kind=OffPolicyGRPOTrainer, temperature=TEMPERATURE)
        prompts = [rollout.dataset()[0]["prompt"]] * 4
        rollout(prompts, trainer)
        engine = rollout._player._stage.sync._engine
        blocking.run(engine.__aexit__())
        trainer.state.global_step = 1
        with pytest.raises(Exception, match="the engine is not open"):
            rollout(prompts, trainer)
    assert running() == before


class TestRefused:
    def test_a_trainer_whose_loss_expects_new_samples(self, model, tmp_path):
        found = Kept(model, tmp_path, 1)
        with found.rollout as rollout:
            trainer = make_trainer(rollout, model, tmp_path / "out", temperature=TEMPERATURE)
            with pytest.raises(ConfigError, match=r"use toolyard\.train\.trl\.OffPolicyGRPOTrainer"):
                rollout([rollout.dataset()[0]["prompt"]] * 4, trainer)

    def test_samples_that_are_trained_more_than_once(self, model, tmp_path):
        from toolyard.train.trl.off_policy import OffPolicyGRPOTrainer

        found = Kept(model, tmp_path, 1)
        with found.rollout as rollout:
            changes = {"temperature": TEMPERATURE, "num_iterations": 2}
            trainer = make_trainer(rollout, model, tmp_path / "out", kind=OffPolicyGRPOTrainer, **changes)
            with pytest.raises(ConfigError, match="set num_iterations to 1"):
                rollout([rollout.dataset()[0]["prompt"]] * 4, trainer)

    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            (["rollout.engine={kind: vllm, urls: ['http://a']}"], "use engine.kind transformers or sglang"),
            (["rollout.agent={run: ./agent, fixed_sampling: false}"], "remove one of them"),
            (["rollout.cluster={}"], "asynchronous: not supported with rollout.cluster"),
            (["asynchronous.max_staleness=-1"], "max_staleness"),
        ],
    )
    def test_settings_that_cannot_be_exact(self, settings, told):
        with pytest.raises(ConfigError) as refused:
            load_train_config(None, ["rollout.n=2", "asynchronous={}", *settings])
        assert told in str(refused.value)

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (
                {"engine": {"kind": "vllm", "model": "m", "urls": ["http://a"]}},
                "use engine.kind transformers or sglang",
            ),
            ({"cluster": {}}, "not supported with `cluster`"),
        ],
    )
    def test_settings_that_cannot_be_exact_in_a_loop_of_your_own(self, model, tmp_path, change, told):
        config = small_config(model, write_tasks(tmp_path / "tasks.jsonl"), **change)
        with pytest.raises(ConfigError, match=told):
            ToolyardRollout(config, stream=StreamSettings(asynchronous=AsynchronousConfig()))
