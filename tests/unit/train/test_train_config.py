"""The settings of a training run, and what follows from them before anything heavy is loaded."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from late import Late
from toolyard.errors import ConfigError, RecordError
from toolyard.rollout.config import EMBEDDED as EMBEDDED_ROLLOUT
from toolyard.rollout.config import load_config
from toolyard.train.config import EMBEDDED, DynamicSamplingConfig, TrainConfig, load_train_config
from toolyard.train.metrics import MetricsFile
from toolyard.train.order import Position, TaskOrder
from toolyard.train.run_folder import POSITIONS, RunFolder, last_checkpoint, position_line, read_position, settings_of
from toolyard.train.trl.stopping import StopSignals

arguments = Late("toolyard.train.trl.arguments")
stream = Late("toolyard.train.trl.stream")

N4 = ["rollout.n=4"]


# Reading --------------------------------------------------------------------------------------------------------------


def test_the_embedded_settings_are_those_of_the_embedded_rollout_with_groups():
    config = load_train_config(EMBEDDED)
    rollout = load_config(EMBEDDED_ROLLOUT)
    assert config.rollout.prompt == rollout.prompt
    assert config.rollout.chat == rollout.chat
    assert config.rollout.n == 4
    assert config.rollout.tasks.limit is None
    assert config.lora is not None


def test_overrides_win_over_the_file_and_the_file_over_the_rollout_it_names(tmp_path):
    (tmp_path / "rollout.yaml").write_text("n: 3\nsampling: {top_p: 0.9, temperature: 0.5}\n")
    said = f"rollout_from: {tmp_path}/rollout.yaml\nrollout: {{sampling: {{top_p: 0.8}}}}\n"
    (tmp_path / "train.yaml").write_text(said)
    config = load_train_config(tmp_path / "train.yaml", ["rollout.sampling.temperature=0.7", "steps=7"])
    sampling = config.rollout.sampling
    assert (config.rollout.n, sampling.top_p, sampling.temperature, config.steps) == (3, 0.8, 0.7, 7)


def test_a_smoke_run_is_small_unless_somebody_says_otherwise():
    config = load_train_config(EMBEDDED, ["rollout.n=3"], smoke=True)
    assert (config.steps, config.prompts_per_step, config.rollout.n) == (1, 1, 3)


def test_rollouts_take_seed_and_device_from_the_run_unless_they_have_their_own():
    config = load_train_config(None, [*N4, "seed=5", "device=cpu"])
    assert (config.rollout.seed, config.rollout.engine.device) == (5, "cpu")
    own = load_train_config(None, [*N4, "seed=5", "rollout.seed=6", "rollout.engine.device=cuda", "device=cpu"])
    assert (own.rollout.seed, own.rollout.engine.device) == (6, "cuda")


def test_trajectories_are_dumped_below_the_run_unless_they_have_a_place_of_their_own():
    assert load_train_config(None, N4).with_output_dir("runs/a").rollout.rollout_data_dir == "runs/a/rollouts"
    own = load_train_config(None, [*N4, "rollout.rollout_data_dir=elsewhere"]).with_output_dir("runs/a")
    assert own.rollout.rollout_data_dir == "elsewhere"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stepz=3", "override 'stepz=3': unknown key; known here: output_dir, rollout, steps"),
        ("lora.rnk=3", "override 'lora.rnk=3': unknown key; known here: rank, alpha, targets"),
        ("rollout.engine.modl=x", "override 'rollout.engine.modl=x': unknown key.*known here: kind, model"),
        ("rollout=3", "override 'rollout=3': Input should be a valid dictionary"),
        ("prompts_per_step=0", "override 'prompts_per_step=0': Input should be greater than 0"),
        ("learning_rate=.inf", "override 'learning_rate=.inf': Input should be a finite number"),
        ("dynamic_sampling={max_groups: .inf}", "Input should be a finite number"),
        ("rollout.n=1", "rollout.n is 1: GRPO compares the samples of a task, so it must be at least 2: rollout.n=8"),
        ("rollout.sampling.temperature=0", "all samples would be equal"),
        ("rollout.engine.kind=openai", "'openai': it cannot sample from the weights being trained"),
        ("rollout.step=3", "rollout.step: only for `toolyard rollout`"),
        ("rollout.replay=a.tape", "rollout.replay: only for `toolyard rollout`"),
        ("warm_start={}", "warm_start: set either a dump to learn from or a script to play"),
        ("warm_start={dump: a, script: b}", "warm_start: set either a dump to learn from or a script to play"),
        ("warm_start={dump: a, tasks: b}", "warm_start.tasks 'b': only for a script"),
        ("evaluate={}", "evaluate.tasks: Field required"),
        ("steps=0", "steps is 0 and there is no warm_start"),
        ("rollout_from=3", "rollout_from: expected a file or 'embedded'"),
        ("rollout_from=none.yaml", "none.yaml: No such file"),
        ("steps", "expected key=value"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_way_out(override, told):
    with pytest.raises(ConfigError, match=told):
        load_train_config(None, [*N4, override])


# What follows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "n", "micro", "processes", "expected"),
    [
        (8, 8, 8, 1, (8, 8)),
        (8, 8, 8, 4, (8, 2)),
        (2, 4, 16, 1, (8, 1)),
        (3, 5, 4, 1, (3, 5)),
        (1, 7, 4, 1, (1, 7)),
    ],
)
def test_micro_batches_make_up_a_step_exactly(prompts, n, micro, processes, expected):
    config = load_train_config(None, [f"prompts_per_step={prompts}", f"rollout.n={n}", f"micro_batch_size={micro}"])
    found = arguments.Batches.of(config, processes)
    assert (found.micro_batch, found.accumulation) == expected
    assert found.micro_batch * found.accumulation * processes == prompts * n


def test_prompts_that_processes_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="prompts_per_step 8 is not a multiple of 3, the number of processes"):
        arguments.Batches.of(load_train_config(None, N4), 3)


def test_all_tasks_come_before_one_comes_again_and_more_steps_begin_alike():
    order = TaskOrder(5, seed=1, shuffle=True).first(12)
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert order[:5] != order[5:10]
    assert TaskOrder(5, seed=1, shuffle=True).first(30)[:12] == order
    assert TaskOrder(5, seed=2, shuffle=True).first(12) != order
    assert TaskOrder(3, seed=1, shuffle=False).first(7) == [0, 1, 2, 0, 1, 2, 0]


def test_processes_share_the_order_and_a_task_that_comes_twice_in_a_step_has_other_samples():
    tasks: Any = ["a", "b", "c"]
    order = TaskOrder(3, seed=0, shuffle=False)
    shares = [stream.StreamShare(order, tasks, 2, process, 2) for process in range(2)]
    assert [shares[0].at(place) for place in range(4)] == [("a", 0, 0), ("b", 0, 0), ("b", 1, 0), ("c", 1, 0)]
    assert [shares[1].at(place) for place in range(4)] == [("c", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 1, 1)]


@pytest.mark.parametrize(
    ("most", "groups", "spare"), [(1.2, 10, 2), (1.4, 5, 2), (2.0, 3, 3), (1.5, 3, 1), (1.0, 4, 0)]
)
def test_so_many_groups_may_be_replaced(most, groups, spare):
    assert DynamicSamplingConfig(max_groups=most).spare(groups) == spare


def test_a_budget_that_could_replace_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"max_groups 1\.5: with 1 per step .* at least 2"):
        DynamicSamplingConfig(max_groups=1.5).spare(1)


def test_the_position_of_each_process_is_found_again(tmp_path):
    file = tmp_path / POSITIONS
    with MetricsFile(file, steps=0) as positions:
        positions.write(position_line(1, [Position(4, (2, 3)), Position(5)]))
        positions.write(position_line(2, [Position(9), Position(8)]))
    assert read_position(file, 1, 0, 2) == Position(4, (2, 3))
    assert read_position(file, 2, 1, 2) == Position(8)
    assert read_position(file, 3, 0, 2) is None
    assert read_position(file, 1, 0, 1) is None, "another number of processes"
    assert read_position(tmp_path / "none", 1, 0, 1) is None


# The folder -----------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, step: int, *, whole: bool = True) -> None:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"...")
    if whole:
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return load_train_config(None, N4).with_output_dir(str(tmp_path))


def test_a_run_goes_on_from_the_last_checkpoint_that_is_whole_and_removes_the_others(tmp_path, config):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 20, whole=False)
    (tmp_path / "checkpoint-x").mkdir()
    notes: list[str] = []
    with RunFolder(tmp_path) as folder:
        found = folder.begin(config, resume=True, note=notes.append)
    assert found is not None
    assert found.step == 10
    assert not (tmp_path / "checkpoint-20").exists()
    assert any("checkpoint-20, which is incomplete" in note for note in notes)


def test_a_state_that_is_torn_makes_no_checkpoint(tmp_path):
    checkpoint(tmp_path, 3)
    (tmp_path / "checkpoint-3/trainer_state.json").write_text('{"global_step": 3')
    assert last_checkpoint(tmp_path) is None


def test_a_folder_with_a_run_is_not_written_over(tmp_path, config):
    checkpoint(tmp_path, 3)
    with (
        RunFolder(tmp_path) as folder,
        pytest.raises(ConfigError, match="already has a run, with a checkpoint of step 3:"),
    ):
        folder.begin(config, resume=False, note=print)


def test_an_attempt_that_ended_before_the_first_step_blocks_nothing(tmp_path, config):
    notes: list[str] = []
    with RunFolder(tmp_path) as folder:
        folder.begin(config, resume=False, note=notes.append)
    (tmp_path / "metrics.jsonl").touch()
    other = load_train_config(None, [*N4, "beta=0.1"]).with_output_dir(str(tmp_path))
    with RunFolder(tmp_path) as folder:
        assert folder.begin(other, resume=False, note=notes.append) is None
    assert notes == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with RunFolder(tmp_path) as folder, pytest.raises(ConfigError, match="already has a run, with no checkpoint:"):
        folder.begin(other, resume=False, note=notes.append)


def test_a_supervised_start_made_with_other_settings_is_not_used(tmp_path):
    def begin(*overrides: str, resume: bool = False) -> None:
        taught = "warm_start={dump: dump, epochs: 1}"
        config = load_train_config(None, [*N4, taught, *overrides]).with_output_dir(str(tmp_path))
        with RunFolder(tmp_path) as folder:
            folder.begin(config, resume=resume, note=print)

    begin()
    begin("warm_start.epochs=2")  # the first one did not get that far
    (tmp_path / "warm_start").mkdir()
    begin("warm_start.epochs=2", "steps=7", "learning_rate=0.1")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"warm_start was trained with other settings for warm_start\.epochs: re"):
            begin("warm_start.epochs=3", resume=resume)
    with pytest.raises(ConfigError, match=r"other settings for rollout\.engine\.model:"):
        begin("warm_start.epochs=2", "rollout.engine.model=another")
    checkpoint(tmp_path, 3)
    begin("warm_start.epochs=3", resume=True)  # it starts from the checkpoint


def test_two_runs_do_not_share_a_folder(tmp_path):
    with RunFolder(tmp_path), pytest.raises(RecordError, match="another run is writing"):
        RunFolder(tmp_path)


def test_settings_that_changed_are_told_and_secrets_are_not_kept(tmp_path, config):
    notes: list[str] = []
    with RunFolder(tmp_path) as folder:
        folder.begin(config, resume=False, note=notes.append)
        assert notes == []
        checkpoint(tmp_path, 3)
        more = ["steps=500", "beta=0.1", "rollout.limits.response_length=99", "rollout.engine.api_key=secret"]
        folder.begin(
            load_train_config(None, [*N4, *more]).with_output_dir(str(tmp_path)), resume=True, note=notes.append
        )
    assert f"{tmp_path} was started with other settings for beta, rollout.limits.response_length" in notes[-1]
    assert "secret" not in (tmp_path / "train.json").read_text()
    assert "api_key" not in settings_of(config)["rollout"]["engine"]


# Signals --------------------------------------------------------------------------------------------------------------


def test_the_first_signal_waits_for_the_step_and_the_second_of_its_kind_does_not():
    told: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(lambda: told.append("once")) as stopping:
        stopping.can_finish = True
        signal.raise_signal(signal.SIGINT)
        assert stopping.signal == signal.SIGINT
        signal.raise_signal(signal.SIGTERM)  # what launchers make of the same Ctrl-C
        assert told == ["once"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_that_was_lost_ends_it_at_the_next_opportunity():
    with StopSignals(lambda: None) as stopping:
        stopping.can_finish = True
        stopping.check()
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):  # as in a destructor
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stopping.check()


def test_where_there_is_no_step_to_finish_the_first_signal_ends_it():
    with StopSignals(lambda: None) as stopping, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert stopping.signal == signal.SIGTERM


def test_the_embedded_engine_is_not_flooded_with_requests_that_only_wait() -> None:
    assert load_config(None, ["engine.max_batch_size=4"]).in_flight == 8
    assert load_config(None, ["engine.kind=sglang"]).in_flight == 256
    assert load_config(None, ["concurrency=7"]).in_flight == 7
