"""Rollouts under the real GRPOTrainer: what it gets, to the token, and how it treats failures."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from toolyard.errors import ConfigError, TrainError
from toolyard.records.dump import read_dump
from toolyard.rollout.config import EMBEDDED, load_config
from toolyard.train.samples import Refusal
from toolyard.train.trl.rollout import StepObserver, StepReport, ToolyardRollout
from training import make_model
from training_trl import make_trainer, recomputed, small_config, write_tasks

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::UserWarning"),
]
CONVERSATION = ("prompt_ids", "completion_ids", "env_mask", "logprobs")


class Watching(StepObserver):
    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.threads: set[str] = set()

    def ended(self, trajectory: Any) -> None:
        self.threads.add(threading.current_thread().name)

    def stepped(self, report: StepReport) -> None:
        self.reports.append(report)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks.jsonl")


@pytest.fixture
def handed() -> list[dict[str, Any]]:
    return []


def listening(rollout: ToolyardRollout, handed: list[dict[str, Any]]) -> ToolyardRollout:
    """Records what the rollout returns."""
    called = type(rollout).__call__

    class Listening(type(rollout)):
        def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
            columns = called(self, prompts, trainer)
            handed.append({**columns, "prompts": prompts})
            return columns

    rollout.__class__ = Listening
    return rollout


def test_a_step_trains_and_the_next_samples_from_the_new_weights(
    small: Path, tasks: Path, tmp_path: Path, handed: list[dict[str, Any]]
) -> None:
    config = small_config(small, tasks, rollout_data_dir=str(tmp_path / "dumps"))
    watching = Watching()
    with ToolyardRollout(config, observer=watching) as rollout:
        trainer = make_trainer(listening(rollout, handed), small, tmp_path / "out")
        # A random model earns no rewards, and groups of equal rewards would change no weights.
        rollout.reward = lambda *, score, **_: [float(at % 2) for at in range(len(score))]
        trainer.reward_funcs = [rollout.reward]
        before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
    assert any((value != before[name]).any() for name, value in trainer.model.named_parameters())
    assert [report.step for report in watching.reports] == [0, 1]
    assert watching.threads == {"toolyard-rewards"}
    versions = [
        {version for one in batch["trajectory"] for turn in one.turns for version in turn.sampled.weight_versions}
        for batch in handed
    ]
    assert versions == [{"0"}, {"1"}]
    for batch in handed:
        assert len(batch["prompts"]) == 4
        assert {len(batch[column]) for column in CONVERSATION} == {4}
        for ids, mask, logprobs in zip(batch["completion_ids"], batch["env_mask"], batch["logprobs"], strict=True):
            assert len(ids) == len(mask) == len(logprobs) > 0
    dumped = [line.trajectory for line in read_dump(tmp_path / "dumps")]
    assert len(dumped) == len({one.request_id for one in dumped}) == 8
    assert {one.step for one in dumped} == {0, 1}


def test_samples_of_one_prompt_are_different_requests(
    small: Path, tasks: Path, tmp_path: Path, handed: list[dict[str, Any]]
) -> None:
    with ToolyardRollout(small_config(small, tasks)) as rollout:
        trainer = make_trainer(listening(rollout, handed), small, tmp_path / "out")
        prompt = rollout.dataset()[0]["prompt"]
        first = rollout([prompt] * 3, trainer)["trajectory"]
        again = rollout([prompt] * 2, trainer)["trajectory"]
    assert [one.rollout_offset for one in (*first, *again)] == [0, 1, 2, 3, 4]
    assert len({tuple(one.tokens.response_ids) for one in (*first, *again)}) == 5


def test_what_adapters_learnt_is_what_is_sampled_from(small: Path, tasks: Path, tmp_path: Path) -> None:
    import peft

    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)  # as if it had learnt something
    with ToolyardRollout(small_config(small, tasks)) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out", peft=lora)
        batch = rollout([row["prompt"] for row in rollout.dataset()], trainer)
        assert _difference(trainer.model, batch) < 1e-5
        with trainer.model.disable_adapter():
            assert _difference(trainer.model, batch) > 1e-2
        assert all("lora" in name for name, value in trainer.model.named_parameters() if value.requires_grad)


def test_layers_that_are_trained_beside_an_adapter_are_sampled_from_and_what_cannot_be_merged_is_refused(
    small: Path, tasks: Path, tmp_path: Path
) -> None:
    import peft

    saved = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["up_proj"], init_lora_weights=False)
    with ToolyardRollout(small_config(small, tasks)) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out", peft=saved)
        for name, value in trainer.model.named_parameters():
            if "modules_to_save" in name:
                value.data.mul_(1.5)
        batch = rollout([row["prompt"] for row in rollout.dataset()], trainer)
        assert _difference(trainer.model, batch) < 1e-5
    dora = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    tokens = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2])
    for adapter in (dora, tokens):
        with ToolyardRollout(small_config(small, tasks)) as rollout:
            trainer = make_trainer(rollout, small, tmp_path / "out", peft=adapter)
            with pytest.raises(ConfigError, match=r"the adapter of .* cannot be merged"):
                rollout([rollout.dataset()[0]["prompt"]], trainer)


def test_what_failed_moves_no_weight_and_does_not_stop_the_rest(small: Path, tmp_path: Path) -> None:
    rows = [{"id": f"{n}", "question": f"{n}?", "answer": f"#### {n}"} for n in range(3)]
    rows += [{"id": "long", "question": "many words " * 100, "answer": "#### 1"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    watching = Watching()
    config = small_config(small, tmp_path / "tasks.jsonl")
    with ToolyardRollout(config, observer=watching) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out", num_generations=4, max_steps=4)
        batch = rollout([row["prompt"] for row in rollout.dataset()], trainer)
        assert batch["score"][3] is None
        assert batch["env_mask"][3] == [0]
        assert batch["completion_ids"][3] == [trainer.processing_class.eos_token_id]
        assert [score is None for score in batch["score"]] == [False, False, False, True]
        [refused] = watching.reports[0].refused
        assert refused.refusal is Refusal.FAILED_REQUEST
        assert "prompt" in refused.why
        with pytest.raises(TrainError, match="none of the trajectories"):
            rollout([rollout.dataset()[3]["prompt"]] * 2, trainer)


def test_evaluations_are_dumped_apart(small: Path, tasks: Path, tmp_path: Path) -> None:
    with ToolyardRollout(small_config(small, tasks, rollout_data_dir=str(tmp_path / "dumps"))) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out")
        prompts = [row["prompt"] for row in rollout.dataset()]
        rollout(prompts, trainer)
        trainer.model.eval()
        rollout(prompts[:1], trainer)
    assert len((tmp_path / "dumps/0.jsonl").read_text().splitlines()) == 4
    assert len((tmp_path / "dumps/eval/0.jsonl").read_text().splitlines()) == 1


def test_the_rollouts_of_all_steps_are_counted_at_one_endpoint(small: Path, tasks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    config = small_config(small, tasks, rollout_data_dir=str(folder), metrics={"port": 0})
    with ToolyardRollout(config) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out")
        prompts = [row["prompt"] for row in rollout.dataset()]
        rollout(prompts, trainer)
        trainer.state.global_step = 1
        rollout(prompts, trainer)
        url = (folder / ".metrics").read_text()
        with urllib.request.urlopen(f"{url}/status") as answer:
            page = json.load(answer)
        assert (page["planned"], page["done"], page["states"]) == (8, 8, {})
    assert not (folder / ".metrics").exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/status")


def test_a_step_that_is_played_again_replaces_its_lines(small: Path, tasks: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with ToolyardRollout(small_config(small, tasks, rollout_data_dir=str(tmp_path / "dumps"))) as rollout:
            trainer = make_trainer(rollout, small, tmp_path / "out")
            rollout([row["prompt"] for row in rollout.dataset()], trainer)
    assert len((tmp_path / "dumps/0.jsonl").read_text().splitlines()) == 4


def test_of_an_earlier_attempt_with_larger_groups_nothing_stays_in_the_step(
    small: Path, tasks: Path, tmp_path: Path
) -> None:
    for size in (3, 1):
        with ToolyardRollout(small_config(small, tasks, rollout_data_dir=str(tmp_path / "dumps"))) as rollout:
            trainer = make_trainer(rollout, small, tmp_path / "out")
            prompt = rollout.dataset()[0]["prompt"]
            rollout([prompt] * size, trainer)
            rollout([prompt] * size, trainer)  # the step's second part
    assert len((tmp_path / "dumps/0.jsonl").read_text().splitlines()) == 2


def test_interrupted_while_engine_and_tools_are_opened_it_closes_them(
    small: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    @asynccontextmanager
    async def staged(*_: object) -> AsyncGenerator[None]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.sleep(0.2)
        told.append("opened")
        yield
        told.append("closed")

    monkeypatch.setattr("toolyard.train.trl.playing._staged", staged)
    with ToolyardRollout(small_config(small, tasks)) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out")
        prompt = rollout.dataset()[0]["prompt"]
        with pytest.raises(KeyboardInterrupt):
            rollout([prompt], trainer)
    assert told == ["opened", "closed"]


def test_log_probabilities_are_those_at_the_temperature_of_the_training(
    small: Path, tasks: Path, tmp_path: Path
) -> None:
    with ToolyardRollout(small_config(small, tasks, sampling={"temperature": 0.7, "max_tokens": 8})) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out", temperature=0.7, max_steps=1)
        batch = rollout([row["prompt"] for row in rollout.dataset()], trainer)
        assert _difference(trainer.model, batch, 0.7) < 1e-5
        trainer.train()


class TestRefused:
    def test_another_temperature_than_the_trainers(self, small: Path, tasks: Path, tmp_path: Path) -> None:
        with ToolyardRollout(small_config(small, tasks)) as rollout:
            trainer = make_trainer(rollout, small, tmp_path / "out", temperature=0.5)
            with pytest.raises(ConfigError, match=r"sampling\.temperature is 1, but the trainer's is 0\.5"):
                rollout([rollout.dataset()[0]["prompt"]], trainer)

    def test_a_prompt_of_no_task(self, small: Path, tasks: Path, tmp_path: Path) -> None:
        with ToolyardRollout(small_config(small, tasks)) as rollout:
            trainer = make_trainer(rollout, small, tmp_path / "out")
            with pytest.raises(ConfigError, match=r"none of the 4 tasks .*rollout\.dataset"):
                rollout([[{"role": "user", "content": "Who are you?"}]], trainer)

    def test_tasks_that_only_rewards_can_tell_apart(self, small: Path, tmp_path: Path) -> None:
        rows = [{"id": "a", "question": "?", "answer": "#### 1"}, {"id": "b", "question": "?", "answer": "#### 2"}]
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        with pytest.raises(ConfigError, match="'a' and 'b' have the same prompt"):
            ToolyardRollout(small_config(small, tmp_path / "tasks.jsonl"))

    def test_an_engine_that_cannot_be_trained(self, small: Path, tasks: Path) -> None:
        with pytest.raises(ConfigError, match=r"engine\.kind 'openai'"):
            ToolyardRollout(small_config(small, tasks, engine={"kind": "openai", "model": "m"}))

    def test_a_trainer_whose_vllm_is_not_ours(self, small: Path, tasks: Path, tmp_path: Path) -> None:
        with ToolyardRollout(small_config(small, tasks)) as rollout:
            trainer = make_trainer(rollout, small, tmp_path / "out")
            trainer.use_vllm = True
            with pytest.raises(ConfigError, match="use_vllm is True"):
                rollout([rollout.dataset()[0]["prompt"]], trainer)


@pytest.mark.slow
def test_with_the_real_model_every_sample_over_several_turns_is_exact(tmp_path: Path) -> None:
    """Over turns with a real sandbox between them: the trainer's model finds the log-probabilities that were sampled
    with, and what is masked is what the tool said."""
    from toolyard.engines.models import resolve_model

    changes = {
        "tasks": {"limit": 1},
        "sampling": {"temperature": 0.8, "max_tokens": 48},
        "engine": {"device": "cpu"},
    }
    model = Path(resolve_model("smollm2-135m"))
    with ToolyardRollout(load_config(EMBEDDED, changes)) as rollout:
        trainer = make_trainer(rollout, model, tmp_path / "out", temperature=0.8)
        trainer.model.lm_head.weight.data.mul_(1.01)  # not what the engine has loaded from the disk
        batch = rollout([row["prompt"] for row in rollout.dataset() for _ in range(3)], trainer)
        assert _difference(trainer.model, batch, 0.8) < 1e-4
    told = 0
    for ids, mask, one in zip(batch["completion_ids"], batch["env_mask"], batch["trajectory"], strict=True):
        given = [token for token, sampled in zip(ids, mask, strict=True) if not sampled]
        if not given:
            continue
        text = trainer.processing_class.decode(given)
        answers = [call.response for turn in one.turns for call in turn.tool_calls]
        assert answers
        assert all(answer in text for answer in answers)
        told += 1
    assert told, "no tool was called: there is nothing to see here"


def _difference(model: Any, batch: dict[str, Any], temperature: float = 1.0) -> float:
    """Mean absolute difference of log-probabilities, over all sampled tokens."""
    apart: list[float] = []
    rows = zip(*(batch[column] for column in CONVERSATION), strict=True)
    for prompt, response, mask, logprobs in rows:
        found = recomputed(model, prompt, response, temperature)
        apart += [abs(a - b) for a, b, sampled in zip(found, logprobs, mask, strict=True) if sampled]
        assert all(value == 0.0 for value, sampled in zip(logprobs, mask, strict=True) if not sampled)
    return sum(apart) / len(apart)
