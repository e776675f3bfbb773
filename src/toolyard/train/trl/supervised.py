"""The supervised start of a run: trained once and saved."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolyard.errors import ConfigError, TrainError
from toolyard.records.dump import dump_files, not_a_dump, read_dump
from toolyard.records.trajectory import Trajectory
from toolyard.rollout.assembly import tasks_of
from toolyard.rollout.config import EngineConfig, RolloutConfig
from toolyard.rollout.run import run_rollouts
from toolyard.train.config import TrainConfig, WarmStartConfig
from toolyard.train.observer import TrainObserver
from toolyard.train.run_folder import WARM_START
from toolyard.train.trl.arguments import is_mixed, load_model
from toolyard.train.trl.processes import Processes
from toolyard.train.trl.warm_start import warm_start


def supervised_start(
    config: TrainConfig, tokenizer: Any, observer: TrainObserver, processes: Processes, *, cpu: bool
) -> Path:
    """The folder with the model or adapter that the run starts from; trained first if it does not exist.

    Raises:
        ToolyardError: there is nothing to learn from, or the model is sharded.
    """
    assert config.output_dir is not None
    assert config.warm_start is not None
    settings, into = config.warm_start, Path(config.output_dir, WARM_START)
    if processes.broadcast(into.is_dir()):
        observer.note(f"the supervised start already exists: {into}")
        return into
    scratch = into.with_suffix(".new")
    trajectories = _teaching_trajectories(config, settings, observer, processes)
    model = load_model(config, observer)
    observer.note("supervised start")
    done = warm_start(
        model,
        tokenizer,
        trajectories,
        settings,
        output_dir=str(scratch),
        seed=config.seed,
        processes=processes.count,
        use_cpu=cpu,
        bf16=is_mixed(config, cpu=cpu),
        progress=lambda made, of, loss: _tell(observer, made, of, loss),
    )
    if any(hasattr(value, "full_tensor") for value in model.parameters()):
        raise TrainError(
            "warm_start cannot be saved if the model is sharded: run it in one process with steps=0, then continue "
            "with all processes"
        )
    refused = f", {len(done.refused)} were refused" if done.refused else ""
    refused += f", {done.below} were below min_score" if done.below else ""
    observer.note(f"trained on {done.samples} trajectories in {done.updates} updates, loss {done.loss:.3f}{refused}")
    if processes.is_main:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.rename(into)  # atomic
    processes.broadcast(None)
    return into


def _teaching_trajectories(
    config: TrainConfig, settings: WarmStartConfig, observer: TrainObserver, processes: Processes
) -> Iterable[Trajectory]:
    place = settings.dump
    if settings.script is not None:
        if not Path(settings.script).is_file():
            raise ConfigError(f"warm_start.script {settings.script!r}: no such file")
        played = _scripted(config.rollout, settings)
        place = played.rollout_data_dir
        if processes.is_main:
            observer.note(f"playing {settings.script}")
            shutil.rmtree(str(place), ignore_errors=True)  # left by a run that ended during this
            asyncio.run(run_rollouts(played))
        processes.broadcast(None)
        order = {task.id: index for index, task in enumerate(tasks_of(played))}
        trajectories = [dumped.trajectory for dumped in read_dump(str(place))]  # in the order in which they ended
        return sorted(trajectories, key=lambda one: order[one.batch_data_id])
    assert place is not None
    if not dump_files(place):
        raise TrainError(not_a_dump(place))
    return (dumped.trajectory for dumped in read_dump(place))


def _scripted(rollout: RolloutConfig, settings: WarmStartConfig) -> RolloutConfig:
    """The same tasks, tools and prompts, with the script in place of the model."""
    engine = EngineConfig(kind="scripted", model=rollout.engine.model, script=settings.script)
    tasks = rollout.tasks
    if settings.tasks is not None:
        tasks = tasks.model_copy(update={"path": settings.tasks, "limit": settings.limit})
    place = f"{rollout.rollout_data_dir}/{WARM_START}"
    return rollout.model_copy(update={"engine": engine, "tasks": tasks, "n": 1, "rollout_data_dir": place})


def _tell(observer: TrainObserver, made: int, of: int, loss: float | None) -> None:
    if made == of or made % max(1, of // 10) == 0:
        observer.note(f"supervised start: {made}/{of}" + ("" if loss is None else f", loss {loss:.3f}"))
