"""The trainer's callback: metrics, evaluations, and stopping on request."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers

from toolyard.errors import ConfigError, ToolyardError
from toolyard.messages import JSON
from toolyard.records.trajectory import Trajectory
from toolyard.train.config import EvaluateConfig, TrainConfig
from toolyard.train.metrics import EVALUATIONS, METRICS, Measure, MetricsFile, evaluation_line, step_line
from toolyard.train.observer import TrainObserver
from toolyard.train.run_folder import POSITIONS, position_line
from toolyard.train.trl.processes import Processes
from toolyard.train.trl.rollout import StepObserver, StepReport, ToolyardRollout
from toolyard.train.trl.stopping import StopSignals
from toolyard.train.trl.trackers import track


class TrainingCallback(transformers.TrainerCallback):
    """Called by the trainer in every process, at the same points. Only the main process writes."""

    def __init__(
        self,
        config: TrainConfig,
        observer: TrainObserver,
        reports: Reports,
        rollout: ToolyardRollout,
        stopping: StopSignals,
        processes: Processes,
        files: Mapping[str, MetricsFile] | None,
        draw: Callable[[], None],
    ) -> None:
        """
        Args:
            reports: Reports of the rollouts that are trained on.
            files: Files of steps, evaluations and the stream's positions by name; None in processes that do not write.
            draw: Redraws the plot.
        """
        self.trainer: Any = None
        """Set after its construction, which needs this callback."""
        self._config = config
        self._observer = observer
        self._reports = reports
        self._rollout = rollout
        self._stopping = stopping
        self._processes = processes
        self._files = files
        self._draw = draw
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._failed: ToolyardError | None = None
        """The error of an evaluation, which ends training once its checkpoint is saved."""

    # --------------------------------------------------------------------------------------------------------- the loop
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wanted = self._config.evaluate
        step = state.global_step
        if wanted is not None and (self._is_missed(step) if step else wanted.before):
            self._evaluate(step)
        self._observer.began(state.global_step, self._config.steps)
        self._stopping.can_finish = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._seconds = time.perf_counter() - self._began
        if state.global_step >= self._config.steps:
            control.should_save = True
        self._stop_if_requested(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: JSON | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:  # the final summary
            return
        measure = Measure.of_all(self._processes.gather(self._reports.taken()))
        line = step_line(state.global_step, measure, self._seconds, logs)
        positions = self._processes.gather(self._rollout.position)
        if self._files is not None:
            self._files[METRICS].write(line)
            if POSITIONS in self._files:  # before the checkpoint, so that each has a position
                self._files[POSITIONS].write(position_line(state.global_step, positions))
        self._observer.stepped(line)
        track(line, self.trainer, prefix="toolyard/")
        done = state.global_step >= self._config.steps
        if self._is_due(state.global_step):
            if control.should_training_stop and not done:
                return
            try:
                self._evaluate(state.global_step)
            except ToolyardError as error:
                if self._processes.count > 1:  # the others would wait
                    raise
                self._failed = error
                control.should_save = control.should_training_stop = True
                return
            self._stop_if_requested(control)  # the evaluation may have taken long

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._files is not None:
            self._draw()
        self._observer.saved(Path(args.output_dir, f"checkpoint-{state.global_step}"))
        if self._failed is not None:
            raise self._failed

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stopping.can_finish = False  # no step is left to finish

    # ------------------------------------------------------------------------------------------------------------ parts
    def _is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        wanted = self._config.evaluate
        return wanted is not None and (step >= self._config.steps or bool(wanted.every and step % wanted.every == 0))

    def _is_missed(self, step: int) -> bool:
        """Whether the evaluation after the step to resume from is missing: the run was stopped before it."""
        missed = self._files is not None and self._is_due(step) and step not in self._files[EVALUATIONS].kept_steps
        return self._processes.broadcast(missed)

    def _evaluate(self, step: int) -> None:
        assert self._config.evaluate is not None
        if self._config.rollout.engine.kind == "sglang":  # the evaluation gives the same servers new weights
            self._rollout.prepare_stream(self.trainer)
        mine = evaluate(self._config, self._config.evaluate, self.trainer, self._observer)
        line = evaluation_line(step, Measure.of_all(self._processes.gather(mine)))
        if self._files is not None:
            self._files[EVALUATIONS].write(line)
        self._observer.evaluated(line)
        track(line, self.trainer, prefix="eval_")

    def _stop_if_requested(self, control: Any) -> None:
        """Stop if any process was asked to: one that stops alone would leave the others waiting."""
        self._stopping.check()
        if any(self._processes.gather(self._stopping.wanted)):
            control.should_save = control.should_training_stop = True


# Evaluation -----------------------------------------------------------------------------------------------------------


def check_evaluation(config: TrainConfig) -> None:
    """
    Raises:
        ConfigError: the tasks of the evaluation cannot be read.
    """
    if config.evaluate is not None:
        try:
            ToolyardRollout(config.rollout.model_copy(update={"tasks": config.evaluate.tasks, "cluster": None}))
        except ToolyardError as error:
            raise ConfigError(f"evaluate.tasks: {error}") from error


def evaluate(config: TrainConfig, settings: EvaluateConfig, trainer: Any, observer: TrainObserver) -> Measure:
    """Play this process's share of the tasks with the trainer's current weights. All processes must call it together.

    Raises:
        ToolyardError: the engine or the tools cannot be opened.
    """
    sampling = config.rollout.sampling.model_copy(update={"temperature": settings.temperature})
    # The training's rollout serves metrics and writes logs for the whole process; its workers hold the cluster's GPUs.
    changed = dict.fromkeys(("metrics", "logs", "cluster"))
    changed |= {"tasks": settings.tasks, "sampling": sampling, "n": settings.n}
    reports = Reports(observer)
    if trainer.use_vllm:  # TRL does this before its own rollouts, but not for these
        trainer.vllm_generation.sync_weights()
    was_training = trainer.model.training
    trainer.model.eval()
    try:
        with ToolyardRollout(config.rollout.model_copy(update=changed), observer=reports) as rollout:
            every = [row["prompt"] for row in rollout.dataset() for _ in range(settings.n)]
            rollout(_share(every, trainer), _Evaluated(trainer, settings.temperature))
    finally:
        trainer.model.train(was_training)
    return reports.taken()


def _share(prompts: list[Any], trainer: Any) -> list[Any]:
    """This process's share of the prompts, as even as possible."""
    mine, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
    return prompts[len(prompts) * mine // processes : len(prompts) * (mine + 1) // processes]


class _Evaluated:
    """The trainer at another temperature, which is allowed for samples that are not trained on."""

    def __init__(self, trainer: Any, temperature: float) -> None:
        self._trainer = trainer
        self.args = copy.copy(trainer.args)
        self.args.temperature = temperature

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


# Reports --------------------------------------------------------------------------------------------------------------


class Reports(StepObserver):
    """Adds up the reports of this process's rollouts, and forwards progress to the observer."""

    def __init__(self, observer: TrainObserver) -> None:
        self._observer = observer
        self._measure = Measure()

    def note(self, text: str) -> None:
        self._observer.note(text)

    def begins(self, step: int, requests: int, evaluation: bool) -> None:
        self._observer.playing(step, requests, evaluation)

    def ended(self, trajectory: Trajectory) -> None:
        self._observer.ended(trajectory)

    def stepped(self, report: StepReport) -> None:
        self._measure = self._measure + Measure.of(report)
        self._observer.played()

    def taken(self) -> Measure:
        """The sum of all reports since the last call."""
        measure, self._measure = self._measure, Measure()
        return measure
