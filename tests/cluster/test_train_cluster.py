"""A trainer whose rollouts are played by the workers of a cluster, with the weights of each step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_rollouts import Nodes, kill, ray_nodes, until

from toolyard.errors import ConfigError, ToolyardError
from toolyard.rollout.config import TaskConfig
from toolyard.train.config import EvaluateConfig, TrainConfig
from toolyard.train.observer import TrainObserver
from toolyard.train.trl.rollout import ToolyardRollout
from training import make_model
from training_trl import make_trainer, recomputed, small_config, write_tasks

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own processes and files
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("small"))


class Checked(ToolyardRollout):
    """Compares each sample with the trainer's model as it is at that moment."""

    def __init__(self, *given: Any, nodes: Nodes) -> None:
        super().__init__(*given)
        self.nodes = nodes
        self.versions: list[set[str]] = []
        self.worst = 0.0

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        if len(self.versions) == 1:  # in the other steps, they stay as they are
            killed = self.nodes.workers
            kill(killed)
            until(lambda: not set(killed) & set(self.nodes.workers), "the workers are gone")
        columns = super().__call__(prompts, trainer)
        played = columns["trajectory"]
        self.versions.append({v for one in played for turn in one.turns for v in turn.sampled.weight_versions})
        for at, ids in enumerate(columns["prompt_ids"]):
            again = recomputed(trainer.model, ids, columns["completion_ids"][at])
            for mask, told, found in zip(columns["env_mask"][at], columns["logprobs"][at], again, strict=True):
                self.worst = max(self.worst, mask * abs(told - found))
        return columns


def by_place(*, score: list[Any], **_: Any) -> list[float]:
    """A random model earns no rewards, and groups of equal rewards would change no weights."""
    return [float(at % 2) for at in range(len(score))]


@pytest.mark.slow
def test_workers_sample_from_the_weights_of_their_step(nodes: Nodes, small: Path, tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    config = small_config(
        small, write_tasks(tmp_path / "tasks.jsonl"), rollout_data_dir=str(dumps), cluster={"address": nodes.address}
    )
    with Checked(config, nodes=nodes) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out")
        trainer.reward_funcs = [by_place]
        trainer.train()
        for mode in (True, False):  # the same ids twice, of which only one is in the journals of the other
            trainer.model.train(mode)
            rollout([row["prompt"] for row in rollout.dataset()], trainer)
    assert rollout.versions == [{"0"}, {"1"}, {"2"}, {"2"}]
    assert rollout.worst < 1e-4
    for step in (0, 1):
        assert len({json.loads(line)["request_id"] for line in (dumps / f"{step}.jsonl").open()}) == 4
    assert len((dumps / "eval/2.jsonl").read_text().splitlines()) == 4
    assert not (dumps / ".cluster").exists()
    until(lambda: not nodes.workers and not nodes.ledgers, "no worker or ledger is left")


@pytest.mark.exhaustive
def test_between_steps_evaluations_are_played_by_the_trainer_itself(nodes: Nodes, small: Path, tmp_path: Path) -> None:
    from toolyard.train.trl.callbacks import evaluate  # ten seconds of a processor, which only this test needs

    dumps, tasks = tmp_path / "dumps", write_tasks(tmp_path / "tasks.jsonl")
    cluster = {"address": nodes.address}
    config = TrainConfig(
        rollout=small_config(small, tasks, rollout_data_dir=str(dumps), cluster=cluster),
        evaluate=EvaluateConfig(tasks=TaskConfig(path=str(tasks)), temperature=1.0),
    )
    assert config.evaluate is not None
    with ToolyardRollout(config.rollout) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out")
        for step in (0, 1):
            trainer.state.global_step = step
            rollout([row["prompt"] for row in rollout.dataset()], trainer)
            assert evaluate(config, config.evaluate, trainer, TrainObserver()).trajectories == 4
    assert [path.name for path in sorted(dumps.glob("**/*.jsonl"))] == ["0.jsonl", "1.jsonl"] * 2
    until(lambda: not nodes.workers and not nodes.ledgers, "no worker or ledger is left")


@pytest.mark.exhaustive
def test_what_is_wrong_with_a_worker_ends_the_training(nodes: Nodes, small: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools: [{class_name: nowhere.Tool, config: {type: native}}]")
    config = small_config(
        small, write_tasks(tmp_path / "tasks.jsonl"), tools=str(tools), cluster={"address": nodes.address}
    )
    with ToolyardRollout(config) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out")
        with pytest.raises(ToolyardError, match="nowhere"):
            trainer.train()
    until(lambda: not nodes.workers and not nodes.ledgers, "no worker or ledger is left")


@pytest.mark.slow
def test_a_cluster_that_is_not_there(small: Path, tmp_path: Path) -> None:
    config = small_config(small, write_tasks(tmp_path / "tasks.jsonl"), cluster={"address": "127.0.0.9:1"})
    with ToolyardRollout(config) as rollout:
        trainer = make_trainer(rollout, small, tmp_path / "out")
        with pytest.raises(ConfigError, match="ray start"):
            trainer.train()
