"""Dynamic sampling under the real GRPOTrainer: flat groups are replaced within a budget, counted and dumped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from toolyard.cli.app import app
from toolyard.errors import ConfigError, TrainError
from toolyard.records.dump import read_dump
from toolyard.train.config import DynamicSamplingConfig, load_train_config
from toolyard.train.metrics import read_metrics
from toolyard.train.observer import TrainResult
from toolyard.train.trl.rollout import ToolyardRollout
from toolyard.train.trl.stream import ASIDE, StreamSettings
from training import make_model, make_place
from training_trl import make_trainer, small_config, write_tasks

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::UserWarning"),
]
DYNAMIC = "dynamic_sampling={max_groups: 2}"
REWARD = """
def earned(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "boom":
        raise RuntimeError("no score")
    return 0.5 if ground_truth == "flat" else (sum(map(ord, solution_str)) % 100) / 100
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path, model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_place(tmp_path, model, reward=REWARD, module="dynamic_reward")


def with_tasks(place: Path, kinds: str) -> None:
    """One task for each letter: m(ixed), f(lat), b(oom)."""
    answers = {"m": "42", "f": "flat", "b": "boom"}
    rows = [{"id": f"{n}{kind}", "prompt": f"{n}?", "answer": answers[kind]} for n, kind in enumerate(kinds)]
    (place / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained(*overrides: str, resume: bool = False) -> TrainResult:
    from toolyard.train.trl.run import run_training

    return run_training(load_train_config("train.yaml", ["shuffle=false", *overrides]), resume=resume)


def dumped(folder: str) -> list[tuple[int, str, bool]]:
    """Step, task and whether it was put aside, of each group."""
    found = [line.trajectory for line in read_dump(folder)]
    keys = [(one.step, one.batch_data_id, one.metrics.get("dynamic_sampling") == ASIDE) for one in found]
    assert all(keys.count(key) == 4 for key in keys)
    return list(dict.fromkeys(keys))


FOUND = [
    *[(0, "1m", False), (0, "2m", False), (0, "0f", True)],
    *[(1, "5m", False), (1, "6m", False), (1, "3f", True), (1, "4f", True)],
]
"""What is trained and put aside in two steps of the tasks `fmmffmmm`."""


def test_flat_groups_are_replaced_counted_and_dumped(place):
    with_tasks(place, "fmmffmmm")
    whole = trained("output_dir=runs/whole", DYNAMIC)
    assert [line["dynamic_sampling"] for line in whole.lines] == [
        {"sampled": 3, "flat": 1, "replaced": 1},
        {"sampled": 4, "flat": 2, "replaced": 2},
    ]
    assert [line["trajectories"] for line in whole.lines] == [8, 8], "metrics are about what is trained"
    assert [line["groups_without_spread"] for line in whole.lines] == [0, 0]
    assert dumped("runs/whole/rollouts") == FOUND
    assert (place / "runs/whole/metrics.png").exists()


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_next_task(place):
    with_tasks(place, "fmmffmmm")
    trained("output_dir=runs/halves", "steps=1", DYNAMIC)
    trained("output_dir=runs/halves", DYNAMIC, resume=True)
    assert dumped("runs/halves/rollouts") == FOUND


@pytest.mark.slow
def test_when_the_budget_is_spent_flat_groups_fill_up_the_step(place):
    with_tasks(place, "fffffmff")
    result = trained("output_dir=runs/a", "steps=1", "dynamic_sampling={max_groups: 1.5}")
    assert result.lines[0]["dynamic_sampling"] == {"sampled": 3, "flat": 3, "replaced": 1}
    assert result.lines[0]["groups_without_spread"] == 1.0
    assert dumped("runs/a/rollouts") == [(0, "1f", False), (0, "2f", False), (0, "0f", True)]


@pytest.mark.slow
def test_a_group_without_scores_is_replaced_and_a_step_without_any_ends_the_run(place):
    with_tasks(place, "bmmbbbb")
    settings = [DYNAMIC, "output_dir=runs/a", "rollout.rollout_data_dir=dump"]
    with pytest.raises(TrainError, match=r"step 2: none of the trajectories can be trained on.*: no score"):
        trained(*settings)
    assert [line["dynamic_sampling"]["replaced"] for line in read_metrics(place / "runs/a/metrics.jsonl")] == [1]
    assert dumped("dump")[3:] == [(1, "5b", False), (1, "6b", False), (1, "3b", True), (1, "4b", True)]


@pytest.mark.exhaustive
def test_without_flat_groups_nothing_changes(place):
    with_tasks(place, "mmm")  # the second step begins with the second pass
    plain = trained("output_dir=runs/plain", "shuffle=true")
    dynamic = trained("output_dir=runs/dynamic", "shuffle=true", DYNAMIC)
    for one, other in zip(plain.lines, dynamic.lines, strict=True):
        assert (one["reward"], one["loss"], one["grad_norm"]) == (other["reward"], other["loss"], other["grad_norm"])
    ids = [[line.trajectory.request_id for line in read_dump(f"runs/{name}/rollouts")] for name in ("plain", "dynamic")]
    assert ids[0] == ids[1]


@pytest.mark.exhaustive
def test_the_command_shows_flat_groups(place):
    with_tasks(place, "fmmm")
    command = ["train", "-c", "train.yaml", "--out", "runs/a", "steps=1", "shuffle=false", DYNAMIC]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    header, line = [text for text in done.stderr.splitlines() if text.startswith("  ")][:2]
    assert (header.split()[-1], line.split()[-1]) == ("flat", "1/3")
    assert "groups of equal scores" in done.stdout


class TestRefused:
    def test_other_reward_functions(self, model, tmp_path):
        with ToolyardRollout(
            small_config(model, write_tasks(tmp_path / "tasks.jsonl")), stream=StreamSettings(DynamicSamplingConfig())
        ) as rollout:
            trainer = make_trainer(rollout, model, tmp_path / "out")
            trainer.reward_funcs = [rollout.reward, lambda **_: [0.0]]
            with pytest.raises(ConfigError, match=r"only reward function must be `rollout\.reward`"):
                rollout([rollout.dataset()[0]["prompt"]] * 4, trainer)
            trainer.reward_funcs = [rollout.reward]
            with pytest.raises(ConfigError, match="n is 2, but the trainer asks for 3 samples"):
                rollout([rollout.dataset()[0]["prompt"]] * 3, trainer)

    def test_a_cluster(self):
        with pytest.raises(ConfigError, match=r"dynamic_sampling: not supported with rollout\.cluster"):
            load_train_config(None, ["rollout.n=2", "rollout.cluster={}", "dynamic_sampling={}"])

    def test_a_budget_below_what_is_trained(self):
        with pytest.raises(ConfigError, match="max_groups"):
            load_train_config(None, ["rollout.n=2", "dynamic_sampling={max_groups: 0.5}"])
