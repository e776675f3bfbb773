"""Where the metrics of training go: what trackers have on the disk afterwards, and what a collector received."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collector import collector
from toolyard.errors import ConfigError, MissingDependencyError
from toolyard.train.config import load_train_config
from toolyard.train.metrics import read_metrics
from training import make_model, make_place, toolyard

_BLOCK = 1 << 15
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the trackers and their protobufs


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path, model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_place(tmp_path, model)


def of_wandb(folder: Path) -> Iterator[dict[str, Any]]:
    """The history of an offline run, as its file has it: records of protobuf in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < 7 or not kind:
            at += left
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last piece
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.slow
def test_every_figure_of_a_step_reaches_the_trackers_and_every_request_the_collector(place, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from toolyard.train.trl.run import run_training

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_DIR", "WANDB_PROJECT"):  # restored afterwards: a run sets defaults
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with collector() as there:
        overrides = [
            "output_dir=runs/a", "steps=1", "tracker=[tensorboard, wandb]", f"rollout.otel={there.url}",
            "evaluate={tasks: {path: tasks.jsonl, limit: 1}}",
        ]  # fmt: skip
        result = run_training(load_train_config("train.yaml", overrides))
    (line,) = read_metrics(result.folder / "metrics.jsonl")

    (folder,) = (result.folder / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()

    def curve(tag: str) -> list[tuple[int, float]]:
        return [(event.step, pytest.approx(event.value, rel=1e-5)) for event in events.Scalars(tag)]

    assert curve("train/toolyard/reward") == [(1, line["reward"])]
    assert curve("train/toolyard/rewards/final") == [(1, line["rewards"]["final"])]
    assert curve("train/toolyard/seconds/rollout") == [(1, line["seconds"]["rollout"])]
    assert curve("eval/reward") == [(one["step"], one["reward"]) for one in result.evaluations]
    assert [one["step"] for one in result.evaluations] == [0, 1]
    reason = next(iter(line["finish_reasons"]))
    assert curve(f"train/toolyard/finish_reasons/{reason}") == [(1, line["finish_reasons"][reason])]
    assert len(curve("train/loss")) == 1  # TRL's own

    history = list(of_wandb(result.folder))
    rewards = {
        one["train/global_step"]: one["train/toolyard/reward"] for one in history if "train/toolyard/reward" in one
    }
    assert rewards == {1: line["reward"]}
    assert {one["train/global_step"] for one in history if "eval/reward" in one} == {0, 1}

    trajectories = 8 + 2 * 1
    assert len([span for span in there.spans if span.name == "request"]) == trajectories
    assert {span.attributes["toolyard.step"] for span in there.spans if span.name == "request"} == {0, 1}


@pytest.mark.exhaustive
def test_a_tracker_without_a_login_is_one_line(place, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(place / "none"))
    done = toolyard(place, "train", "-c", "train.yaml", "--out", "runs/a", "steps=1", "tracker=wandb")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"toolyard: tracker wandb: .*(login|API key)", " ".join(done.stderr.split())), done.stderr


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_before_anything_is_loaded(place, monkeypatch, name):
    from toolyard.train.trl.run import run_training

    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "meta_path", [_Absent(name), *sys.meta_path])
    with pytest.raises(MissingDependencyError, match=rf"pip install 'toolyard\[{name}\]'"):
        run_training(load_train_config("train.yaml", ["output_dir=runs/a", f"tracker={name}"]))
    assert not Path("runs").exists()


class _Absent:
    """As if the package were not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self._name:
            raise ModuleNotFoundError(name=name)


@pytest.mark.parametrize(
    ("override", "message"),
    [("tracker=mlflow", "tracker"), ("tracker=[wandb, x]", "tracker"), ("trl.report_to=wandb", "set tracker instead")],
)
def test_other_names_are_refused(place, override, message):
    from toolyard.train.trl.arguments import grpo_config

    with pytest.raises(ConfigError, match=message):
        grpo_config(load_train_config("train.yaml", [override, "output_dir=a"]), cpu=True, processes=1)
