"""`toolyard train` as a user runs it: taught, trained, resumed, killed, interrupted, in two processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from toolyard.chat.tokenizers.opening import load_tokenizer
from toolyard.cli.app import app
from toolyard.errors import EngineError, ToolyardError
from toolyard.records.audit import audit
from toolyard.records.dump import read_dump
from toolyard.train.config import load_train_config
from toolyard.train.metrics import read_metrics
from toolyard.train.observer import TrainObserver, TrainResult
from toolyard.train.run_folder import last_checkpoint
from training import command, make_model, make_place, toolyard

TAUGHT = "warm_start={script: script.json, epochs: 120, learning_rate: 5.0e-3, batch_size: 4, min_score: null}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path, model, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_place(tmp_path, model)


def trained(*overrides: str, resume: bool = False) -> TrainResult:
    """In this process, which has loaded everything already."""
    from toolyard.train.trl.run import run_training

    return run_training(load_train_config("train.yaml", overrides), resume=resume)


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl")]


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.kernel("confined")
def test_a_model_learns_to_call_its_tool_and_is_trained_on_what_the_sandbox_answers(place):
    evaluate = "evaluate={tasks: {path: tasks.jsonl, limit: 2}}"
    command = ["train", "-c", "train.yaml", "--out", "runs/a", TAUGHT, evaluate]
    done = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["steps"], said["interrupted"], said["model"]) == (2, False, "runs/a/model")
    before, after = said["evaluations"]
    assert (before["step"], after["step"]) == (0, 2)
    assert (before["tool_calls"], before["calls_ok"]) == (1.0, 1.0), "the lesson was learnt"
    lines = read_metrics(place / "runs/a/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["tool_calls"] > 0 and line["calls_ok"] > 0 for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines)
    assert all({"sync", "rollout", "update", "step"} == line["seconds"].keys() for line in lines)
    assert (place / "runs/a/metrics.png").read_bytes().startswith(b"\x89PNG")

    decode = load_tokenizer(place / "runs/a/model").decode
    dumped = [line.trajectory for line in read_dump(place / "runs/a/rollouts")]
    assert [trajectory.step for trajectory in dumped] == [0] * 8 + [1] * 8
    assert not [problem for trajectory in dumped for problem in audit(trajectory, decode)]
    assert any(message.content == "42\n" for one in dumped for message in one.messages), "the program really ran"
    assert len(list(read_dump(place / "runs/a/rollouts/eval"))) == 4

    # Its dumps know their settings, so what was played can be exported and scored as it was.
    export = ["export", "runs/a", "sft.jsonl", "--tokenizer", "runs/a/model", "--format", "prompt-completion"]
    exported = CliRunner().invoke(app, export, catch_exceptions=False)
    assert re.search(r"the template renders [1-9]\d* to exactly the sampled tokens\n", exported.stderr), exported.stderr
    assert (place / "runs/a/rollouts/eval/rollout.json").exists()

    # And once more from there: for one more step, which is all that is made.
    again = CliRunner().invoke(app, [*command, "--resume", "steps=3"], catch_exceptions=False)
    assert again.exit_code == 0, again.stderr
    assert "continuing after step 2" in again.stderr
    assert "the supervised start already exists" in again.stderr
    assert "1 step in" in again.stdout
    assert steps_of(place / "runs/a") == [1, 2, 3]


def test_a_full_disk_is_one_line_that_says_so(place, monkeypatch):
    def save(*_: object, **__: object) -> None:
        raise Exception("No space left on device (os error 28)")  # as the library of tokenizers raises it

    monkeypatch.setattr("toolyard.train.trl.run.grpo_config", save)
    why = r"no space left on device \(Exception: No space left on device \(os error 28\)\); free some space"
    with pytest.raises(ToolyardError, match=f"^{why}"):
        trained("output_dir=runs/a")
    monkeypatch.setattr("toolyard.train.trl.run._is_full", lambda _: True)
    with pytest.raises(ToolyardError, match=f"^cannot write to runs/a: {why}"):
        trained("output_dir=runs/a")


def same_model(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_killed_before_its_model_is_in_place_a_resumed_run_saves_it(place, monkeypatch):
    settings = ("output_dir=runs/a", "learning_rate=1e-2")
    trained(*settings, "steps=1")
    with monkeypatch.context() as patched:
        patched.setattr("toolyard.train.trl.run._Run._save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained(*settings, "steps=2", resume=True)
    run = place / "runs/a"
    assert not same_model(run / "model", run / "checkpoint-2")
    assert trained(*settings, "steps=2", resume=True).steps == 2
    assert same_model(run / "model", run / "checkpoint-2")
    (run / "model").rename(run / "model.old")  # killed in the middle of replacing it
    trained(*settings, "steps=2", resume=True)
    assert same_model(run / "model", run / "checkpoint-2")
    assert not [*run.glob("model.*")]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.exhaustive
def test_an_evaluation_that_fails_loses_no_step_and_one_that_is_missing_is_made_up(place, monkeypatch):
    settings = ["output_dir=runs/a", "save_every=50", "evaluate={tasks: {path: tasks.jsonl, limit: 1}, every: 2}"]

    def fail(*_: object) -> None:
        raise EngineError("the server is gone")

    with monkeypatch.context() as patched:
        patched.setattr("toolyard.train.trl.callbacks.evaluate", fail)
        with pytest.raises(EngineError, match="gone"):
            trained(*settings, "evaluate.before=false", "steps=2")
    found = last_checkpoint(place / "runs/a")
    assert found is not None
    assert found.step == 2
    result = trained(*settings, "steps=3", resume=True)
    assert [line["step"] for line in result.evaluations] == [2, 3]
    with pytest.raises(ToolyardError, match=r"evaluate\.tasks: .*tset\.jsonl: no such file"):
        trained("output_dir=runs/b", "evaluate={tasks: {path: tset.jsonl}, before: false}")
    assert not (place / "runs/b/rollouts").exists()


def test_what_a_script_teaches_is_in_the_order_of_its_tasks(place, monkeypatch):
    from toolyard.train.trl import supervised
    from toolyard.train.trl.processes import Processes

    monkeypatch.setattr(supervised, "read_dump", lambda path: reversed([*read_dump(path)]))
    config = load_train_config("train.yaml", ["warm_start={script: script.json}"]).with_output_dir("runs/a")
    assert config.warm_start is not None
    taught = supervised._teaching_trajectories(config, config.warm_start, TrainObserver(), Processes(cpu=True))
    assert [one.batch_data_id for one in taught] == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("trl.loss_type=foo", r"TRL fails with these settings \(trl: .*loss_type\): ValueError: .*foo"),
        ("trl.max_grad_norm=abc", r"TRL fails with these settings \(trl: .*max_grad_norm\): TypeError"),
        ("trl.num_iterations=0", r"TRL ended after 0 of 2 steps; is a setting in `trl` the reason\?"),
        ("trl.deepspeed=nope.json", r"TRL rejects these settings"),
        ("warm_start={script: nope.json}", r"warm_start\.script 'nope\.json': no such file"),
    ],
)
def test_what_only_the_trainer_notices_is_one_line_too(place, setting, error):
    with pytest.raises(ToolyardError, match=error) as found:
        trained("output_dir=runs/a", setting)
    assert "\n" not in str(found.value)


def test_settings_with_which_a_resumed_run_differs_are_told(place):
    notes: list[str] = []

    class Noting(TrainObserver):
        def note(self, text: str) -> None:
            notes.append(text)

    from toolyard.train.trl.run import run_training

    config = load_train_config("train.yaml", ["output_dir=runs/a", "steps=1", "trl.num_iterations=2"])
    run_training(config, Noting())
    assert [note for note in notes if "a resumed run will not equal one without an interruption" in note]


def test_stopped_at_once_it_names_the_folder_that_it_chose(place, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        (chosen,) = Path("training").iterdir()
        (chosen / "checkpoint-40").mkdir()
        (chosen / "checkpoint-40/trainer_state.json").write_text('{"global_step": 40}')
        raise KeyboardInterrupt(signal.SIGINT)

    monkeypatch.setattr("toolyard.train.trl.run.ToolyardRollout", stop)
    done = CliRunner().invoke(app, ["train", "-c", "train.yaml"])
    assert done.exit_code == 130
    assert re.search(r"stopped; --out training/\S+ --resume continues after step 40", " ".join(done.stderr.split()))


def test_a_folder_that_is_no_dump_teaches_nothing_and_its_subfolder_is_named(place):
    (place / "runs/old/rollouts").mkdir(parents=True)
    (place / "runs/old/rollouts/0.jsonl").touch()
    with pytest.raises(ToolyardError, match=r"runs/old is not a dump: .*; did you mean runs/old/rollouts\?"):
        trained("warm_start={dump: runs/old}")


@pytest.mark.exhaustive
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(place):
    whole = trained("output_dir=runs/whole", "steps=3", "save_every=10")
    trained("output_dir=runs/halves", "steps=1", "save_every=10")
    # Two steps: what the optimizer remembered shows in the second.
    halves = trained("output_dir=runs/halves", "steps=3", "save_every=10", resume=True)
    assert (halves.steps_before, halves.steps) == (1, 3)
    for one, other in zip(whole.lines, halves.lines, strict=True):
        assert (one["reward"], one["loss"], one["grad_norm"]) == pytest.approx(
            (other["reward"], other["loss"], other["grad_norm"]), rel=1e-4, abs=1e-6
        )

    # Killed after its last step, before the model was saved: that is all that is left to do.
    shutil.rmtree("runs/halves/model")
    again = trained("output_dir=runs/halves", "steps=3", resume=True)
    assert (again.steps_before, again.steps, again.lines) == (3, 3, halves.lines)
    saved, kept = Path("runs/halves/model/model.safetensors"), Path("runs/halves/checkpoint-3/model.safetensors")
    assert saved.read_bytes() == kept.read_bytes()


@pytest.mark.slow
def test_an_adapter_is_trained_saved_and_resumed_with_its_reference(place):
    settings = ["output_dir=runs/a", "lora={rank: 4}", "beta=0.1", "learning_rate=0.01"]
    trained(*settings)
    result = trained(*settings, "steps=3", resume=True)
    kl = [line["kl"] for line in result.lines]
    assert kl[0] == pytest.approx(0.0, abs=1e-6), "the first step begins where the reference is"
    assert kl[2] > kl[1] > 1e-6, "and what the adapter had learnt is there after the resume"
    assert result.model is not None
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in result.model.iterdir()}


@pytest.mark.slow
def test_two_processes_train_as_one_does(place):
    alone = trained("output_dir=runs/one")
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    arguments = ["--nproc-per-node", "2", *command("train", "-c", "train.yaml", "--out", "runs/two")]
    done = subprocess.run([torchrun, *arguments], cwd=place, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 steps in") == 1, "one process tells"
    both = read_metrics(place / "runs/two/metrics.jsonl")
    for one, other in zip(alone.lines, both, strict=True):
        assert one["trajectories"] == other["trajectories"] == 8
        assert (one["reward"], one["loss"], one["grad_norm"]) == pytest.approx(
            (other["reward"], other["loss"], other["grad_norm"]), rel=1e-3, abs=1e-5
        )
    assert len({line.trajectory.request_id for line in read_dump(place / "runs/two/rollouts")}) == 16


@pytest.mark.exhaustive
def test_two_processes_each_have_a_stream_of_groups(place):
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    ahead = ["asynchronous={max_staleness: 1}", "dynamic_sampling={}", "steps=3", "shuffle=false"]
    arguments = ["--nproc-per-node", "2", *command("train", "-c", "train.yaml", "--out", "runs/two", *ahead)]
    done = subprocess.run([torchrun, *arguments], cwd=place, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(place / "runs/two/metrics.jsonl")
    assert [(line["trajectories"], line["dynamic_sampling"]["sampled"]) for line in lines] == [(8, 2)] * 3
    assert max(line["staleness"]["max"] for line in lines) == 1
    dumped = [line.trajectory for line in read_dump(place / "runs/two/rollouts")]
    for process, order in enumerate(("t0 t2 t0", "t1 t3 t1")):
        played = [[one.batch_data_id for one in dumped if one.step == step][::4][process] for step in range(3)]
        assert sorted(played) == sorted(order.split()), "a step may overtake a slow group"
    positions = read_metrics(place / "runs/two/positions.jsonl")
    assert positions[-1]["processes"] == [{"next": 3, "waiting": []}] * 2


def test_a_smoke_test_is_one_step_on_two_samples(place):
    """Of the embedded model: `test_example_gsm8k_grpo`."""
    command = ["train", "-c", "train.yaml", "--smoke", "--out", "runs/a", "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["steps"], said["last"]["trajectories"], said["last"]["completed"]) == (1, 2, 2)


# Ending it ------------------------------------------------------------------------------------------------------------


def started(place: Path, *arguments: str, steps: int = 2, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A long run, with a session of its own, that has made so many steps."""
    run = [*launcher, *command("train", "-c", "train.yaml", "--out", "runs/a", "steps=1000", *arguments)]
    process = subprocess.Popen(
        run, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    metrics, deadline = place / "runs/a/metrics.jsonl", time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(process.communicate()[1])


def nobody_is_left(process: subprocess.Popen[str]) -> bool:
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_signal_finishes_the_step_saves_a_checkpoint_and_ends_with_a_summary(place):
    process = started(place, "save_every=1000")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Stopping after this step, with a checkpoint. Ctrl-C again to quit now." in err
    done = steps_of(place / "runs/a")
    assert re.search(rf"stopped at step {done[-1]} of 1000; --out runs/a --resume continues", out)
    found = last_checkpoint(place / "runs/a")
    assert found is not None
    assert found.step == done[-1] == len(done)
    assert nobody_is_left(process)


@pytest.mark.exhaustive
def test_a_signal_to_one_of_two_processes_stops_both(place):
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    process = started(place, "save_every=1000", launcher=[torchrun, "--nproc-per-node", "2"])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (second,) = (pid for pid in children if b"\0LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(int(second), signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    done = steps_of(place / "runs/a")
    assert f"stopped at step {done[-1]} of 1000; --out runs/a --resume continues" in out, err
    assert last_checkpoint(place / "runs/a") is not None
    assert nobody_is_left(process)


@pytest.mark.exhaustive
def test_the_second_signal_ends_it_at_once(place):
    long = ("rollout.sampling.max_tokens=400", "rollout.limits.response_length=400")
    process = started(place, "save_every=1000", *long, steps=1)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("Stopping after this step" in line for line in process.stderr)  # not later: the step may end meanwhile
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "stopped before the first checkpoint" in err
    assert last_checkpoint(place / "runs/a") is None
    assert nobody_is_left(process)


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_from_the_last_checkpoint(place):
    process = started(place, "save_every=1")
    process.kill()
    process.communicate(timeout=100)
    found = last_checkpoint(place / "runs/a")
    assert found is not None
    result = trained("output_dir=runs/a", f"steps={found.step + 2}", resume=True)
    assert result.steps_before == found.step
    assert steps_of(place / "runs/a") == list(range(1, found.step + 3)), "none twice, none lost"
    ids = [line.trajectory.request_id for line in read_dump(place / "runs/a/rollouts")]
    assert len(ids) == len(set(ids)) == 8 * (found.step + 2)


# Saying what is wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["stepz=3"], "override 'stepz=3': unknown key"),
        (["-c", "none.yaml"], "none.yaml: No such file"),
        (["trl.loss_typ=x"], r"trl.loss_typ: TRL .*GRPOConfig has no such setting; did you mean loss_type"),
        (["trl.temperature=1"], "trl.temperature: set rollout.sampling.temperature instead"),
        (["trl.learning_rate=1"], "trl.learning_rate: set learning_rate outside of `trl`"),
        (["trl.auto_find_batch_size=true"], "TRL rejects these settings: auto_find_batch_size is not supported"),
        (["trl.router_aux_loss_coef=1.0"], "TRL rejects these settings: `router_aux_loss_coef` is set to 1.0"),
        (["prompts_per_step=5"], "the file has 4 tasks, fewer than prompts_per_step 5"),
        (["device=cuda"], "device 'cuda': torch finds no GPU on this machine"),
        (["precision=mixed"], "precision 'mixed' is for GPUs"),
        (["lora={targets: [nothing]}"], r"lora.targets \('nothing',\): "),
        (["rollout.engine.model=nowhere"], "unknown model 'nowhere'"),
        (["warm_start={dump: nowhere}"], "cannot read nowhere"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_so(place, arguments, told):
    if "cuda" in arguments[0]:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU, and the test is about one that has not")
    given = arguments if "-c" in arguments else ["-c", "train.yaml", *arguments]
    with pytest.raises(ToolyardError, match=told):
        CliRunner().invoke(app, ["train", "--out", "runs/a", *given], catch_exceptions=False)


def test_without_the_extra_the_command_says_what_to_install(place):
    hidden = place / "hidden"
    hidden.mkdir()
    (hidden / "peft.py").write_text("raise ModuleNotFoundError(\"No module named 'peft'\", name='peft')\n")
    environment = {**os.environ, "PYTHONPATH": str(hidden)}
    run = command("train", "-c", "train.yaml", "--out", "runs/a")
    done = subprocess.run(run, cwd=place, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 1
    assert "training needs 'peft', which is not installed: pip install 'toolyard[trl]'" in done.stderr


def test_the_settings_can_be_seen_before_anything_is_loaded(place):
    done = toolyard(place, "train", "-c", "train.yaml", "--print-config", "rollout.n=6")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  n: 6$", done.stdout, re.MULTILINE)
    assert not (place / "training").exists()


def test_a_file_of_rollouts_is_taken_as_it_is_without_the_embedded_settings(place):
    (place / "rollout.yaml").write_text("n: 3\nsampling: {temperature: 0.9}\n")
    done = CliRunner().invoke(app, ["train", "rollout_from=rollout.yaml", "--print-config"], catch_exceptions=False)
    shown = yaml.safe_load(done.output)
    assert (shown["rollout"]["n"], shown["rollout"]["sampling"]["temperature"], shown["lora"]) == (3, 0.9, None)
